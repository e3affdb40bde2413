"""Chunks that several lower tiers hold: read from the cheapest, and from the next where that one fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier import ModelCache, Settings, TieredCache
from kvtier.backends.base import Backend, GetItem, Outcome, PutItem
from kvtier.catalog import State
from kvtier.costs import HALF_LIFE_SECONDS, ReadCost
from kvtier.events import Prefetch, Report
from kvtier.header import ChunkHeader
from kvtier.keys import ChunkKey
from kvtier.pipeline import prefetch
from kvtier.plugins import Plugins
from kvtier.settings import TierSettings
from kvtier.testing.faults import Fault, FaultyBackend, SlowBackend
from kvtier.tier import Tier

from .conftest import CHUNK_OBJECT_BYTES, TOKEN_BYTES, rows

pytestmark = pytest.mark.anyio
Prompt = Callable[..., list[int]]
MakeSettings = Callable[..., Settings]


class Shelf(Backend):
    """What other hosts have: a dictionary that the test fills."""

    def __init__(self) -> None:
        self.held: dict[ChunkKey, bytes] = {}

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [key in self.held for key in keys]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        self.held.update((key, bytes(view)) for key, view in items)
        return [Outcome.OK] * len(items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        return [self._get(key, view) for key, view in items]

    def _get(self, key: ChunkKey, view: memoryview) -> Outcome:
        if key not in self.held:
            return Outcome.MISS
        view[:] = self.held[key]
        return Outcome.OK

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.held.pop(key, None)


@dataclass
class Source:
    """One tier of what others hold: its shelf behind a wrapper that fails and one that hangs, as told."""

    name: str
    shelf: Shelf = field(default_factory=Shelf)

    def __post_init__(self) -> None:
        self.faults = FaultyBackend(self.shelf)
        self.delays = SlowBackend(self.faults, stubborn=True)

    @property
    def tier(self) -> tuple[TierSettings, Backend]:
        settings = TierSettings(name=self.name, type="shelf", write="never", deadline=0.3)
        return settings, self.delays


class House:
    """An open cache over memory, a disk where the test wants one, and shared sources."""

    def __init__(self, cache: TieredCache, sources: Sequence[Source]) -> None:
        self.cache = cache
        self.model: ModelCache = cache.model("llama", token_bytes=TOKEN_BYTES)
        self.sources = {source.name: source for source in sources}
        self.reads: list[tuple[str, int]] = []
        """The source and number of chunks of each read of a prefetch, in the order in which they ended."""
        cache.add_observer(self)

    def observe(self, report: Report) -> None:
        if isinstance(report.event, Prefetch):
            self.reads.append((report.source or "", len(report.keys)))

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None: ...

    def tier(self, name: str) -> Tier:
        return next(tier for tier in self.cache.hierarchy.tiers if tier.name == name)

    def holds(self, tokens: list[int], name: str) -> list[int]:
        """Which chunks of a prompt a tier is known to hold."""
        catalog, tier = self.cache.hierarchy.catalog, self.tier(name).index
        keys = self.model.keys(tokens)
        return [at for at, key in enumerate(keys) if catalog.state(key, tier) is State.READY]

    async def fill(self, tokens: list[int], *names: str) -> None:
        """Let the tiers named hold a prompt, and memory not."""
        cache, catalog = self.cache, self.cache.hierarchy.catalog
        keys = self.model.keys(tokens)
        assert await self.model.store(tokens, rows(tokens)) == len(tokens)
        assert await cache.drain(5)
        for name in names:
            tier = self.tier(name).index
            if name not in self.sources:
                assert await cache.move(keys, "ram", name, copy=True) == len(keys)
                continue
            for key in keys:
                lease = cache.hierarchy.share(key)
                assert lease is not None
                sealed = bytearray(lease.view)
                lease.release()
                ChunkHeader.parse(memoryview(sealed)).seal(memoryview(sealed))
                self.sources[name].shelf.held[key] = bytes(sealed)
                if catalog.state(key, tier) is State.ABSENT:
                    catalog.add(key, tier, CHUNK_OBJECT_BYTES, State.READY)
        cache.hierarchy.drop(keys)
        self.reads.clear()

    def lose(self, tokens: list[int], name: str, chunks: Sequence[int]) -> None:
        """Let a source have lost some chunks of a prompt, and the cache know of it."""
        keys = self.model.keys(tokens)
        for at in chunks:
            self.sources[name].shelf.held.pop(keys[at])
            self.cache.hierarchy.catalog.remove(keys[at], self.tier(name).index)

    async def retrieve(self, tokens: list[int]) -> int:
        """How many tokens come back; every one of them right."""
        out = bytearray(len(tokens) * TOKEN_BYTES)
        count = await self.model.retrieve(tokens, out)
        assert out[: count * TOKEN_BYTES] == rows(tokens)[: count * TOKEN_BYTES]
        return count

    async def at_rest(self) -> None:
        """Wait until nothing is on its way, and nothing is leased but what memory holds."""
        cache, catalog = self.cache, self.cache.hierarchy.catalog
        with anyio.fail_after(10):
            while (
                cache.pending_bytes
                or any(catalog.state(key, 0) is State.PENDING for key in catalog.keys(0))
                or cache.arena.leases != catalog.count(0)
            ):
                await anyio.sleep(0.01)
        assert not cache.status()["flights"]


@asynccontextmanager
async def opened(settings: MakeSettings, *names: str, ssd: int = 0, **more: Any) -> AsyncIterator[House]:
    """A cache over memory and shared sources of these names; at the end nothing may be leased."""
    sources = [Source(name) for name in names]
    chosen = settings(ssd=ssd, **{"prefetch": {"policy": "wait"}, **more})
    pools = [source.tier for source in sources]
    async with TieredCache.open(chosen, plugins=Plugins.load([]), pools=pools) as cache:
        house = House(cache, sources)
        try:
            yield house
        finally:
            for source in sources:
                source.faults.fault = None
                source.delays.resume()
        await house.at_rest()


def costs(house: House, **seconds: float) -> None:
    """Let it be known what reading a chunk from each source costs."""
    for name, value in seconds.items():
        house.tier(name).reading = reading = ReadCost()
        reading.succeeded(CHUNK_OBJECT_BYTES, value)


# Choosing.


@pytest.mark.parametrize(
    ("seconds", "source"),
    [({}, "ssd"), ({"ssd": 1.0, "peers": 0.9}, "ssd"), ({"ssd": 1.0, "peers": 0.1}, "peers")],
    ids=["unmeasured", "alike", "clearly cheaper"],
)
async def test_a_prompt_comes_from_the_cheapest(
    settings: MakeSettings, prompt: Prompt, seconds: dict[str, float], source: str
) -> None:
    async with opened(settings, "peers", ssd=64) as house:
        tokens = prompt(1024)
        await house.fill(tokens, "ssd", "peers")
        costs(house, **seconds)
        found = house.cache.look_up(house.model.keys(tokens))
        assert [chunk.source for chunk in found.chunks] == [house.tier(source).index] * 4
        await found.settle(None)
        assert found.ready == 4
        found.release()
        assert house.reads == [(source, 4)]
        assert house.cache.hierarchy.counts[f"found_{source}"] == 4


async def test_costs_are_learnt_from_reads(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "near", "far")
        house.sources["near"].delays.delay = 0.05
        assert house.tier("near").cost(CHUNK_OBJECT_BYTES) is None
        assert await house.retrieve(tokens) == 1024
        cost = house.tier("near").cost(4 * CHUNK_OBJECT_BYTES)
        assert cost is not None
        assert cost >= 0.05
        assert house.tier("far").cost(CHUNK_OBJECT_BYTES) is None
        costs(house, far=1e-6)
        house.cache.hierarchy.drop(house.model.keys(tokens))
        assert await house.retrieve(tokens) == 1024
        assert house.reads == [("near", 4), ("far", 4)]


async def test_failures_and_time_outs_make_a_source_dearer(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "near")
        near = house.sources["near"]
        costs(house, near=1.0)
        near.faults.fault, near.faults.only = Fault.FAIL, frozenset(house.model.keys(tokens))
        assert await house.retrieve(tokens) == 0
        failed = house.tier("near").cost(CHUNK_OBJECT_BYTES)
        assert failed is not None
        assert failed > 1.0
        near.delays.hang()
        assert await house.retrieve(tokens) == 0
        out_of_time = house.tier("near").cost(CHUNK_OBJECT_BYTES)
        assert out_of_time is not None
        assert out_of_time > 1.2 * failed


async def test_what_was_slow_once_is_tried_again(settings: MakeSettings, prompt: Prompt) -> None:
    now = 0.0
    async with opened(settings, "near", "far") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "near", "far")
        costs(house, far=0.001)
        house.tier("near").reading = ReadCost(lambda: now)
        house.tier("near").reading.succeeded(CHUNK_OBJECT_BYTES, 10.0)
        for later, source in [(0.0, "far"), (HALF_LIFE_SECONDS, "far"), (10 * HALF_LIFE_SECONDS, "near")]:
            now += later
            assert await house.retrieve(tokens) == 1024
            assert house.reads.pop() == (source, 4)
            house.cache.hierarchy.drop(house.model.keys(tokens))


async def test_a_prompt_that_three_sources_hold_together(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far", "peers") as house:
        tokens = prompt(3072)
        await house.fill(tokens, "near", "far", "peers")
        house.lose(tokens, "near", range(4, 12))
        house.lose(tokens, "far", [*range(4), *range(8, 12)])
        house.lose(tokens, "peers", range(8))
        assert await house.retrieve(tokens) == 3072
        assert sorted(house.reads) == [("far", 4), ("near", 4), ("peers", 4)]


# Falling back.

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
    monkeypatch.setattr(prefetch, "BATCH_BYTES", 2 * CHUNK_OBJECT_BYTES)
    async with opened(settings, "near", "far") as house:
        tokens = prompt(1536)
        await house.fill(tokens, "near", "far")
        _forget(house.sources["near"], house.model.keys(tokens)[:1])
        assert await house.retrieve(tokens) == 1536
        assert house.reads == [("near", 2), ("far", 1), ("near", 2), ("near", 2)]


async def test_the_rest_of_a_run_leaves_a_source_that_fails(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "BATCH_BYTES", 2 * CHUNK_OBJECT_BYTES)
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
        house.reads.clear()
        assert await house.retrieve(tokens) == 1024
        assert house.reads == [("far", 4)]


# Out of time.


async def test_a_late_answer_overwrites_nothing(settings: MakeSettings, prompt: Prompt) -> None:
    """The slice is the late one's until it lets go: no other source is given it, nor is it freed."""
    async with opened(settings, "near", "far", ram=8) as house:
        tokens, other = prompt(1024), prompt(1024, 1)
        await house.fill(tokens, "near", "far")
        near = house.sources["near"]
        near.delays.hang()
        with anyio.fail_after(5):
            assert await house.retrieve(tokens) == 0
        assert house.sources["far"].faults.calls["get"] == 0
        assert house.cache.arena.used == 4 * CHUNK_OBJECT_BYTES, "it may still be written to"
        await house.model.store(other, rows(other))
        # What it answers late is garbage, which must be found out, and must not hit what others hold.
        near.faults.fault = Fault.FLIP
        near.delays.resume()
        await house.at_rest()
        assert house.holds(tokens, "ram") == []
        assert await house.retrieve(other) == 1024
        assert await house.retrieve(tokens) == 1024
        assert house.reads[-1] == ("far", 4), "the near one has lost what it corrupted"


async def test_a_late_answer_that_is_right_is_kept(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "near", "far")
        house.sources["near"].delays.hang()
        with anyio.fail_after(5):
            assert await house.retrieve(tokens) == 0
        house.sources["near"].delays.resume()
        await house.at_rest()
        assert house.holds(tokens, "ram") == [0, 1, 2, 3]
        assert await house.retrieve(tokens) == 1024


async def test_the_rest_of_a_run_does_not_wait_for_a_source_that_hangs(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "BATCH_BYTES", 2 * CHUNK_OBJECT_BYTES)
    async with opened(settings, "near", "far") as house:
        tokens = prompt(2048)
        await house.fill(tokens, "near", "far")
        house.sources["near"].delays.hang()
        with anyio.fail_after(5):
            assert await house.retrieve(tokens) == 0
            while house.holds(tokens, "ram") != [2, 3, 4, 5, 6, 7]:
                await anyio.sleep(0.01)
        assert house.reads == [("near", 2), ("far", 2), ("far", 2), ("far", 2)]
        house.sources["near"].delays.resume()
        await house.at_rest()
        assert await house.retrieve(tokens) == 2048


# Ended on the way.


async def _until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():
            await anyio.sleep(0.005)


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
            await _until(lambda: house.sources[hanging].delays.waiting > 0)
            tasks.cancel_scope.cancel()
        house.sources[hanging].delays.resume()
        await house.at_rest()
        assert house.holds(tokens, "ram") == [0, 1, 2, 3]


@pytest.mark.parametrize("hanging", ["near", "far"])
async def test_the_cache_is_closed_while_chunks_fly(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, hanging: str
) -> None:
    monkeypatch.setattr(prefetch, "BATCH_BYTES", 2 * CHUNK_OBJECT_BYTES)

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
        await _until(lambda: house.sources[hanging].delays.waiting > 0)
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
        await _until(lambda: far.delays.waiting > 0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(house.model.clear)
            await _until(lambda: far.delays.waiting > 1)
            far.delays.resume()
        await house.at_rest()
        assert len(house.cache.hierarchy.catalog) == 0


# What peers hold.


async def test_what_only_peers_hold_is_demoted_and_not_dropped(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings, "peers", ssd=64, ram=8, disk={"write": "on_evict"}) as house:
        tokens, more = prompt(1024), prompt(2048, 1)
        await house.fill(tokens, "peers")
        assert await house.retrieve(tokens) == 1024
        assert house.holds(tokens, "ssd") == []
        assert await house.model.store(more, rows(more)) > 0
        await _until(lambda: bool(house.holds(tokens, "ssd")))


async def test_a_move_to_peers_takes_nothing_away(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "peers") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "peers")
        assert await house.retrieve(tokens) == 1024
        assert await house.model.move(tokens, "ram", "peers") == 1024
        assert house.holds(tokens, "ram") == [0, 1, 2, 3]


async def test_a_look_up_for_others_reads_from_this_host_alone(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings, "peers", ssd=64) as house:
        tokens = prompt(1024)
        await house.fill(tokens, "ssd", "peers")
        costs(house, ssd=1.0, peers=0.001)
        found = house.cache.look_up(house.model.keys(tokens), local=True)
        await found.settle(None)
        assert found.ready == 4
        found.release()
        assert house.reads == [("ssd", 4)]


async def test_a_look_up_for_others_waits_for_no_other_host(settings: MakeSettings, prompt: Prompt) -> None:
    """Two hosts that fetch the same chunk from each other would wait for each other."""
    async with opened(settings, "peers", ssd=64) as house:
        tokens = prompt(1024)
        await house.fill(tokens, "ssd", "peers")
        costs(house, ssd=1.0, peers=0.001)
        house.sources["peers"].delays.hang()
        ours = house.cache.look_up(house.model.keys(tokens))
        theirs = house.cache.look_up(house.model.keys(tokens), local=True)
        assert (len(ours.chunks), len(theirs.chunks)) == (4, 0)
        house.sources["peers"].delays.resume()
        await ours.settle(None)
        assert ours.ready == 4
        ours.release()
