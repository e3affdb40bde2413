"""Tells the controller what each tier of this host holds: all of it first, then what changes.

What is told is always what the catalog says at that moment. A change only marks its key, so the order in
which changes come, and how often a key changes before it is told, are of no account: as long as every change
marks its key afterwards, what was told last is right or is told again.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

import anyio

from kvtier.agent.protocol import MOST_KEYS, Changed, InStep, Lost
from kvtier.cache import TieredCache
from kvtier.events import Report
from kvtier.keys import ChunkKey, join_keys
from kvtier.sockets.frames import Message

GATHER_SECONDS = 0.05
"""How long changes are gathered before they are told."""
MOST_CHANGED = 262_144
"""Keys that wait to be told. With more it is quicker to tell everything anew."""
KEYS_A_PART = MOST_KEYS // 4
"""Told in one message: some milliseconds of work before the loop may do something else."""
ROWS_A_STEP = 4096
"""Of the catalog, told in one step when everything is told."""
PAUSE_SECONDS = 0.001
"""After each step: whoever waits for a look-up has half of the loop's time at least."""

Send = Callable[[Message], Awaitable[None]]


class Holdings:
    """An observer of one cache for one connection. Shared pools are everybody's, and are not told."""

    def __init__(self, cache: TieredCache, most_changed: int = MOST_CHANGED) -> None:
        self._cache = cache
        self._most_changed = most_changed
        self._changed: dict[int, set[ChunkKey]] = {
            tier.index: set() for tier in cache.hierarchy.tiers if not tier.shared
        }
        self._lost = False
        self._telling = False
        self._waiting: list[anyio.Event] = []
        """Those who wait until what is marked now has been told."""
        self._waiting_for_all: list[anyio.Event] = []
        """Those whose marks were lost: they wait until everything has been told."""
        self._woken = anyio.Event()
        self._hurried = anyio.Event()
        self.in_step = False
        """Whether everything has been told, and only what changes has still to be."""
        self.lost = 0
        """How often it had to be told from the start again."""

    def observe(self, report: Report) -> None:
        """Transfers are not of interest here."""

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """Mark what has to be told, unless that has become too much."""
        marked = self._changed.get(tier)
        if marked is None or self._lost:
            return
        marked.update(stored)
        marked.update(removed)
        if sum(map(len, self._changed.values())) > self._most_changed:
            self._lost = True
            self._forget()
        self._woken.set()

    async def told(self) -> None:
        """Wait until all that has changed up to now has been told, as :meth:`tell` goes on."""
        if not (self._lost or self._telling or any(self._changed.values())):
            return
        told = anyio.Event()
        self._waiting.append(told)
        self._woken.set()
        self._hurried.set()
        await told.wait()

    async def tell(self, send: Send) -> None:
        """Tell everything, then each change, until cancelled. Raises what ``send`` raises."""
        self._cache.add_observer(self)
        try:
            while True:
                await self._tell_all(send)
                while not self._lost:
                    await self._gather()
                    await self._tell_changes(send)
                self.lost += 1
                self.in_step = False
                await send(Lost())
        finally:
            self._cache.remove_observer(self)

    async def _tell_all(self, send: Send) -> None:
        self._waiting_for_all += self._waiting
        self._waiting.clear()
        self._forget()
        self._lost = False
        due = time.monotonic() + GATHER_SECONDS
        for rows in self._cache.hierarchy.catalog.slices(ROWS_A_STEP):
            for tier in self._changed:
                held = self._cache.hierarchy.catalog.ready_keys(tier, rows)
                if held:
                    await send(Changed(tier, held, b""))
            if time.monotonic() > due:
                await self._tell_changes(send)
                due = time.monotonic() + GATHER_SECONDS
            if self._lost:
                return
            await anyio.sleep(PAUSE_SECONDS)
        await self._tell_changes(send)
        if not self._lost:
            await send(InStep())
            self.in_step = True
            _wake_up(self._waiting_for_all)

    async def _gather(self) -> None:
        await self._woken.wait()
        with anyio.move_on_after(GATHER_SECONDS):
            await self._hurried.wait()

    async def _tell_changes(self, send: Send) -> None:
        """Tell what is marked by now."""
        self._woken, self._hurried = anyio.Event(), anyio.Event()
        waiting, self._waiting = self._waiting, []
        self._telling = True
        for tier, marked in self._changed.items():
            self._changed[tier] = set()
            while marked and not self._lost:
                part = [marked.pop() for _ in range(min(len(marked), KEYS_A_PART))]
                await send(self._state_of(tier, part))
        self._telling = False
        if self._lost:
            self._waiting += waiting
        else:
            _wake_up(waiting)

    def _state_of(self, tier: int, keys: Sequence[ChunkKey]) -> Changed:
        stored: list[ChunkKey] = []
        removed: list[ChunkKey] = []
        for key, (ready, _) in zip(keys, self._cache.hierarchy.catalog.places(keys), strict=True):
            (stored if ready >> tier & 1 else removed).append(key)
        return Changed(tier, join_keys(stored), join_keys(removed))

    def _forget(self) -> None:
        for tier in self._changed:
            self._changed[tier] = set()


def _wake_up(waiting: list[anyio.Event]) -> None:
    for told in waiting:
        told.set()
    waiting.clear()
