"""The reports to the controller converge to what the tiers hold, whatever changes meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvtier import Settings, TieredCache
from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.fleet.member import inventory_report as inventory_module
from kvtier.fleet.member.inventory_report import InventoryReport
from kvtier.fleet.member.protocol import Changed, Lost, UpToDate
from kvtier.memory.arena import Arena
from kvtier.memory.keys import KEY_BYTES, ChunkKey, split_keys
from kvtier.rpc.frames import Message
from kvtier.testing.backend import make_key
from tests.rigs.scripted_controller import BUILT_IN
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio
TIERS, SHARED = (0, 1), 2
LENGTH = 4096


class Tier:
    def __init__(self, index: int, shared: bool) -> None:
        self.index = index
        self.shared = shared


class CatalogOnly:
    """The part of a cache that is reported: a catalog that a test fills chunk by chunk."""

    def __init__(self) -> None:
        self.catalog = Catalog([LruPolicy.factory() for _ in range(3)])
        self.tiers = [Tier(0, False), Tier(1, False), Tier(SHARED, True)]
        self.observers: list[InventoryReport] = []
        self.add_observer = self.observers.append
        self.remove_observer = self.observers.remove

    def store(self, tier: int, *keys: ChunkKey) -> None:
        for key in keys:
            self.catalog.add(key, tier, LENGTH, State.READY)
        for observer in self.observers:
            observer.changed(tier, keys, ())

    def remove(self, tier: int, *keys: ChunkKey) -> None:
        for key in keys:
            self.catalog.remove(key, tier)
        for observer in self.observers:
            observer.changed(tier, (), keys)

    def held(self) -> dict[int, set[ChunkKey]]:
        return {tier: set(self.catalog.keys(tier)) for tier in TIERS}


class Listener:
    """Applies reports. A test can pause it."""

    def __init__(self) -> None:
        self.held: dict[int, set[ChunkKey]] = {tier: set() for tier in TIERS}
        self.up_to_date = False
        self.lost = 0
        self.messages = 0
        self.longest = 0
        self.listening = anyio.Event()
        self.listening.set()

    async def __call__(self, message: Message) -> None:
        await self.listening.wait()
        await anyio.lowlevel.checkpoint()
        self.messages += 1
        if isinstance(message, Lost):
            self.lost += 1
            self.up_to_date = False
            for held in self.held.values():
                held.clear()
        elif isinstance(message, UpToDate):
            self.up_to_date = True
        else:
            assert isinstance(message, Changed)
            assert message.tier in TIERS
            removed, stored = split_keys(message.removed), split_keys(message.stored)
            assert not set(removed).intersection(stored)
            self.longest = max(self.longest, len(removed) + len(stored))
            self.held[message.tier].difference_update(removed)
            self.held[message.tier].update(stored)

    def pause(self) -> None:
        if self.listening.is_set():  # Otherwise a report may wait for this event, which nobody would set.
            self.listening = anyio.Event()

    def resume(self) -> None:
        self.listening.set()


@asynccontextmanager
async def reporting(
    cache: Any, listener: Callable[[Message], Awaitable[None]], **limits: int
) -> AsyncIterator[InventoryReport]:
    """Report a cache to a listener within the block."""
    inventory = InventoryReport(cache, **limits)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(inventory.report, listener)
        yield inventory
        tasks.cancel_scope.cancel()


def keys(start: int, stop: int) -> list[ChunkKey]:
    return [make_key(number) for number in range(start, stop)]


async def test_snapshot_then_changes_without_shared_pools() -> None:
    cache, listener = CatalogOnly(), Listener()
    cache.store(0, *keys(0, 100))
    cache.store(1, *keys(50, 200))
    cache.store(SHARED, *keys(0, 300))
    cache.catalog.add(make_key(999), 0, LENGTH, State.PENDING)
    async with reporting(cache, listener) as inventory:
        await until(lambda: listener.up_to_date)
        assert listener.held == {0: set(keys(0, 100)), 1: set(keys(50, 200))}
        assert inventory.up_to_date
        cache.remove(0, *keys(0, 10))
        cache.store(SHARED, *keys(300, 400))
        cache.catalog.set_ready(make_key(999), 0)
        inventory.changed(0, [make_key(999)], ())
        await inventory.flush()
        assert listener.held == {0: {*keys(10, 100), make_key(999)}, 1: set(keys(50, 200))}
    assert not cache.observers


async def test_flush_waits_for_the_report_in_flight() -> None:
    cache, listener = CatalogOnly(), Listener()
    async with reporting(cache, listener) as inventory:
        await until(lambda: listener.up_to_date)
        await inventory.flush()
        listener.pause()
        cache.store(0, make_key(1))
        await anyio.sleep(2 * inventory_module.GATHER_SECONDS)  # By now it is being sent, and unmarked.
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(inventory.flush)
            await anyio.sleep(0.01)
            listener.resume()
        assert listener.held[0] == {make_key(1)}


async def test_too_many_changes_cause_a_new_snapshot() -> None:
    cache, listener = CatalogOnly(), Listener()
    cache.store(0, *keys(0, 50))
    async with reporting(cache, listener, max_changed=100) as inventory:
        await until(lambda: listener.up_to_date)
        listener.pause()
        cache.store(1, *keys(0, 60))
        cache.remove(0, *keys(0, 50))
        assert inventory.marked == 0, "a new snapshot needs no marks"
        cache.store(1, *keys(60, 1000))
        listener.resume()
        await until(lambda: listener.lost == 1 and listener.up_to_date)
        assert listener.held == cache.held()
        assert inventory.lost == 1
        # A flush waits for the new snapshot.
        listener.pause()
        cache.remove(1, *keys(0, 200))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(inventory.flush)
            await anyio.sleep(0.01)
            listener.resume()
        assert listener.held == cache.held()


async def test_large_snapshot_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop watch fails the test if a step takes too long."""
    monkeypatch.setattr(inventory_module, "PAUSE_SECONDS", 0.0)
    cache, listener = CatalogOnly(), Counter()
    await fill(cache, 100_000)
    async with reporting(cache, listener):
        await until(lambda: listener.up_to_date)
        assert listener.stored == 100_000


class Counter:
    """A listener that only counts keys."""

    def __init__(self) -> None:
        self.stored = 0
        self.up_to_date = False

    async def __call__(self, message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        self.up_to_date = isinstance(message, UpToDate)
        if isinstance(message, Changed):
            self.stored += len(message.stored) // KEY_BYTES


async def fill(cache: CatalogOnly, count: int) -> None:
    for start in range(0, count, 1000):
        cache.store(0, *keys(start, start + 1000))
        await anyio.lowlevel.checkpoint()


async def test_changes_during_a_snapshot_are_reported_correctly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory_module, "ROWS_A_STEP", 16)
    monkeypatch.setattr(inventory_module, "GATHER_SECONDS", 0.002)
    monkeypatch.setattr(inventory_module, "KEYS_A_PART", 8)
    cache, listener = CatalogOnly(), Listener()
    cache.store(0, *keys(0, 500))
    async with reporting(cache, listener) as inventory:
        for number in itertools.count():
            # Removes and stores on both sides of the position of the snapshot.
            low, high = number % 250, 250 + number % 250
            for tier in TIERS:
                for key in (make_key(low), make_key(high), make_key(1000 + number)):
                    held = tier in cache.catalog.tiers(key)
                    (cache.remove if held else cache.store)(tier, key)
            if listener.up_to_date:
                break
            await anyio.sleep(0.0005)
        await inventory.flush()
        assert number > 10, "the snapshot took only one step"
        assert listener.held == cache.held()
        assert listener.longest <= 16


class HoldingsMachine(RuleBasedStateMachine):
    """Chunks are stored and removed while they are reported, sometimes too many at once."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(inventory_module, "ROWS_A_STEP", 8)
        self.portal_manager = start_blocking_portal()
        self.portal = self.portal_manager.__enter__()
        self.cache = CatalogOnly()
        self.listener: Listener = self.portal.call(Listener)
        self.inventory = self.portal.call(lambda: InventoryReport(self.cache, max_changed=40))  # type: ignore[arg-type]
        self.reporting = self.portal.start_task_soon(self.inventory.report, self.listener)

    chunks = st.lists(st.integers(0, 60), max_size=30, unique=True)

    @rule(tier=st.sampled_from([0, 1, SHARED]), chunks=chunks)
    def store(self, tier: int, chunks: list[int]) -> None:
        def store() -> None:
            tiers = self.cache.catalog.tiers
            self.cache.store(tier, *[key for key in map(make_key, chunks) if tier not in tiers(key)])

        self.portal.call(store)

    @rule(tier=st.sampled_from([0, 1, SHARED]), chunks=chunks)
    def remove(self, tier: int, chunks: list[int]) -> None:
        def remove() -> None:
            tiers = self.cache.catalog.tiers
            self.cache.remove(tier, *[key for key in map(make_key, chunks) if tier in tiers(key)])

        self.portal.call(remove)

    @rule()
    def fall_behind(self) -> None:
        self.portal.call(self.listener.pause)

    @rule()
    def listen(self) -> None:
        self.portal.call(self.listener.resume)

    @rule()
    def compare(self) -> None:
        async def compare() -> None:
            self.listener.resume()
            with anyio.fail_after(120):
                await self.inventory.flush()
                # Even if nothing is held, the end of the snapshot may still be pending.
                await until(lambda: self.listener.up_to_date)
            assert self.listener.held == self.cache.held()

        self.portal.call(compare)

    def teardown(self) -> None:
        try:
            self.compare()
        finally:
            self.reporting.cancel()
            self.patch.undo()
            self.portal_manager.__exit__(None, None, None)


TestHoldings = HoldingsMachine.TestCase
TestHoldings.settings = hypothesis_settings(max_examples=30, stateful_step_count=25, deadline=None)


async def test_real_cache_reports_all_changes(leak_check: list[Arena]) -> None:
    tiers = [{"name": "ram", "type": "cpu", "capacity": 16 * 4096 * 5}]
    listener = Listener()
    async with TieredCache.open(Settings(tiers=tiers, chunk_tokens=4), plugins=BUILT_IN) as cache:
        model = cache.model("llama", token_bytes=1024)
        async with reporting(cache, listener) as inventory:
            for seed in range(30):  # Ten times what fits.
                await model.store([seed] * 40, bytes(40 * 1024))
            await model.clear([29] * 40)
            await until(lambda: listener.up_to_date)
            await inventory.flush()
            held = set(cache.catalog.keys(0))
            assert held
            assert listener.held[0] == held
    assert leak_check
