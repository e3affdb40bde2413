"""Measure the built-in eviction policies: microseconds per call, and bytes per chunk.

::

    python -m benchmarks.policies                      # 10,000 to a million chunks: two minutes
    python -m benchmarks.policies --chunks 10000000    # 3 GiB and a quarter of an hour

Prompts of 128 chunks, with the columns of a catalog but without its index. Lookups use randomly chosen
prompts. Then prompts replace 128 chunks each, evicted 16 at a time, as many as the tier holds. Bytes are
those of the policy's arrays after that, ghosts included. Times are CPU times of the thread: for lookups the
median and the 99th percentile, for additions and evictions means.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice

from blake3 import blake3

from benchmarks.catalog import PROMPT_CHUNKS
from benchmarks.common import parse, show
from kvtier.catalog import kvtier_eviction_policies
from kvtier.catalog.eviction import NO_PARENT, ChunkColumns, EvictionPolicy, RemovalReason
from kvtier.memory.keys import KEY_BYTES

CHUNK_BYTES = 4 << 20
BATCH = 16
LOOKUPS = 2000
SIZES = (10_000, 100_000, 1_000_000)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the eviction policies.")
    parser.add_argument("--chunks", type=int, nargs="*", default=SIZES, help="default: %(default)s")
    parser.add_argument("--policies", nargs="*", default=None, help="default: all built-in ones")
    options = parse(parser, chunks=[1000])
    built_in = kvtier_eviction_policies()
    for chunks in options.chunks:
        prompts = max(1, chunks // PROMPT_CHUNKS)
        rows = [(name, *measure(built_in[name], prompts)) for name in options.policies or built_in]
        columns = ("", "add", f"use of {PROMPT_CHUNKS}", "p99", "evict", "bytes per chunk")
        show(f"{prompts * PROMPT_CHUNKS:,} chunks, CPU µs", columns, rows)


def measure(policy_type: type[EvictionPolicy], prompts: int) -> Sequence[float]:
    """Return the figures of one row of the table."""
    tier = Tier(prompts)
    policy = policy_type.factory(capacity_bytes=prompts * PROMPT_CHUNKS * CHUNK_BYTES)(tier.columns)
    chance = random.Random(0)
    added = [timed(policy.added, prompt, 0.0) for prompt in tier.prompts]
    used = [timed(policy.used, chance.choice(tier.prompts), 1.0) for _ in range(LOOKUPS)]
    evicted = [seconds for _ in range(prompts) for seconds in tier.replace_prompt(policy)]
    return (
        statistics.fmean(added) / PROMPT_CHUNKS * 1e6,
        statistics.median(used) * 1e6,
        sorted(used)[len(used) * 99 // 100] * 1e6,
        statistics.fmean(evicted) / BATCH * 1e6,
        footprint(policy, tier.columns) / (prompts * PROMPT_CHUNKS),
    )


def footprint(policy: EvictionPolicy, columns: ChunkColumns) -> int:
    """Return the bytes of all objects of a policy, without the columns."""
    seen = {id(columns), *map(id, vars(columns).values())}
    pending: list[object] = list(vars(policy).values())
    size = 0
    while pending:
        item = pending.pop()
        if id(item) not in seen and not isinstance(item, type):
            seen.add(id(item))
            size += sys.getsizeof(item)
            pending += gc.get_referents(item)
    return size


class Tier:
    """The columns of a tier that is full of prompts."""

    def __init__(self, prompts: int) -> None:
        self.columns = ChunkColumns()
        self.prompts = [list(range(at * PROMPT_CHUNKS, (at + 1) * PROMPT_CHUNKS)) for at in range(prompts)]
        self._stored = 0
        for prompt in self.prompts:
            self.columns.keys += self._new_keys()
            self.columns.parents.extend([NO_PARENT, *prompt[:-1]])
            self.columns.lengths.extend([CHUNK_BYTES] * PROMPT_CHUNKS)

    def _new_keys(self) -> bytes:
        self._stored += 1
        return blake3(self._stored.to_bytes(8, "little")).digest(KEY_BYTES * PROMPT_CHUNKS)

    def replace_prompt(self, policy: EvictionPolicy) -> list[float]:
        """Evict as many chunks as a prompt has, and add another prompt. Return the seconds of each batch."""
        rows: list[int] = []
        seconds = []
        while len(rows) < PROMPT_CHUNKS:
            started = time.thread_time()
            victims = list(islice(policy.victims(), BATCH))
            policy.removed(victims, RemovalReason.EVICTED)
            seconds.append(time.thread_time() - started)
            rows += victims
        keys = self._new_keys()
        for at, (parent, row) in enumerate(zip([NO_PARENT, *rows], rows, strict=False)):
            self.columns.keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = keys[
                at * KEY_BYTES : (at + 1) * KEY_BYTES
            ]
            self.columns.parents[row] = parent
        policy.added(rows, 2.0)
        return seconds


def timed(call: Callable[[Sequence[int], float], None], rows: Sequence[int], now: float) -> float:
    started = time.thread_time()
    call(rows, now)
    return time.thread_time() - started


if __name__ == "__main__":
    main()
