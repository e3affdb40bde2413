"""Every miss that was not expected is in the log: the tier, the operation, bytes, elapsed time, deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import anyio
import pytest

from kvtier import Settings, TieredCache
from kvtier.header import HEADER_BYTES, ChunkHeader
from kvtier.keys import ChunkKey
from kvtier.testing.faults import Fault

from .conftest import CHUNK_OBJECT_BYTES, TOKEN_BYTES
from .house import BUILT_IN, opened
from .test_sealing import store

pytestmark = pytest.mark.anyio
Prompt = Callable[..., list[int]]
MakeSettings = Callable[..., Settings]
Log = Callable[[str], list[str]]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Log]:
    """The warnings that contain a text."""

    def find(text: str) -> list[str]:
        messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        return [message for message in messages if text in message]

    with caplog.at_level(logging.WARNING, "kvtier"):
        yield find


async def test_a_deadline_that_is_exceeded(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with opened(settings, "away") as house:
        for seed in range(5):
            await house.fill(prompt(1024, seed), "away")
        house.hang("away")
        for seed in range(5):
            assert await house.retrieve(prompt(1024, seed)) == 0
        (missed,) = log("deadline")[:1]
        assert missed.startswith("tier away: deadline of 300ms exceeded reading 80KiB (4 chunks) after ")
        assert missed.endswith("s; they count as missing")
        assert len(log("exceeded")) == 1, "the others are counted, not logged"
        # Four hang, which is as many as may be in flight: the fifth gets no turn.
        assert log("could not be read") == [
            "tier away: 80KiB (4 chunks) could not be read; they count as missing"
        ]
        assert log("circuit") == [
            "tier away: circuit breaker open for 1 s after 5 consecutive failures "
            "(last: no turn within 300ms for reading 80KiB (4 chunks))"
        ]


async def test_a_write_that_exceeds_it(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with TieredCache.open(settings(disk={"deadline": "1us"}), plugins=BUILT_IN) as cache:
        store(cache, prompt(512))
        assert await cache.drain(10)
        assert log("tier ssd: deadline of 1us exceeded writing 40KiB (2 chunks)")
        assert log("it counts as failed")


async def test_a_medium_that_fails(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with opened(settings, "away") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "away")
        house.sources["away"].faults.fault = Fault.FAIL
        assert await house.retrieve(tokens) == 0
        assert log("tier away: 4 of 4 chunks failed")
        assert log("tier away: 80KiB (4 chunks) could not be read; they count as missing")


async def test_what_a_pool_does_not_hold_any_longer_is_no_surprise(
    settings: MakeSettings, prompt: Prompt, log: Log
) -> None:
    async with opened(settings, "away") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "away")
        house.sources["away"].shelf.held.clear()
        assert await house.retrieve(tokens) == 0
        assert log("") == []


async def test_what_the_disk_has_lost_is_one(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with opened(settings, ssd=64) as house:
        tokens = prompt(512)
        await house.fill(tokens, "ssd")
        folder = house.cache.settings.tiers[1]["path"]
        for path in anyio.Path(folder)._path.rglob("*.kv"):
            path.unlink()
        assert await house.retrieve(tokens) == 0
        assert log("tier ssd: 40KiB (2 chunks) could not be read; they count as missing")


async def test_memory_without_room(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with TieredCache.open(settings(ram=4, ssd=0), plugins=BUILT_IN) as cache:
        leases = cache.arena.allocate_all(CHUNK_OBJECT_BYTES, 3)
        keys = cache.model("llama", token_bytes=TOKEN_BYTES).keys(prompt(1024))
        size = CHUNK_OBJECT_BYTES - HEADER_BYTES
        headers = [ChunkHeader(key, ChunkKey(bytes(32)), bytes(32), size) for key in keys]
        reserved = cache.reserve_all(headers)
        assert [one is not None for one in reserved] == [True, False, False, False]
        cache.abandon([one for one in reserved if one is not None])
        assert log("tier ram: no room to store 60KiB (3 chunks); they are not cached")
        for lease in leases:
            lease.release()


async def test_no_room_to_load(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with opened(settings, "away", ram=8) as house:
        tokens = prompt(1024)
        await house.fill(tokens, "away")
        leases = house.cache.arena.allocate_all(CHUNK_OBJECT_BYTES, 6)
        assert await house.retrieve(tokens) == 512
        assert log("tier ram: no room to load 2 chunks from tier away; they count as missing")
        for lease in leases:
            lease.release()


async def test_a_tier_that_is_full(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with TieredCache.open(settings(ssd=2), plugins=BUILT_IN) as cache:
        store(cache, prompt(1024))
        assert await cache.drain(10)
        assert log("tier ssd: no room for 2 of 4 chunks; they are dropped")


async def test_a_queue_that_is_full(
    settings: MakeSettings, prompt: Prompt, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.pipeline.store.OVERFLOW_KEYS", 1)
    async with TieredCache.open(settings(disk={"queue": CHUNK_OBJECT_BYTES}), plugins=BUILT_IN) as cache:
        store(cache, prompt(1024))
        assert log("tier ssd: 1 chunks wait to be written, which is the limit; others are dropped")


async def test_a_prefetch_that_takes_too_long(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with opened(settings, "away", prefetch={"policy": "timeout", "deadline": "50ms"}) as house:
        tokens = prompt(1024)
        await house.fill(tokens, "away")
        house.hang("away")
        found = house.cache.look_up(house.model.keys(tokens))
        await house.cache.settle(found)
        found.release()
        assert log("prefetch.deadline of 0.05 s exceeded: 4 of 4 chunks are not there; they are computed")
