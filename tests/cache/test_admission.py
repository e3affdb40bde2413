"""Admission to a real disk: what is written, what a restart keeps, faults, and the same in a simulation."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvtier import ChunkHints, ModelCache, Settings, TieredCache
from kvtier.catalog.catalog import State
from kvtier.catalog.tenants import EvictionScope
from kvtier.lab.simulation.trace import chunk_keys
from kvtier.memory.keys import ChunkKey
from kvtier.observability.whatif.simulated_cache import SimulatedCache, configured
from kvtier.pipeline.query import Query
from kvtier.settings import TierSettings
from kvtier.testing.faults import Fault, FaultyBackend
from tests.rigs.chunks import DictBackend
from tests.rigs.faulty_sources import BUILT_IN
from tests.rigs.small_disk import mounted
from tests.rigs.waiting import until

from .conftest import (
    CHUNK_OBJECT_BYTES,
    CHUNK_TOKENS,
    TOKEN_BYTES,
    MakeSettings,
    Prompt,
    headers,
    retrieve,
    rows,
)

pytestmark = pytest.mark.anyio
DISK = 1


@dataclass
class Opened:
    """An open cache with memory and a disk."""

    cache: TieredCache
    model: ModelCache

    async def store(self, tokens: list[int], hints: ChunkHints | None = None) -> None:
        assert await self.model.store(tokens, rows(tokens), hints) == len(tokens)

    async def retrieve(self, tokens: list[int], hints: ChunkHints | None = None) -> int:
        return await retrieve(self.model, tokens, hints)

    def forget(self, tokens: list[int]) -> None:
        """Drop a prompt from memory, as an eviction without demotion does."""
        self.cache.memory.drop(self.model.keys(tokens))

    async def evict_all(self) -> None:
        """Evict all chunks from memory."""
        while await self.cache._evicting._evict(sys.maxsize, EvictionScope.ALL):
            pass

    async def written(self) -> int:
        """Wait for all writes. Return the number of chunks on disk."""
        for _ in range(5):  # Chunks that are admitted later are queued in a task.
            await checkpoint()
        assert await self.cache.drain(60)
        return self.cache.catalog.count(DISK)

    @property
    def not_admitted(self) -> int:
        return self.cache.counts["not_admitted"]


@asynccontextmanager
async def opened(settings: Settings, *pools: Any) -> AsyncIterator[Opened]:
    """Open a cache. At the end, only the first tier may hold leases."""
    async with TieredCache.open(settings, plugins=BUILT_IN, pools=pools) as cache:
        yield Opened(cache, cache.model("llama", token_bytes=TOKEN_BYTES))
        await until(lambda: not (cache.pending_bytes or cache.arena.leases != cache.catalog.count(0)))
        assert not cache.status()["flights"]


def admitting(
    settings: MakeSettings, admit: str = "second_use", write: str = "through", **more: Any
) -> Settings:
    """Return settings whose first tier expects nothing: ``adaptive`` does, before it has learned."""
    return settings(memory={"eviction": "lru"}, disk={"admit": admit, "write": write}, **more)


async def test_second_lookup_writes_a_prompt_and_a_restart_keeps_it(
    settings: MakeSettings, prompt: Prompt
) -> None:
    twice, once = prompt(1024, seed=1), prompt(1024, seed=2)
    async with opened(admitting(settings)) as serving:
        await serving.store(twice)
        await serving.store(once)
        assert await serving.written() == 0
        assert await serving.retrieve(twice) == 1024
        assert await serving.written() == 4
        assert await serving.retrieve(twice) == 1024
        assert await serving.written() == 4
    assert serving.not_admitted == 4, "the prompt that was used once is not worth a write at shutdown either"
    async with opened(admitting(settings)) as serving:
        assert await serving.retrieve(once) == 0
        assert await serving.retrieve(twice) == 1024
        serving.forget(twice)
        assert await serving.retrieve(twice) == 1024


async def test_lookup_itself_queues_nothing(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(16 * 256)
    async with opened(admitting(settings)) as serving:
        await serving.store(tokens)
        found = serving.cache.look_up(Query(serving.model.keys(tokens)))
        assert (found.ready, serving.cache.pending_bytes) == (16, 0)
        found.release()
        assert await serving.written() == 16


async def test_prompt_that_is_stored_again_is_written(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1024)
    async with opened(admitting(settings)) as serving:
        await serving.store(tokens)
        serving.forget(tokens)
        await serving.store(tokens)
        assert await serving.written() == 4
        serving.forget(tokens)
        assert await serving.retrieve(tokens) == 1024


async def test_longer_prompt_writes_only_what_it_shares(settings: MakeSettings, prompt: Prompt) -> None:
    shared = prompt(512)
    async with opened(admitting(settings)) as serving:
        await serving.store(shared + prompt(512, seed=1))
        longer = shared + prompt(512, seed=2)
        assert await serving.retrieve(longer) == 512
        await serving.store(longer)
        assert await serving.written() == 2
        catalog, keys = serving.cache.catalog, serving.model.keys(longer)
        assert [catalog.state(key, DISK) for key in keys] == [State.READY] * 2 + [State.ABSENT] * 2


async def test_only_chunks_that_were_used_again_are_demoted(settings: MakeSettings, prompt: Prompt) -> None:
    twice, once = prompt(1024, seed=1), prompt(1024, seed=2)
    async with opened(admitting(settings, write="on_evict")) as serving:
        await serving.store(twice)
        await serving.store(once)
        assert await serving.retrieve(twice) == 1024
        assert await serving.written() == 0
        await serving.evict_all()
        assert (await serving.written(), serving.not_admitted) == (4, 4)
        assert serving.cache.counts["demoted"] == 4
        assert serving.cache.status()["counts"]["not_admitted"] == 4  # type: ignore[index]
        assert await serving.retrieve(twice) == 1024
        assert await serving.retrieve(once) == 0


async def test_memory_pressure_drops_what_was_used_once(settings: MakeSettings, prompt: Prompt) -> None:
    """Allocations need not wait for a demotion, because nothing is demoted."""
    async with opened(admitting(settings, write="on_evict", ram=16)) as serving:
        for seed in range(20):
            await serving.store(prompt(1024, seed=seed))
        assert await serving.written() == 0
        assert serving.not_admitted >= 20 * 4 - 16


@pytest.mark.parametrize("write", ["through", "on_evict"])
async def test_expected_prompts_are_written_on_their_first_use(
    settings: MakeSettings, prompt: Prompt, write: str
) -> None:
    prompts = [prompt(512, seed=seed) for seed in range(5)]
    hints = [
        None,
        ChunkHints(priority=1),
        ChunkHints(resume=600),
        ChunkHints(retention=600),
        ChunkHints("team"),
    ]
    async with opened(admitting(settings, "expected", write)) as serving:
        for tokens, given_hints in zip(prompts, hints, strict=True):
            await serving.store(tokens, given_hints)
        if write == "on_evict":
            assert await serving.written() == 0
            await serving.evict_all()
        assert await serving.written() == 3 * 2
    async with opened(admitting(settings, "expected", write)) as serving:
        assert [await serving.retrieve(tokens) for tokens in prompts] == [0, 512, 512, 512, 0]


async def test_pin_writes_a_prompt(settings: MakeSettings, prompt: Prompt) -> None:
    for admit, written in (("expected", 4), ("second_use", 0)):
        async with opened(admitting(settings, admit)) as serving:
            await serving.store(prompt(1024))
            assert serving.cache.pin(serving.model.keys(prompt(1024))) == 4
            assert await serving.written() == written
            await serving.cache.clear()


async def test_abandoned_store_is_no_use(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1024)
    async with opened(admitting(settings)) as serving:
        with anyio.CancelScope() as scope:  # Its task is cancelled before the chunks are copied.
            scope.cancel()
            await serving.store(tokens)
        assert scope.cancelled_caught
        await serving.store(tokens)
        assert await serving.written() == 0


async def test_cleared_before_its_write_is_queued(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1024)
    async with opened(admitting(settings)) as serving:
        await serving.store(tokens)
        found = serving.cache.look_up(Query(serving.model.keys(tokens)))
        found.release()
        await serving.cache.clear()
        assert await serving.written() == 0


async def test_full_write_queue_defers_what_is_admitted_later(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(32 * 256)
    configured_settings = settings(disk={"admit": "second_use", "queue": 2 * CHUNK_OBJECT_BYTES})
    async with opened(configured_settings) as serving:
        await serving.store(tokens)
        assert await serving.retrieve(tokens) == len(tokens)
        await until(lambda: serving.cache.catalog.count(DISK) == 32)
        assert serving.cache.counts["write_deferred"]


async def test_failed_write_is_made_up_for_on_eviction(settings: MakeSettings, prompt: Prompt) -> None:
    """As without admission: a chunk that is wanted and not below is demoted."""
    tokens, backend = prompt(1024), DictBackend()
    faulty = FaultyBackend(backend)
    pool = TierSettings(name="pool", type="shelf", admit="second_use")
    async with opened(settings(ssd=0), (pool, faulty)) as serving:
        await serving.store(tokens)
        faulty.fault = Fault.FULL
        assert await serving.retrieve(tokens) == 1024
        assert await serving.written() == 0
        assert serving.cache.counts["put_full"] == 4
        faulty.fault = None
        await serving.evict_all()
        assert await serving.written() == len(backend.held) == 4
        assert await serving.retrieve(tokens) == 1024


async def test_full_disk_keeps_what_is_admitted_last(
    settings: MakeSettings, prompt: Prompt, tmp_path: Path
) -> None:
    with mounted(tmp_path / "ssd", 2) as path:  # The tier's capacity is 10 MiB.
        configured_settings = settings(ram=256, ssd=512, disk={"path": str(path), "admit": "second_use"})
        async with opened(configured_settings) as serving:
            for seed in range(12):  # 3.75 MiB
                await serving.store(prompt(4096, seed))
                assert await serving.retrieve(prompt(4096, seed)) == 4096
                await serving.written()
            assert serving.cache.counts["put_full"]
        async with opened(configured_settings) as serving:
            held = serving.cache.catalog
            kept = [sum(key in held for key in serving.model.keys(prompt(4096, seed))) for seed in range(12)]
    assert kept[-1] >= 8, kept
    assert kept[0] == 0, kept


# The same decisions as in a simulation.

EVICT = "evict"
Words = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
Operations = st.lists(st.one_of(Words, Words, st.just(EVICT)), max_size=25)


class Pair:
    """A real cache and a simulated one with the same tiers, both large enough for every chunk."""

    def __init__(self, serving: Opened, settings: Settings) -> None:
        self.serving = serving
        tiers = configured(BUILT_IN, settings, None, {})
        self.simulated = SimulatedCache(BUILT_IN, tiers, CHUNK_OBJECT_BYTES)
        self.time = 0.0

    async def serve(self, keys: Sequence[ChunkKey], hints: ChunkHints | None) -> None:
        """Look a prompt up and store what is missing, in both."""
        self.time += 1
        cache = self.serving.cache
        found = cache.look_up(Query(keys, hints=hints))
        await cache.settle(found)
        missing = headers(keys)[found.ready :]
        reserved = cache.reserve_all(missing, [hints] * len(missing))
        cache.commit([reservation for reservation in reserved if reservation is not None])
        hits = found.ready
        found.release()
        await self.serving.written()
        assert hits == self.simulated.serve(self.time, keys, hints)

    async def evict(self) -> None:
        """Evict all that memory holds, in both."""
        await self.serving.evict_all()
        await self.serving.written()
        self.simulated._leased.clear()
        self.simulated._evict(0, self.simulated.catalog.victims(0))

    def compare(self) -> None:
        """Check that both hold and have written the same chunks, and that no chunk is without its parent."""
        real, simulated = self.serving.cache.catalog, self.simulated.catalog
        for tier in (0, DISK):
            assert set(real.keys(tier)) == set(simulated.keys(tier)), tier
        assert self.serving.cache.counts["put_ok"] == self.simulated.written[DISK]
        assert self.serving.not_admitted == self.simulated.not_admitted
        for key in real.keys(DISK):
            parent = real.parent(key)
            assert parent is None or parent in real


@pytest.mark.parametrize("write", ["through", "on_evict"])
@pytest.mark.parametrize("admit", ["first_use", "second_use", "expected"])
@hypothesis_settings(max_examples=10)
@given(operations=Operations, hinted=st.sets(st.integers(0, 24)))
def test_simulation_decides_alike(
    admit: str, write: str, operations: list[tuple[int, ...] | str], hinted: set[int]
) -> None:
    async def run(folder: str) -> None:
        tiers = [
            {"name": "ram", "type": "cpu", "capacity": 256 * CHUNK_OBJECT_BYTES},
            {
                "name": "ssd",
                "type": "disk",
                "path": folder,
                "capacity": 256 * CHUNK_OBJECT_BYTES,
                "deadline": "60s",
                "admit": admit,
                "write": write,
            },
        ]
        settings = Settings(chunk_tokens=CHUNK_TOKENS, tiers=tiers, prefetch={"policy": "wait"})  # type: ignore[arg-type]
        numbers: dict[tuple[int, ...], int] = {}
        async with opened(settings) as serving:
            pair = Pair(serving, settings)
            for at, operation in enumerate(operations):
                if isinstance(operation, str):
                    await pair.evict()
                else:
                    ends = [operation[: end + 1] for end in range(len(operation))]
                    keys = chunk_keys([numbers.setdefault(end, len(numbers)) for end in ends])
                    await pair.serve(keys, ChunkHints(priority=1) if at in hinted else None)
                pair.compare()

    with tempfile.TemporaryDirectory() as folder:
        anyio.run(run, folder)
