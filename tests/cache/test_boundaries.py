"""Lookups of models with states: all chunks up to a state, or none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.catalog.catalog import State
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey, chunk_keys, root_key, state_key
from kvtier.pipeline.found import FoundPrefix
from kvtier.pipeline.query import Expected, Query
from kvtier.testing.noise import noise
from tests.rigs.faulty_sources import CacheHarness, opened
from tests.rigs.waiting import until

from .conftest import MakeSettings

pytestmark = pytest.mark.anyio

SPACE = bytes(32)
ROOT = root_key(SPACE)
KEYS = chunk_keys(ROOT, range(6), 1)
CHUNK, STATE = 10_000, 30_000


def store(harness: CacheHarness, *, states: list[int], keys: list[ChunkKey] = KEYS) -> None:
    """Store chunks in memory, and the states at the ends of some of them."""
    parents = [ROOT, *keys]
    headers = [ChunkHeader(key, parent, SPACE, CHUNK) for parent, key in zip(parents, keys, strict=False)]
    headers += [ChunkHeader(state_key(keys[at]), keys[at], SPACE, STATE) for at in states]
    for header in headers:
        reservation = harness.cache.reserve(header)
        assert reservation is not None
        reservation.lease.view[HEADER_BYTES : HEADER_BYTES + header.payload_bytes] = noise(
            header.key, header.payload_bytes
        )
        harness.cache.commit([reservation])


def expected(count: int = len(KEYS)) -> Expected:
    return Expected(SPACE, [object_bytes(CHUNK)] * count)


async def look_up(harness: CacheHarness) -> FoundPrefix:
    """Look up the prompt, and wait for what is in flight."""
    found = harness.cache.look_up_state(Query(KEYS), expected(), object_bytes(STATE))
    await harness.cache.settle(found)
    return found


def contents(found: FoundPrefix) -> list[ChunkKey]:
    """Check the bytes of all chunks of a lookup. Return their keys, and release them."""
    keys = [chunk.key for chunk in found.chunks]
    for chunk in found.chunks:
        length = STATE if chunk is found.chunks[-1] else CHUNK
        assert chunk.arrived
        assert bytes(chunk.lease.view[HEADER_BYTES : HEADER_BYTES + length]) == noise(chunk.key, length)
    found.release()
    return keys


@pytest.mark.parametrize(
    ("states", "chunks"), [([], 0), ([2], 3), ([0, 2], 3), ([5], 6)], ids=["none", "middle", "two", "end"]
)
async def test_lookup_ends_at_the_last_state(settings: MakeSettings, states: list[int], chunks: int) -> None:
    async with opened(settings) as harness:
        store(harness, states=states)
        boundary = [*KEYS[:chunks], state_key(KEYS[chunks - 1])] if chunks else []
        assert contents(await look_up(harness)) == boundary


async def test_state_beyond_a_missing_chunk_is_not_used(settings: MakeSettings) -> None:
    async with opened(settings) as harness:
        store(harness, states=[1, 4])
        harness.cache.memory.drop([KEYS[3]])
        assert contents(await look_up(harness)) == [*KEYS[:2], state_key(KEYS[1])]


async def test_chunks_behind_those_that_are_held_are_reported_as_missed(
    settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To eviction policies: what is stored without that was offered again at the end of an answer."""
    async with opened(settings) as harness:
        store(harness, states=[1], keys=KEYS[:4])
        missed: list[Sequence[ChunkKey]] = []
        monkeypatch.setattr(harness.cache.catalog, "report_missed", lambda keys, _: missed.append(keys))
        contents(await look_up(harness))
        assert missed == [KEYS[4:]]


async def test_state_is_evicted_before_its_chunk(settings: MakeSettings) -> None:
    async with opened(settings) as harness:
        store(harness, states=[2, 5])
        catalog = harness.cache.catalog
        victims = catalog.victims(0)
        assert victims.index(state_key(KEYS[5])) < victims.index(KEYS[5])
        assert victims.index(state_key(KEYS[2])) < victims.index(KEYS[2])


async def test_disk_is_read_up_to_the_state(settings: MakeSettings) -> None:
    async with opened(settings, ssd=64) as harness:
        store(harness, states=[3])
        assert await harness.cache.drain(60)
        catalog = harness.cache.catalog
        harness.cache.memory.drop(catalog.keys(0))
        found = harness.cache.look_up_state(Query(KEYS), expected(), object_bytes(STATE))
        assert (found.in_flight, found.take_ready()) == (5, [])
        await harness.cache.settle(found)
        assert contents(found) == [*KEYS[:4], state_key(KEYS[3])]
        assert catalog.state(KEYS[4], 0) is State.ABSENT, "it is not part of the hit"


async def test_number_of_needed_chunks_is_known_before_they_arrive(settings: MakeSettings) -> None:
    """With fewer, what an engine was granted before is useless: the last one would not be the state."""
    async with opened(settings, ssd=64) as harness:
        store(harness, states=[3])
        assert await harness.cache.drain(60)
        harness.cache.memory.drop([KEYS[2], state_key(KEYS[3])])
        found = harness.cache.look_up_state(Query(KEYS), expected(), object_bytes(STATE))
        assert (found.in_flight, found.ready, found.needed) == (3, 2, 5)
        await harness.cache.settle(found)
        assert contents(found) == [*KEYS[:4], state_key(KEYS[3])]


@pytest.mark.parametrize("lost", [KEYS[1], state_key(KEYS[3])], ids=["chunk", "state"])
async def test_all_or_nothing(settings: MakeSettings, lost: ChunkKey) -> None:
    """Without one of its chunks, or without its state, the others are of no use."""
    async with opened(settings, "pool") as harness:
        store(harness, states=[3])
        await to_pool(harness, [*KEYS[:4], state_key(KEYS[3])])
        found = harness.cache.look_up_state(Query(KEYS), expected(), object_bytes(STATE))
        del harness.sources["pool"].pool.held[lost]
        await harness.cache.settle(found)
        assert contents(found) == []


async def test_pools_are_asked_for_chunks_and_states(settings: MakeSettings) -> None:
    """The pool holds more than this host knows."""
    async with opened(settings, "pool") as harness:
        store(harness, states=[1, 4])
        await to_pool(harness, [*KEYS[2:], state_key(KEYS[4])], known=False)
        assert contents(await look_up(harness)) == [*KEYS[:5], state_key(KEYS[4])]


async def test_pool_without_chunks_has_no_states(settings: MakeSettings) -> None:
    """Nothing is left to ask it for: a query that nobody awaits would be an error here."""
    async with opened(settings, "pool") as harness:
        assert contents(await look_up(harness)) == []


async def test_silent_pool_costs_only_its_own_chunks(settings: MakeSettings) -> None:
    async with opened(settings, "pool") as harness:
        store(harness, states=[1])
        harness.hang("pool")
        assert contents(await look_up(harness)) == [*KEYS[:2], state_key(KEYS[1])]


async def test_abandoned_lookup_leaves_no_lease(settings: MakeSettings) -> None:
    async with opened(settings, "pool") as harness:
        store(harness, states=[1])
        harness.hang("pool")
        found = harness.cache.look_up_state(Query(KEYS), expected(), object_bytes(STATE))
        found.release()
        harness.resume("pool")
        await harness.wait_until_idle()


async def to_pool(harness: CacheHarness, keys: list[ChunkKey], *, known: bool = True) -> None:
    """Move objects from memory to the pool; with ``known``, the catalog lists them."""
    cache = harness.cache
    for key in keys:
        lease = cache.memory.lease(key)
        assert lease is not None
        sealed = bytearray(lease.view)
        lease.release()
        ChunkHeader.parse(memoryview(sealed)).seal(memoryview(sealed))
        harness.sources["pool"].pool.held[key] = bytes(sealed)
        if known:
            cache.catalog.add(key, harness.tier("pool").index, len(sealed), State.READY)
    cache.memory.drop(keys)


async def test_continued_session_keeps_its_last_two_states(settings: MakeSettings) -> None:
    """The third turn continues at the fifth chunk: nothing but a branch needs the states before that."""
    async with opened(settings, ssd=64) as harness:
        store(harness, states=[1, 2, 4, 5])
        assert await harness.cache.drain(60)
        harness.cache.supersede_states(KEYS[4])
        catalog = harness.cache.catalog
        await until(lambda: not any(catalog.tiers(state_key(KEYS[at])) for at in (1, 2)))
        assert [catalog.tiers(state_key(KEYS[at])) for at in (4, 5)] == [[0, 1], [0, 1]]
        assert all(catalog.tiers(key) == [0, 1] for key in KEYS)


async def test_state_at_a_branch_is_kept(settings: MakeSettings) -> None:
    """Two prompts share three chunks: any further one that does hits the state at their end."""
    async with opened(settings) as harness:
        store(harness, states=[1, 2, 3, 4])
        other = chunk_keys(KEYS[2], range(100, 102), 1)
        header = ChunkHeader(other[0], KEYS[2], SPACE, CHUNK)
        reservation = harness.cache.reserve(header)
        assert reservation is not None
        harness.cache.commit([reservation])
        harness.cache.supersede_states(KEYS[5])
        catalog = harness.cache.catalog
        await until(lambda: not any(catalog.tiers(state_key(KEYS[at])) for at in (3, 4)))
        assert [catalog.tiers(state_key(KEYS[at])) for at in (1, 2)] == [[0], [0]]
