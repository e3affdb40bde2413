"""Fallback to another source if one fails, loses chunks or hangs, without leaking memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import pytest

from kvtier.catalog.misses import MissReason
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.query import Query
from kvtier.testing.faults import Fault
from kvtier.tiers import batches
from kvtier.tiers.breaker import CircuitBreaker
from kvtier.tiers.slots import Slots
from tests.rigs.faulty_sources import Source, opened, set_costs
from tests.rigs.waiting import until

from .conftest import CHUNK_OBJECT_BYTES, MakeSettings, Prompt, rows

pytestmark = pytest.mark.anyio


BreakSource = Callable[[Source, Sequence[ChunkKey]], None]


def _break_with(fault: Fault) -> BreakSource:
    def set_fault(source: Source, keys: Sequence[ChunkKey]) -> None:
        source.faults.fault, source.faults.only = fault, frozenset(keys)

    return set_fault


def _lose_chunks(source: Source, keys: Sequence[ChunkKey]) -> None:
    for key in keys:
        del source.pool.held[key]


FAULTS = {
    "forgotten": _lose_chunks,
    "failed": _break_with(Fault.FAIL),
    "raised": _break_with(Fault.RAISE),
    "short": _break_with(Fault.SHORT),
    "flipped": _break_with(Fault.FLIP),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_missing_chunks_come_from_the_next_source(
    settings: MakeSettings, prompt: Prompt, fault: str
) -> None:
    async with opened(settings, "near", "far") as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "near", "far")
        keys = harness.model.keys(tokens)
        FAULTS[fault](harness.sources["near"], keys[1:3])
        found = harness.cache.look_up(Query(keys))
        await found.settle(None)
        assert found.ready == 4
        near, far = harness.tier("near").index, harness.tier("far").index
        sources = [chunk.source for chunk in found.chunks]
        assert sources[1:3] == [far, far]
        assert set(sources) == ({far} if fault in ("raised", "short") else {near, far})
        found.release()
        assert await harness.retrieve(tokens) == 1024, "the chunks in memory are wrong or missing"
        assert harness.cache.counts["fallback"] == sources.count(far)
        if fault in ("forgotten", "flipped"):
            assert harness.held_chunks(tokens, "near") == [0, 3]


async def test_chunks_lost_by_the_disk_come_from_peers(
    settings: MakeSettings, prompt: Prompt, tmp_path: Path
) -> None:
    async with opened(settings, "peers", ssd=64) as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "ssd", "peers")
        for file in [path for path in (tmp_path / "ssd").rglob("*") if path.is_file()]:
            file.write_bytes(b"")
        assert await harness.retrieve(tokens) == 1024
        assert harness.reads == [("ssd", 4), ("peers", 4)]
        assert harness.held_chunks(tokens, "ssd") == []


async def test_next_source_is_the_cheapest_remaining(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far", "peers") as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "near", "far", "peers")
        set_costs(harness, near=1.0, far=1.0, peers=0.1)
        harness.sources["peers"].faults.fault = Fault.FAIL
        harness.sources["near"].faults.fault = Fault.FAIL
        assert await harness.retrieve(tokens) == 1024
        assert harness.reads == [("peers", 4), ("near", 4), ("far", 4)]


async def test_missing_first_chunks_are_read_first(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "IN_FLIGHT", 1)
    monkeypatch.setattr(batches, "BATCH_BYTES", 2 * CHUNK_OBJECT_BYTES)
    async with opened(settings, "near", "far") as harness:
        tokens = prompt(1536)
        await harness.fill(tokens, "near", "far")
        _lose_chunks(harness.sources["near"], harness.model.keys(tokens)[:1])
        assert await harness.retrieve(tokens) == 1536
        assert harness.reads == [("near", 2), ("far", 1), ("near", 2), ("near", 2)]


async def test_rest_of_a_run_moves_away_from_a_failing_source(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "IN_FLIGHT", 1)
    monkeypatch.setattr(batches, "BATCH_BYTES", 2 * CHUNK_OBJECT_BYTES)
    async with opened(settings, "near", "far") as harness:
        tokens = prompt(2048)
        await harness.fill(tokens, "near", "far")
        harness.lose_chunks(tokens, "far", [7])
        harness.sources["near"].faults.fault = Fault.FAIL
        assert await harness.retrieve(tokens) == 1792
        assert harness.reads == [("near", 2), ("far", 2), ("far", 2), ("far", 2), ("far", 1), ("near", 1)]


async def test_all_sources_fail_and_are_read_once_each(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far", "peers") as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "near", "far", "peers")
        for source, fault in zip(
            harness.sources.values(), (Fault.FAIL, Fault.RAISE, Fault.SHORT), strict=True
        ):
            source.faults.fault = fault
        assert await harness.retrieve(tokens) == 0
        assert harness.reads == [("near", 4), ("far", 4), ("peers", 4)]
        assert [source.faults.calls["get"] for source in harness.sources.values()] == [1, 1, 1]
        await harness.wait_until_idle()
        assert harness.cache.arena.used == 0
        assert harness.held_chunks(tokens, "near") == [0, 1, 2, 3], (
            "a failure does not remove chunks from the catalog"
        )
        for source in harness.sources.values():
            source.faults.fault = None
        assert await harness.retrieve(tokens) == 1024


async def test_all_sources_have_lost_the_chunks(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far") as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "near", "far")
        for source in harness.sources.values():
            source.pool.held.clear()
        assert await harness.retrieve(tokens) == 0
        await harness.wait_until_idle()
        assert len(harness.cache.catalog) == 0


async def test_source_with_an_open_breaker_is_not_read(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far") as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "near", "far")
        harness.sources["near"].faults.fault = Fault.RAISE
        harness.tier("near").breaker = CircuitBreaker("near", clock=lambda: 0.0)  # It stays open.
        while harness.tier("near").available:
            assert await harness.retrieve(tokens) == 1024
            harness.cache.memory.drop(harness.model.keys(tokens))
        harness.reads.clear()
        assert await harness.retrieve(tokens) == 1024
        assert harness.reads == [("far", 4)]


async def test_what_only_a_source_with_an_open_breaker_holds_is_missed_for_that(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings, "near") as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "near")
        near = harness.tier("near")
        near.breaker = CircuitBreaker("near", clock=lambda: 0.0)
        for _ in range(5):
            near.breaker.record_failure()
        assert not near.available
        found = harness.cache.look_up(Query(harness.model.keys(tokens), len(tokens)))
        [miss] = harness.cache.explain(found, harness.model.namespace)
        assert (miss.reason, miss.tier) == (MissReason.TIER_UNAVAILABLE, "near")


# Timeouts.


async def test_late_read_overwrites_nothing(settings: MakeSettings, prompt: Prompt) -> None:
    """Until the late read ends, its slice is neither freed nor given to another source."""
    async with opened(settings, "near", "far", ram=10) as harness:
        tokens, other = prompt(1024), prompt(1024, 1)
        await harness.fill(tokens, "near", "far")
        near = harness.sources["near"]
        harness.hang("near")
        with anyio.fail_after(60):
            assert await harness.retrieve(tokens) == 0
        assert harness.sources["far"].faults.calls["get"] == 0
        assert harness.cache.arena.used == 4 * CHUNK_OBJECT_BYTES, (
            "memory that may still be written to was freed"
        )
        await harness.model.store(other, rows(other))
        # The late read writes garbage, which must be detected and must not overwrite other chunks.
        near.faults.fault = Fault.FLIP
        harness.resume("near")
        await harness.wait_until_idle()
        assert harness.held_chunks(tokens, "ram") == []
        assert await harness.retrieve(other) == 1024
        assert await harness.retrieve(tokens) == 1024
        assert harness.reads[-1] == ("far", 4), "the near source must have dropped the corrupt chunks"


async def test_valid_late_read_is_kept(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far") as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "near", "far")
        harness.hang("near")
        with anyio.fail_after(60):
            assert await harness.retrieve(tokens) == 0
        harness.resume("near")
        await harness.wait_until_idle()
        assert harness.held_chunks(tokens, "ram") == [0, 1, 2, 3]
        assert await harness.retrieve(tokens) == 1024


async def test_rest_of_a_run_does_not_wait_for_a_hanging_source(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "IN_FLIGHT", 1)
    monkeypatch.setattr(batches, "BATCH_BYTES", 2 * CHUNK_OBJECT_BYTES)
    async with opened(settings, "near", "far") as harness:
        tokens = prompt(2048)
        await harness.fill(tokens, "near", "far")
        harness.hang("near")
        with anyio.fail_after(60):
            assert await harness.retrieve(tokens) == 0
            while harness.held_chunks(tokens, "ram") != [2, 3, 4, 5, 6, 7]:
                await anyio.sleep(0.01)
        assert harness.reads == [("near", 2), ("far", 2), ("far", 2), ("far", 2)]
        harness.resume("near")
        await harness.wait_until_idle()
        assert await harness.retrieve(tokens) == 2048


async def test_two_reads_are_in_flight(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "BATCH_BYTES", 2 * CHUNK_OBJECT_BYTES)
    async with opened(settings, "near") as harness:
        tokens = prompt(2048)
        await harness.fill(tokens, "near")
        delays = harness.sources["near"].delays
        delays.hang()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(harness.retrieve, tokens)
            await until(lambda: delays.waiting == 2)
            await anyio.wait_all_tasks_blocked()
            assert delays.waiting == 2
            delays.resume()
        assert harness.reads == [("near", 2)] * 4
        assert await harness.retrieve(tokens) == 2048


async def test_reads_without_a_free_slot_use_another_source(settings: MakeSettings, prompt: Prompt) -> None:
    """The backend never received the buffers, so another source may use them immediately."""
    async with opened(settings, "near", "far") as harness:
        first, second = prompt(1024, 1), prompt(1024, 2)
        await harness.fill(first, "near")
        await harness.fill(second, "near", "far")
        near = harness.cache.tiers[1]
        near._slots = Slots(1)
        harness.hang("near")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(harness.retrieve, first)
            await until(lambda: harness.sources["near"].delays.waiting == 1)
            assert await harness.retrieve(second) == 1024
            harness.sources["near"].delays.resume()
        await harness.wait_until_idle()
        assert harness.sources["near"].faults.calls["get"] == 1


# Cancellation and close.


@pytest.mark.parametrize("hanging", ["near", "far"])
async def test_request_is_cancelled_during_its_reads(
    settings: MakeSettings, prompt: Prompt, hanging: str
) -> None:
    async with opened(settings, "near", "far") as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "near", "far")
        harness.sources["near"].faults.fault = Fault.FAIL
        harness.sources[hanging].delays.hang()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(harness.retrieve, tokens)
            await until(lambda: harness.sources[hanging].delays.waiting > 0)
            tasks.cancel_scope.cancel()
        harness.sources[hanging].delays.resume()
        await harness.wait_until_idle()
        assert harness.held_chunks(tokens, "ram") == [0, 1, 2, 3]


@pytest.mark.parametrize("hanging", ["near", "far"])
async def test_cache_is_closed_during_reads(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, hanging: str
) -> None:
    monkeypatch.setattr(batches, "BATCH_BYTES", 2 * CHUNK_OBJECT_BYTES)

    async def resume_later(source: Source) -> None:
        await anyio.sleep(0.05)
        source.delays.resume()

    async with (
        anyio.create_task_group() as tasks,
        opened(settings, "near", "far", drain_timeout=0.1) as harness,
    ):
        tokens = prompt(1024)
        await harness.fill(tokens, "near", "far")
        harness.sources["near"].faults.fault = Fault.FAIL
        harness.sources[hanging].delays.hang()
        harness.cache.look_up(Query(harness.model.keys(tokens))).release()
        await until(lambda: harness.sources[hanging].delays.waiting > 0)
        arena = harness.cache.arena
        tasks.start_soon(resume_later, harness.sources[hanging])
        harness.cache.tasks.cancel_scope.cancel()
    assert arena.leases == 0


async def test_chunks_cleared_during_a_fallback_do_not_arrive(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far") as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "near", "far")
        harness.sources["near"].faults.fault = Fault.FAIL
        far = harness.sources["far"]
        far.delays.hang()
        harness.cache.look_up(Query(harness.model.keys(tokens))).release()
        await until(lambda: far.delays.waiting > 0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(harness.model.clear)
            await until(lambda: far.delays.waiting > 1)
            far.delays.resume()
        await harness.wait_until_idle()
        assert len(harness.cache.catalog) == 0
