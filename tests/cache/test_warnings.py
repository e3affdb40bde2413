"""Unexpected misses are logged with tier, operation, bytes, elapsed time and deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import anyio
import pytest

from kvtier import TieredCache
from kvtier.pipeline.query import Query
from kvtier.testing.faults import Fault
from tests.rigs.faulty_sources import BUILT_IN, opened

from .conftest import CHUNK_OBJECT_BYTES, TOKEN_BYTES, MakeSettings, Prompt, headers, store

pytestmark = pytest.mark.anyio
Log = Callable[[str], list[str]]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Log]:
    """Return the logged warnings that contain a text."""

    def find(text: str) -> list[str]:
        messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        return [message for message in messages if text in message]

    with caplog.at_level(logging.WARNING, "kvtier"):
        yield find


async def test_read_deadline_exceeded(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with opened(settings, "away") as harness:
        for seed in range(5):
            await harness.fill(prompt(1024, seed), "away")
        harness.hang("away")
        for seed in range(5):
            assert await harness.retrieve(prompt(1024, seed)) == 0
        (message,) = log("deadline")[:1]
        assert message.startswith("tier away: deadline of 300ms exceeded reading 80KiB (4 chunks) after ")
        assert message.endswith("s; counted as misses")
        assert len(log("exceeded")) == 1, "the others are counted, not logged"
        # Four reads hang, the maximum in flight, so the fifth gets no slot.
        assert log("could not be read") == [
            "tier away: 80KiB (4 chunks) could not be read; counted as misses"
        ]
        assert log("circuit") == [
            "tier away: circuit breaker open for 1 s after 5 consecutive failures "
            "(last: no free slot within 300ms for reading 80KiB (4 chunks))"
        ]


async def test_write_deadline_exceeded(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with TieredCache.open(settings(disk={"deadline": "1us"}), plugins=BUILT_IN) as cache:
        store(cache, prompt(512))
        assert await cache.drain(10)
        assert log("tier ssd: deadline of 1us exceeded writing 40KiB (2 chunks)")
        assert log("counted as failed")


async def test_failing_backend(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with opened(settings, "away") as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "away")
        harness.sources["away"].faults.fault = Fault.FAIL
        assert await harness.retrieve(tokens) == 0
        assert log("tier away: 4 of 4 chunks failed")
        assert log("tier away: 80KiB (4 chunks) could not be read; counted as misses")


async def test_chunks_lost_by_a_pool_are_not_logged(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with opened(settings, "away") as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "away")
        harness.sources["away"].pool.held.clear()
        assert await harness.retrieve(tokens) == 0
        assert log("") == []


async def test_chunks_lost_by_the_disk_are_logged(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with opened(settings, ssd=64) as harness:
        tokens = prompt(512)
        await harness.fill(tokens, "ssd")
        folder = harness.cache.settings.tiers[1]["path"]
        for path in [path async for path in anyio.Path(folder).rglob("*.kv")]:
            await path.unlink()
        assert await harness.retrieve(tokens) == 0
        assert log("tier ssd: 40KiB (2 chunks) could not be read; counted as misses")


async def test_no_room_to_store(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with TieredCache.open(settings(ram=4, ssd=0), plugins=BUILT_IN) as cache:
        leases = cache.arena.allocate_all(CHUNK_OBJECT_BYTES, 3)
        keys = cache.model("llama", token_bytes=TOKEN_BYTES).keys(prompt(1024))
        reserved = cache.reserve_all(headers(keys))
        assert [reservation is not None for reservation in reserved] == [True, False, False, False]
        cache.abandon([reservation for reservation in reserved if reservation is not None])
        assert log("tier ram: no room to store 60KiB (3 chunks); they are not cached")
        for lease in leases:
            lease.release()


async def test_no_room_to_load(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with opened(settings, "away", ram=8) as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "away")
        leases = harness.cache.arena.allocate_all(CHUNK_OBJECT_BYTES, 6)
        assert await harness.retrieve(tokens) == 512
        assert log("tier ram: no room to load 2 chunks from tier away; counted as misses")
        for lease in leases:
            lease.release()


async def test_full_tier(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with TieredCache.open(settings(ssd=2), plugins=BUILT_IN) as cache:
        store(cache, prompt(1024))
        assert await cache.drain(10)
        assert log("tier ssd: no room for 40KiB (2 of 4 chunks); they are dropped")


async def test_full_medium(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with opened(settings, "away", shared=False) as harness:
        harness.sources["away"].faults.fault = Fault.FULL
        store(harness.cache, prompt(1024))
        assert await harness.cache.drain(10)
        full = "no room for 80KiB (4 of 4 chunks)"
        assert log("tier away: its medium has") == [f"tier away: its medium has {full}; they are dropped"]
        assert harness.tier("away").status()["error"] == full
        harness.sources["away"].faults.fault = None
        store(harness.cache, prompt(1024, 1))
        assert await harness.cache.drain(10)
        assert harness.tier("away").status()["error"] is None


async def test_full_write_queue(
    settings: MakeSettings, prompt: Prompt, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.pipeline.write.MAX_OVERFLOW_KEYS", 1)
    async with TieredCache.open(settings(disk={"queue": CHUNK_OBJECT_BYTES}), plugins=BUILT_IN) as cache:
        store(cache, prompt(1024))
        assert log("tier ssd: write backlog is full (1 chunks); further chunks are dropped")


async def test_prefetch_deadline_exceeded(settings: MakeSettings, prompt: Prompt, log: Log) -> None:
    async with opened(settings, "away", prefetch={"policy": "timeout", "deadline": "50ms"}) as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "away")
        harness.hang("away")
        found = harness.cache.look_up(Query(harness.model.keys(tokens)))
        await harness.cache.settle(found)
        found.release()
        assert log("prefetch.deadline of 0.05 s exceeded: 4 of 4 chunks did not arrive and are recomputed")
