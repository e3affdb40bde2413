"""Report to the controller what each tier of this host holds: first a full snapshot, then changes.

A report always contains the catalog's state at the time of sending. A change only marks its key, so the
order of changes, and how often a key changes between reports, do not matter: as every change marks its key
afterwards, the last report of a key is either correct or repeated.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

import anyio

from kvtier.cache import TieredCache
from kvtier.events import Observer
from kvtier.fleet.member.protocol import MAX_KEYS, Changed, Lost, UpToDate
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.rpc.frames import Message

GATHER_SECONDS = 0.05
"""How long changes are collected before they are reported."""
MAX_CHANGED = 262_144
"""Maximum number of marked keys. With more, a new snapshot is faster."""
KEYS_A_PART = MAX_KEYS // 4
"""Keys per message: a few milliseconds of work between two yields to the event loop."""
ROWS_A_STEP = 4096
"""Catalog rows per step of a snapshot."""
PAUSE_SECONDS = 0.001
"""Pause after each step, which leaves at least half of the event loop's time to lookups."""

Send = Callable[[Message], Awaitable[None]]


class InventoryReport(Observer):
    """An observer that reports one cache over one connection. Shared pools are not reported."""

    def __init__(self, cache: TieredCache, max_changed: int = MAX_CHANGED) -> None:
        self._cache = cache
        self._max_changed = max_changed
        self._changed: dict[int, set[ChunkKey]] = {
            tier.index: set() for tier in cache.tiers if not tier.shared
        }
        self._lost = False
        self._reporting = False
        self._waiting: list[anyio.Event] = []
        """Events to set once all keys that are marked now have been reported."""
        self._waiting_for_snapshot: list[anyio.Event] = []
        """Events to set after the next snapshot, because the marks were dropped."""
        self._changes_marked = anyio.Event()
        self._flush_requested = anyio.Event()
        self.up_to_date = False
        """Whether a snapshot is complete, so that only changes remain to be reported."""
        self.lost = 0
        """How many times a new snapshot was needed because too many keys were marked."""

    @property
    def marked(self) -> int:
        """Number of keys that are still to be reported."""
        return sum(map(len, self._changed.values()))

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """Mark the changed keys for reporting; with too many marks, schedule a new snapshot."""
        marked = self._changed.get(tier)
        if marked is None or self._lost:
            return
        marked.update(stored)
        marked.update(removed)
        if self.marked > self._max_changed:
            self._lost = True
            self._forget()
        self._changes_marked.set()

    async def flush(self) -> None:
        """Wait until :meth:`report` has reported all changes up to now."""
        if not (self._lost or self._reporting or self.marked):
            return
        reported = anyio.Event()
        self._waiting.append(reported)
        self._changes_marked.set()
        self._flush_requested.set()
        await reported.wait()

    async def report(self, send: Send) -> None:
        """Send a snapshot, then changes, until cancelled. Raises the errors of ``send``."""
        self._cache.add_observer(self)
        try:
            while True:
                await self._send_snapshot(send)
                while not self._lost:
                    await self._gather()
                    await self._send_changes(send)
                self.lost += 1
                self.up_to_date = False
                await send(Lost())
        finally:
            self._cache.remove_observer(self)

    async def _send_snapshot(self, send: Send) -> None:
        self._waiting_for_snapshot += self._waiting
        self._waiting.clear()
        self._forget()
        self._lost = False
        due = time.monotonic() + GATHER_SECONDS
        for rows in self._cache.catalog.slices(ROWS_A_STEP):
            for tier in self._changed:
                held = self._cache.catalog.ready_keys(tier, rows)
                if held:
                    await send(Changed(tier, held, b""))
            if time.monotonic() > due:
                await self._send_changes(send)
                due = time.monotonic() + GATHER_SECONDS
            if self._lost:
                return
            await anyio.sleep(PAUSE_SECONDS)
        await self._send_changes(send)
        if not self._lost:
            await send(UpToDate())
            self.up_to_date = True
            _set_all(self._waiting_for_snapshot)

    async def _gather(self) -> None:
        await self._changes_marked.wait()
        with anyio.move_on_after(GATHER_SECONDS):
            await self._flush_requested.wait()

    async def _send_changes(self, send: Send) -> None:
        """Send the state of all keys that are marked now."""
        self._changes_marked, self._flush_requested = anyio.Event(), anyio.Event()
        waiting, self._waiting = self._waiting, []
        self._reporting = True
        for tier, marked in self._changed.items():
            self._changed[tier] = set()
            while marked and not self._lost:
                part = [marked.pop() for _ in range(min(len(marked), KEYS_A_PART))]
                await send(self._state_of(tier, part))
        self._reporting = False
        if self._lost:
            self._waiting += waiting
        else:
            _set_all(waiting)

    def _state_of(self, tier: int, keys: Sequence[ChunkKey]) -> Changed:
        stored: list[ChunkKey] = []
        removed: list[ChunkKey] = []
        for key, (ready, _) in zip(keys, self._cache.catalog.places(keys), strict=True):
            (stored if ready >> tier & 1 else removed).append(key)
        return Changed(tier, join_keys(stored), join_keys(removed))

    def _forget(self) -> None:
        for tier in self._changed:
            self._changed[tier] = set()


def _set_all(events: list[anyio.Event]) -> None:
    for event in events:
        event.set()
    events.clear()
