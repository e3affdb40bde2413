"""What an engine reports: metrics, log and KV events."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import anyio
import pytest
import zmq

from kvtier.bridge.client import SchedulerBridge
from kvtier.bridge.protocol import VERSION, Hello
from kvtier.bridge.watched import GATHER_SECONDS
from kvtier.cli.inspect_files import list_chunks
from kvtier.memory.keys import ChunkKey, chunk_keys, root_key
from kvtier.memory.layout import ChunkLayout, GroupLayout
from tests.rigs.cache_process import CHUNK, MIB, TIMEOUT_SECONDS, CacheProcess
from tests.rigs.router_index import RouterIndex
from tests.rigs.vllm.engine import ARGUMENTS, Engine
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import MakeCache, StartEngine

LENGTH, NEW = 1000, 32
CHUNKS = LENGTH // CHUNK
BLOCK = ARGUMENTS["block_size"]
TOKEN_BYTES = 4096
"""Bytes of KV per token of the small Llama in float32."""


def blocks(tokens: int) -> int:
    """Return how many of the tokens are in whole blocks."""
    return tokens - tokens % BLOCK


def test_metrics_and_log(llama: Path, cache: CacheProcess, start: StartEngine) -> None:
    with start(llama, cache, environment={"LMCACHE_CHUNK_SIZE": "256"}) as engine:
        engine.generate(prompt(LENGTH))
        cache.wait_until_stored(LENGTH)
        engine.reset_prefix_cache()
        engine.generate(prompt(LENGTH))
        metrics = engine.metrics()
    log = engine.log.read_text()
    assert log.count("no effect on kvtier: LMCACHE_CHUNK_SIZE; `kvtier config from-lmcache --env`") == 1
    reported = {
        name: metrics[f"kvtier_{name}"]
        for name in (
            "hit_tokens_total{ram}",
            "loaded_tokens_total",
            "loaded_bytes_total",
            "stored_tokens_total",
            "stored_bytes_total",
        )
    }
    tokens = CHUNKS * CHUNK
    assert reported == {
        "hit_tokens_total{ram}": tokens,
        "loaded_tokens_total": tokens,
        "loaded_bytes_total": tokens * TOKEN_BYTES,
        "stored_tokens_total": tokens,
        "stored_bytes_total": tokens * TOKEN_BYTES,
    }
    assert metrics["kvtier_load_seconds_total"] > 0
    assert metrics["kvtier_store_seconds_total"] > 0
    rest = f"missed: {LENGTH - tokens} shorter_than_a_block"
    assert re.search(
        rf"{tokens} of {LENGTH} tokens hit \(ram {tokens}\), 0 more in vLLM's own cache; {rest}", log
    )
    assert re.search(rf"stored {tokens} tokens for request \S+ in [\d.]+ ms \([\d.]+ GB/s\)", log)


@pytest.fixture
def events(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    """A subscriber of vLLM's KV events."""
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(f"ipc://{tmp_path}/events")
        yield subscriber


class Router:
    """Receives what vLLM publishes, and compares it with what the cache process holds."""

    def __init__(self, engine: Engine, cache: CacheProcess, events: zmq.Socket[bytes]) -> None:
        self._engine, self._cache, self._events = engine, cache, events
        self.index = RouterIndex()
        self.recorded: list[bytes] = []
        self._texts: list[list[int]] = []

    def generate(self, tokens: list[int]) -> None:
        """Have a prompt computed whose blocks are compared."""
        self._texts.append(tokens + self._engine.generate(tokens, NEW).tokens)

    def subscribe(self) -> None:
        """Wait until the subscription is active: what is published before that is lost."""
        other_prompts = (prompt(64, start=start) for start in count(10 * LENGTH, 64))
        while not self._events.poll(100):
            self._engine.generate(next(other_prompts))
        self.receive()

    def receive(self) -> None:
        while self._events.poll(20):
            self.recorded.append(self._events.recv_multipart()[2])
            self.index.apply(self.recorded[-1])

    def step_until(self, condition: Callable[[], object]) -> None:
        """Step until ``condition`` holds. Events are published after a step, and may come a step late."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self._cache.tail()
            self._engine.generate(prompt(20))
            self.receive()

    def held(self) -> dict[str, set[tuple[int, ...]]]:
        """Return the prefixes whose last block the catalog of the cache process holds in each medium."""
        # Some may be evicted before they are read.
        listed = anyio.run(list_chunks, self._cache.disk, 100, print).described
        root = root_key(bytes.fromhex(next(str(each["namespace"]) for each in listed if "namespace" in each)))
        chunks = {
            chunk_keys(root, text[:end], CHUNK, tail=True)[-1]: text[:end]
            for text in self._texts
            # Whole chunks, and the ends of prompt and answer.
            for prompt_end in [len(text) - NEW]
            for end in (
                *range(CHUNK, len(text), CHUNK),
                prompt_end,
                blocks(prompt_end),
                blocks(len(text) - 1),
            )
        }
        held: dict[str, set[tuple[int, ...]]] = {"CPU": set(), "STORAGE": set()}
        for key, tiers in self._tiers(list(chunks)).items():
            text = chunks[key]
            ends = range((len(text) - 1) // CHUNK * CHUNK + BLOCK, len(text) + 1, BLOCK)
            for bit, medium in ((1, "CPU"), (2, "STORAGE")):
                if tiers & bit:
                    held[medium] |= {tuple(text[:end]) for end in ends}
        return held

    def _tiers(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, int]:
        hello = Hello(
            VERSION, "test", "scheduler", 0, ChunkLayout(CHUNK, (GroupLayout(BLOCK, (64,)),)), bytes(32)
        )
        bridge = SchedulerBridge(hello, self._cache.socket)
        bridge.connect()
        try:
            bridge.watch(keys)
            time.sleep(3 * GATHER_SECONDS)
            bridge.poll()
            return bridge.take_held()
        finally:
            bridge.close()

    def published(self, index: RouterIndex | None = None) -> dict[str, set[tuple[int, ...]]]:
        """Return the same as routers know it, of the prompts that are compared."""
        starts = {tuple(text[:BLOCK]) for text in self._texts}
        return {
            medium: {prefix for prefix in (index or self.index).prompts(medium) if prefix[:BLOCK] in starts}
            for medium in ("CPU", "STORAGE")
        }


def test_routers_see_what_the_tiers_hold(
    llama: Path, make_cache: MakeCache, start: StartEngine, events: zmq.Socket[bytes], tmp_path: Path
) -> None:
    """Under eviction from vLLM, memory and disk, after a reset, and after the cache process was killed."""
    ssd = {"capacity": 12 * MIB, "write": "through"}
    cache = make_cache(ram={"capacity": 6 * MIB}, ssd=ssd, partial_chunks=True).start()
    prompts = [prompt(4 * CHUNK + 40, start=start) for start in range(0, 10 * LENGTH, LENGTH)]
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{tmp_path}/events"}
    with start(
        llama, cache, kv_events_config=config, kv_cache_memory_bytes=8 * MIB, max_model_len=1024
    ) as engine:
        router = Router(engine, cache, events)
        router.subscribe()
        for tokens in prompts:
            router.generate(tokens)
        router.step_until(lambda: router.published() == router.held())
        held = router.published()
        assert 0 < len(held["CPU"]) < len(held["STORAGE"]) < len(prompts) * (4 * CHUNK + 64) // BLOCK
        assert router.index.ignored == []
        assert held["STORAGE"] - router.index.prompts("GPU"), "held by kvtier only"
        replayed = RouterIndex()
        for payload in router.recorded:
            replayed.apply(payload)
        assert router.published(replayed) == held

        engine.reset_prefix_cache()
        router.step_until(lambda: router.index.resets and router.published() == router.held())

        cache.kill()
        router.step_until(lambda: router.published() == {"CPU": set(), "STORAGE": set()})
        cache.start()
        router.step_until(lambda: router.published() == {"CPU": set(), "STORAGE": held["STORAGE"]})
        router.step_until(lambda: router.published() == router.held())

        engine.reset_prefix_cache(external=True)
        router.step_until(lambda: router.published() == {"CPU": set(), "STORAGE": set()})
