"""Checksums in a whole cache: one hash per chunk, and a corrupt chunk in memory affects no other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from kvtier import Settings, TieredCache
from kvtier.backends.base import Outcome
from kvtier.events import Store
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, is_sealed
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Leases
from kvtier.settings import TierSettings
from tests.rigs.chunks import DictBackend
from tests.rigs.faulty_sources import BUILT_IN
from tests.rigs.hashing import Hashing
from tests.rigs.waiting import until

from .conftest import CHUNK_OBJECT_BYTES, MakeSettings, Prompt, store

pytestmark = pytest.mark.anyio


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hashing]:
    hashing = Hashing(monkeypatch)
    yield hashing
    hashing.resume.set()


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[TieredCache]:
    """Open a cache with these settings and a pool named ``pool``. At the end, check for leaked leases."""
    pool = TierSettings(name="pool", type="shelf", write="through")
    async with TieredCache.open(settings, plugins=BUILT_IN, pools=[(pool, DictBackend())]) as cache:
        yield cache
        await until(lambda: not (cache.pending_bytes or cache.arena.leases != cache.catalog.count(0)))


def corrupt(cache: TieredCache, key: ChunkKey, at: int = 30) -> None:
    """Flip a bit of a chunk in memory."""
    lease = cache.memory.lease(key)
    assert lease is not None
    lease.view[at] ^= 1
    lease.release()


def headers(cache: TieredCache, keys: list[ChunkKey]) -> list[bytes]:
    """Return the current headers of chunks in memory."""
    chunks = cache.memory.lease_ready(keys)
    found = [bytes(chunk.lease.view[:HEADER_BYTES]) for chunk in chunks]
    for chunk in chunks:
        chunk.lease.release()
    return found


def held(cache: TieredCache, keys: list[ChunkKey], tier: str) -> list[int]:
    """Return the numbers of the chunks that are READY in a tier."""
    index = cache.index_of(tier)
    return [at for at, key in enumerate(keys) if index in cache.catalog.tiers(key)]


async def test_each_payload_is_hashed_once_for_all_tiers(
    settings: MakeSettings, prompt: Prompt, hashing: Hashing
) -> None:
    async with opened(settings()) as cache:
        keys = store(cache, prompt(2048))
        assert await cache.drain(10)
        for tier in ("ram", "ssd", "pool"):
            assert held(cache, keys, tier) == list(range(8))
        assert hashing.count == 8
        assert await cache.move(keys, "ssd", "ram", copy=True) == 8
        assert hashing.count == 8


async def test_chunks_are_not_written_before_they_are_sealed(
    settings: MakeSettings, prompt: Prompt, hashing: Hashing
) -> None:
    """Write-through to two tiers and a copy to a third share one hash and one header per chunk."""
    hashing.resume.clear()
    configured = settings()
    spare = {"name": "spare", "type": "cpu", "capacity": 64 * CHUNK_OBJECT_BYTES, "write": "never"}
    async with opened(configured.model_copy(update={"tiers": [*configured.tiers, spare]})) as cache:
        keys = store(cache, prompt(1024))
        unsealed = headers(cache, keys)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: cache.move(keys, "ram", "spare", copy=True))
            await hashing.wait_until_started(1)
            await anyio.wait_all_tasks_blocked()
            assert headers(cache, keys) == unsealed
            for tier in ("ssd", "pool", "spare"):
                assert held(cache, keys, tier) == []
            hashing.resume.set()
        assert await cache.drain(10)
        for tier in ("ssd", "pool", "spare"):
            assert held(cache, keys, tier) == [0, 1, 2, 3]
        assert hashing.count == 4
        spare_backend = cache.tiers[cache.index_of("spare")].backend
        for key in keys:
            view = memoryview(bytearray(CHUNK_OBJECT_BYTES))
            assert list(await spare_backend.get([(key, view)])) == [Outcome.OK]
            assert is_sealed(view)
            assert ChunkHeader.verify(view, key)


async def assert_still_stores(cache: TieredCache, tokens: list[int]) -> None:
    """Assert that new chunks are stored in every tier."""
    keys = store(cache, tokens)
    assert await cache.drain(10)
    for tier in ("ssd", "pool"):
        assert held(cache, keys, tier) == list(range(len(keys)))


@pytest.mark.parametrize("at", [0, 10, 30, 60, 100, 140, 200])
@pytest.mark.parametrize("checksum", [True, False])
async def test_corrupt_chunk_affects_no_other_on_write_through(
    settings: MakeSettings, prompt: Prompt, at: int, checksum: bool
) -> None:
    async with opened(settings(checksum=checksum)) as cache:
        keys = store(cache, prompt(1024))
        corrupt(cache, keys[1], at)
        assert await cache.drain(10)
        for tier in ("ram", "ssd", "pool"):
            assert held(cache, keys, tier) == [0, 2, 3]
        assert cache.memory.sealer.corrupt >= 1
        assert cache.counts["put_miss"] >= 1
        assert [tier.outages for tier in cache.tiers] == [0, 0, 0]
        await assert_still_stores(cache, prompt(1024, 1))


async def test_corrupt_chunk_affects_no_other_on_demotion(settings: MakeSettings, prompt: Prompt) -> None:
    async with TieredCache.open(settings(ram=8, disk={"write": "on_evict"}), plugins=BUILT_IN) as cache:
        first = store(cache, prompt(1024))
        corrupt(cache, first[1])
        for seed in (1, 2, 3):
            with anyio.fail_after(10):
                while not (leases := cache._allocator.allocate_all([CHUNK_OBJECT_BYTES] * 4))[3:]:
                    Leases.of(leases).release_all()
                    await anyio.sleep(0.01)
            Leases.of(leases).release_all()
            later = store(cache, prompt(1024, seed))
        assert held(cache, first, "ram") == []
        assert held(cache, first, "ssd") == [0, 2, 3]
        assert held(cache, later, "ram") == [0, 1, 2, 3]
        assert cache.memory.sealer.corrupt == 1
        assert cache.tiers[1].outages == 0


async def test_corrupt_chunk_affects_no_other_on_move(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings(disk={"write": "never"})) as cache:
        keys = store(cache, prompt(1024))
        assert await cache.drain(10)
        corrupt(cache, keys[2])
        assert await cache.move(keys, "ram", "ssd") == 3
        assert held(cache, keys, "ssd") == [0, 1, 3]
        assert held(cache, keys, "ram") == []
        assert cache.memory.sealer.corrupt == 1


async def test_corrupt_chunk_affects_no_other_on_close(
    settings: MakeSettings, prompt: Prompt, tmp_path: Path
) -> None:
    configured = settings(disk={"write": "on_evict"})
    async with TieredCache.open(configured, plugins=BUILT_IN) as cache:
        keys = store(cache, prompt(1024))
        corrupt(cache, keys[0])
    async with TieredCache.open(configured, plugins=BUILT_IN) as cache:
        assert held(cache, keys, "ssd") == [1, 2, 3]


async def test_only_the_corrupt_copy_is_dropped(settings: MakeSettings, prompt: Prompt) -> None:
    """A corrupt copy elsewhere in memory does not invalidate the chunk in the tier."""
    async with opened(settings()) as cache:
        keys = store(cache, prompt(256))
        assert await cache.drain(10)
        lease = cache.arena.allocate(CHUNK_OBJECT_BYTES)
        assert lease is not None
        lease.view[:HEADER_BYTES] = bytes(HEADER_BYTES)
        assert await cache.memory.sealer.seal([(keys[0], lease.view)]) == [None]
        lease.release()
        assert held(cache, keys, "ram") == [0]


async def test_cleared_chunk_is_not_written(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings(disk={"write": "never"})) as cache:
        keys = store(cache, prompt(512))
        assert await cache.drain(10)
        chunks = cache.memory.lease_ready(keys)
        await cache.clear(keys[:1])
        outcomes = await cache._writer.write(Store(keys=keys), 1, chunks)
        assert list(outcomes) == [Outcome.MISS, Outcome.OK]
        assert held(cache, keys, "ssd") == [1]
