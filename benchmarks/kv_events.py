"""Measure what a step of the scheduler does for KV events when many chunks are new or change their tiers.

::

    python -m benchmarks.kv_events                  # 1,000 chunks
    python -m benchmarks.kv_events --chunks 262144  # as many as an engine tracks

The cache process is replaced by its reports, one in each step. Needs vLLM, whose block pool makes the events,
but no engine.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from benchmarks.common import parse, show
from kvtier.bridge.watched import MAX_REPORTED
from kvtier.integrations.vllm.kv_events import EngineBlocks, KVEvents
from kvtier.integrations.vllm.request import RequestState, request_root
from kvtier.memory.keys import ChunkKey
from kvtier.memory.layout import ChunkLayout, GroupLayout

BLOCK_TOKENS, CHUNK_TOKENS = 16, 256
PROMPT_CHUNKS = 100
CHANGES = {"stored in memory": 0b01, "written to disk": 0b11, "evicted from memory": 0b10, "removed": 0}


class Bridge:
    """Takes the place of the bridge to a cache process."""

    def __init__(self) -> None:
        self.connections, self.epoch, self.accepts_requests = 1, 1, True
        self.welcome = SimpleNamespace(media=["cpu", "disk"])
        self.held: dict[ChunkKey, int] = {}

    def watch(self, keys: Sequence[ChunkKey], forget: Sequence[ChunkKey]) -> bool:
        """Ignore what is watched: the benchmark sets :attr:`held`."""
        return True

    def take_held(self) -> dict[ChunkKey, int]:
        """Return the reports."""
        held, self.held = self.held, {}
        return held


def open_events(bridge: Any) -> KVEvents:  # noqa: ANN401 - a stand-in
    """Return the events of an engine with one group of full attention."""
    pool = BlockPool(16, True, BLOCK_TOKENS, enable_kv_cache_events=True)
    manager: Any = SimpleNamespace(block_pool=pool, kv_cache_event_metadata=(("full_attention", None),))
    layout = ChunkLayout(CHUNK_TOKENS, (GroupLayout(BLOCK_TOKENS, (64,)),))
    model: Any = SimpleNamespace(layout=layout, group_ids=(0,))
    return KVEvents(bridge, CHUNK_TOKENS, EngineBlocks(manager, model, 0))


def prompt(number: int, chunks: int) -> RequestState:
    """Return a request whose tokens no other one has."""
    tokens = chunks * CHUNK_TOKENS
    request = Request(
        request_id=str(number),
        prompt_token_ids=list(range(number * tokens, (number + 1) * tokens)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256_cbor),
    )
    state = RequestState(request, request_root(bytes(32), request), CHUNK_TOKENS)
    state.extend(tokens)
    return state


def step_times(
    name: str, events: KVEvents, bridge: Bridge, reports: Mapping[ChunkKey, int]
) -> tuple[object, ...]:
    """Run steps, with a report in each, until all changes are published; return a row with their times."""
    seconds: list[float] = []
    left = iter(reports.items())
    while True:
        bridge.held = dict(islice(left, MAX_REPORTED))
        started = time.perf_counter()
        published = events.take()
        seconds.append(time.perf_counter() - started)
        if not (published or events._prompts or events._unwatched):
            break
    milliseconds = [1000 * each for each in seconds[:-1] or seconds]
    return (
        name,
        len(milliseconds),
        statistics.median(milliseconds),
        max(milliseconds),
        sum(milliseconds),
    )


def main() -> None:
    """Print the times of the steps for each change."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=1000)
    chunks = parse(parser, chunks=256).chunks
    init_none_hash(sha256_cbor)
    gc.freeze()  # As vLLM does at the end of its start: a full collection visits the rest only.
    bridge = Bridge()
    events = open_events(bridge)
    keys: list[ChunkKey] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(chunks // PROMPT_CHUNKS):
        state = prompt(number, PROMPT_CHUNKS)
        keys += state.keys
        events.add(state, 0, state.keys, PROMPT_CHUNKS * CHUNK_TOKENS)
        if chunks > 10_000:
            while events._prompts:
                events.take()
    rows = [step_times("described", events, bridge, {})]
    for name, tiers in CHANGES.items():
        rows.append(step_times(name, events, bridge, dict.fromkeys(keys, tiers)))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = (after - before) * 1024 / len(keys)
    title = f"{len(keys):,} chunks of {memory:,.0f} bytes, ms per step"
    show(title, ("", "steps", "median", "longest", "all"), rows)


if __name__ == "__main__":
    main()
