"""A source that fails, forgets or hangs: what it does not give comes from another, and no memory is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import pytest

from kvtier.keys import ChunkKey
from kvtier.pipeline import prefetch
from kvtier.testing.faults import Fault

from .conftest import CHUNK_OBJECT_BYTES, rows
from .house import MakeSettings, Source, costs, opened, until

pytestmark = pytest.mark.anyio
Prompt = Callable[..., list[int]]


Break = Callable[[Source, Sequence[ChunkKey]], None]


def _break_by(fault: Fault) -> Break:
    def set_fault(source: Source, keys: Sequence[ChunkKey]) -> None:
        source.faults.fault, source.faults.only = fault, frozenset(keys)

    return set_fault


def _forget(source: Source, keys: Sequence[ChunkKey]) -> None:
    for key in keys:
        del source.shelf.held[key]


BREAKS = {
    "forgotten": _forget,
    "failed": _break_by(Fault.FAIL),
    "raised": _break_by(Fault.RAISE),
    "short": _break_by(Fault.SHORT),
    "flipped": _break_by(Fault.FLIP),
}


@pytest.mark.parametrize("how", BREAKS)
async def test_what_one_does_not_give_comes_from_the_next(
    settings: MakeSettings, prompt: Prompt, how: str
) -> None:
    async with opened(settings, "near", "far") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "near", "far")
        keys = house.model.keys(tokens)
        BREAKS[how](house.sources["near"], keys[1:3])
        found = house.cache.look_up(keys)
        await found.settle(None)
        assert found.ready == 4
        near, far = house.tier("near").index, house.tier("far").index
        came_from = [chunk.source for chunk in found.chunks]
        assert came_from[1:3] == [far, far]
        assert set(came_from) == ({far} if how in ("raised", "short") else {near, far})
        found.release()
        assert await house.retrieve(tokens) == 1024, "in memory, and right"
        assert house.cache.hierarchy.counts["fell_back"] == came_from.count(far)
        if how in ("forgotten", "flipped"):
            assert house.holds(tokens, "near") == [0, 3]


async def test_what_the_disk_has_lost_comes_from_peers(
    settings: MakeSettings, prompt: Prompt, tmp_path: Path
) -> None:
    async with opened(settings, "peers", ssd=64) as house:
        tokens = prompt(1024)
        await house.fill(tokens, "ssd", "peers")
        for file in [path for path in (tmp_path / "ssd").rglob("*") if path.is_file()]:
            file.write_bytes(b"")
        assert await house.retrieve(tokens) == 1024
        assert house.reads == [("ssd", 4), ("peers", 4)]
        assert house.holds(tokens, "ssd") == []


async def test_the_next_is_the_cheapest_that_is_left(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far", "peers") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "near", "far", "peers")
        costs(house, near=1.0, far=1.0, peers=0.1)
        house.sources["peers"].faults.fault = Fault.FAIL
        house.sources["near"].faults.fault = Fault.FAIL
        assert await house.retrieve(tokens) == 1024
        assert house.reads == [("peers", 4), ("near", 4), ("far", 4)]


async def test_the_beginning_of_a_prompt_is_mended_first(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "READS_IN_FLIGHT", 1)
    monkeypatch.setattr(prefetch, "READ_BYTES", 2 * CHUNK_OBJECT_BYTES)
    async with opened(settings, "near", "far") as house:
        tokens = prompt(1536)
        await house.fill(tokens, "near", "far")
        _forget(house.sources["near"], house.model.keys(tokens)[:1])
        assert await house.retrieve(tokens) == 1536
        assert house.reads == [("near", 2), ("far", 1), ("near", 2), ("near", 2)]


async def test_the_rest_of_a_run_leaves_a_source_that_fails(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "READS_IN_FLIGHT", 1)
    monkeypatch.setattr(prefetch, "READ_BYTES", 2 * CHUNK_OBJECT_BYTES)
    async with opened(settings, "near", "far") as house:
        tokens = prompt(2048)
        await house.fill(tokens, "near", "far")
        house.lose(tokens, "far", [7])
        house.sources["near"].faults.fault = Fault.FAIL
        assert await house.retrieve(tokens) == 1792
        assert house.reads == [("near", 2), ("far", 2), ("far", 2), ("far", 2), ("far", 1), ("near", 1)]


async def test_all_sources_fail_and_are_asked_once_each(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far", "peers") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "near", "far", "peers")
        for source, fault in zip(house.sources.values(), (Fault.FAIL, Fault.RAISE, Fault.SHORT), strict=True):
            source.faults.fault = fault
        assert await house.retrieve(tokens) == 0
        assert house.reads == [("near", 4), ("far", 4), ("peers", 4)]
        assert [source.faults.calls["get"] for source in house.sources.values()] == [1, 1, 1]
        await house.at_rest()
        assert house.cache.arena.used == 0
        assert house.holds(tokens, "near") == [0, 1, 2, 3], "to fail is not to lack"
        for source in house.sources.values():
            source.faults.fault = None
        assert await house.retrieve(tokens) == 1024


async def test_all_sources_have_lost_it(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "near", "far")
        for source in house.sources.values():
            source.shelf.held.clear()
        assert await house.retrieve(tokens) == 0
        await house.at_rest()
        assert len(house.cache.hierarchy.catalog) == 0


async def test_a_source_whose_breaker_is_open_is_not_asked(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "near", "far")
        house.sources["near"].faults.fault = Fault.RAISE
        while house.tier("near").available:
            assert await house.retrieve(tokens) == 1024
            house.cache.hierarchy.drop(house.model.keys(tokens))
        house.tier("near").backend._open_until = float("inf")
        house.reads.clear()
        assert await house.retrieve(tokens) == 1024
        assert house.reads == [("far", 4)]


# Out of time.


async def test_a_late_answer_overwrites_nothing(settings: MakeSettings, prompt: Prompt) -> None:
    """The slice is the late one's until it lets go: no other source is given it, nor is it freed."""
    async with opened(settings, "near", "far", ram=10) as house:
        tokens, other = prompt(1024), prompt(1024, 1)
        await house.fill(tokens, "near", "far")
        near = house.sources["near"]
        house.hang("near")
        with anyio.fail_after(60):
            assert await house.retrieve(tokens) == 0
        assert house.sources["far"].faults.calls["get"] == 0
        assert house.cache.arena.used == 4 * CHUNK_OBJECT_BYTES, "it may still be written to"
        await house.model.store(other, rows(other))
        # What it answers late is garbage, which must be found out, and must not hit what others hold.
        near.faults.fault = Fault.FLIP
        house.resume("near")
        await house.at_rest()
        assert house.holds(tokens, "ram") == []
        assert await house.retrieve(other) == 1024
        assert await house.retrieve(tokens) == 1024
        assert house.reads[-1] == ("far", 4), "the near one has lost what it corrupted"


async def test_a_late_answer_that_is_right_is_kept(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "near", "far")
        house.hang("near")
        with anyio.fail_after(60):
            assert await house.retrieve(tokens) == 0
        house.resume("near")
        await house.at_rest()
        assert house.holds(tokens, "ram") == [0, 1, 2, 3]
        assert await house.retrieve(tokens) == 1024


async def test_the_rest_of_a_run_does_not_wait_for_a_source_that_hangs(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "READS_IN_FLIGHT", 1)
    monkeypatch.setattr(prefetch, "READ_BYTES", 2 * CHUNK_OBJECT_BYTES)
    async with opened(settings, "near", "far") as house:
        tokens = prompt(2048)
        await house.fill(tokens, "near", "far")
        house.hang("near")
        with anyio.fail_after(60):
            assert await house.retrieve(tokens) == 0
            while house.holds(tokens, "ram") != [2, 3, 4, 5, 6, 7]:
                await anyio.sleep(0.01)
        assert house.reads == [("near", 2), ("far", 2), ("far", 2), ("far", 2)]
        house.resume("near")
        await house.at_rest()
        assert await house.retrieve(tokens) == 2048


async def test_two_reads_are_in_flight(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "READ_BYTES", 2 * CHUNK_OBJECT_BYTES)
    async with opened(settings, "near") as house:
        tokens = prompt(2048)
        await house.fill(tokens, "near")
        delays = house.sources["near"].delays
        delays.hang()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(house.retrieve, tokens)
            await until(lambda: delays.waiting == 2)
            await anyio.wait_all_tasks_blocked()
            assert delays.waiting == 2
            delays.resume()
        assert house.reads == [("near", 2)] * 4
        assert await house.retrieve(tokens) == 2048


async def test_reads_that_get_no_turn_are_read_from_elsewhere(settings: MakeSettings, prompt: Prompt) -> None:
    """The medium has not got their memory: another may read into it at once."""
    async with opened(settings, "near", "far") as house:
        first, second = prompt(1024, 1), prompt(1024, 2)
        await house.fill(first, "near")
        await house.fill(second, "near", "far")
        near = house.cache.hierarchy.tiers[1]
        near._slots = anyio.Semaphore(1)
        house.hang("near")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(house.retrieve, first)
            await until(lambda: house.sources["near"].delays.waiting == 1)
            assert await house.retrieve(second) == 1024
            house.sources["near"].delays.resume()
        await house.at_rest()
        assert house.sources["near"].faults.calls["get"] == 1


# Ended on the way.


@pytest.mark.parametrize("hanging", ["near", "far"])
async def test_a_request_is_cancelled_while_its_chunks_fly(
    settings: MakeSettings, prompt: Prompt, hanging: str
) -> None:
    async with opened(settings, "near", "far") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "near", "far")
        house.sources["near"].faults.fault = Fault.FAIL
        house.sources[hanging].delays.hang()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(house.retrieve, tokens)
            await until(lambda: house.sources[hanging].delays.waiting > 0)
            tasks.cancel_scope.cancel()
        house.sources[hanging].delays.resume()
        await house.at_rest()
        assert house.holds(tokens, "ram") == [0, 1, 2, 3]


@pytest.mark.parametrize("hanging", ["near", "far"])
async def test_the_cache_is_closed_while_chunks_fly(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, hanging: str
) -> None:
    monkeypatch.setattr(prefetch, "READ_BYTES", 2 * CHUNK_OBJECT_BYTES)

    async def resume_later(source: Source) -> None:
        await anyio.sleep(0.05)
        source.delays.resume()

    async with (
        anyio.create_task_group() as tasks,
        opened(settings, "near", "far", drain_timeout=0.1) as house,
    ):
        tokens = prompt(1024)
        await house.fill(tokens, "near", "far")
        house.sources["near"].faults.fault = Fault.FAIL
        house.sources[hanging].delays.hang()
        house.cache.look_up(house.model.keys(tokens)).release()
        await until(lambda: house.sources[hanging].delays.waiting > 0)
        arena = house.cache.arena
        tasks.start_soon(resume_later, house.sources[hanging])
        house.cache.hierarchy.tasks.cancel_scope.cancel()
    assert arena.leases == 0


async def test_what_is_cleared_while_it_falls_back_does_not_arrive(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings, "near", "far") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "near", "far")
        house.sources["near"].faults.fault = Fault.FAIL
        far = house.sources["far"]
        far.delays.hang()
        house.cache.look_up(house.model.keys(tokens)).release()
        await until(lambda: far.delays.waiting > 0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(house.model.clear)
            await until(lambda: far.delays.waiting > 1)
            far.delays.resume()
        await house.at_rest()
        assert len(house.cache.hierarchy.catalog) == 0
