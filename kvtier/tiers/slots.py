"""Bounded concurrency of a tier, with priorities."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, count

import anyio

from kvtier.events import Priority

MAX_PASSED = 16


@dataclass(order=True, slots=True)
class _Waiter:
    """A call that waits for a slot. The most urgent one is the smallest, then the oldest."""

    priority: Priority
    number: int
    admitted: anyio.Event = field(default_factory=anyio.Event, compare=False)


@dataclass(slots=True)
class _Queue:
    """The calls of background work, or those of all other priorities."""

    in_flight: int = 0
    waiters: list[_Waiter] = field(default_factory=list)
    """A heap."""


class Slots:
    """Limits the batches that a tier transfers at a time. The most urgent one that waits is the next.

    A batch in flight cannot be interrupted. So background work takes at most half of the slots, and one while
    a more urgent batch is in flight: a request rarely waits for it. It is passed by at most
    :data:`MAX_PASSED` others, so that steady reads do not end all writes.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._urgent, self._background = _Queue(), _Queue()
        self._passed = 0
        """More urgent batches admitted since background work waits with none of it in flight."""
        self._numbers = count()

    def waiting(self, priority: Priority) -> int:
        """Return how many calls are to be admitted before a new one with this priority."""
        waiters = chain(self._urgent.waiters, self._background.waiters)
        return sum(waiter.priority <= priority for waiter in waiters)

    @asynccontextmanager
    async def taken(self, priority: Priority) -> AsyncIterator[None]:
        """Wait for a slot, and hold it within the block."""
        waiter = _Waiter(priority, next(self._numbers))
        queue = self._background if priority is Priority.BACKGROUND else self._urgent
        heappush(queue.waiters, waiter)
        self._admit()
        try:
            await waiter.admitted.wait()
            yield
        finally:
            if waiter.admitted.is_set():
                queue.in_flight -= 1
            else:
                queue.waiters.remove(waiter)
                heapify(queue.waiters)
            self._admit()

    def _admit(self) -> None:
        """Admit the next calls, while there is a slot for them."""
        while (queue := self._next()) is not None:
            queue.in_flight += 1
            heappop(queue.waiters).admitted.set()

    def _next(self) -> _Queue | None:
        """Return the queue whose first call is admitted next, if there is a slot for it."""
        urgent, background = self._urgent, self._background
        if urgent.in_flight + background.in_flight >= self._total:
            return None
        most = 1 if urgent.in_flight else max(1, self._total // 2)
        may_start = bool(background.waiters) and background.in_flight < most
        if urgent.waiters and not (may_start and self._passed >= MAX_PASSED):
            self._passed += may_start and not background.in_flight
            return urgent
        if not may_start:
            return None
        self._passed = 0
        return background
