"""Bounded concurrency of a tier, with priorities."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

import anyio

from kvtier.events import Priority


@dataclass(order=True, slots=True)
class _Waiter:
    """A call that waits for a slot. The most urgent one is the smallest, then the oldest."""

    priority: Priority
    number: int
    admitted: anyio.Event = field(default_factory=anyio.Event, compare=False)


class Slots:
    """Limits the batches that a tier transfers at a time. The most urgent one that waits is the next.

    A batch in flight cannot be interrupted. So background work takes at most half of the slots, and only one
    while a more urgent batch is in flight or waits: it is never starved, and a request rarely waits for it.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._urgent = 0
        """Batches in flight with a higher priority than the background."""
        self._background = 0
        """Other batches in flight."""
        self._waiters: list[_Waiter] = []
        self._numbers = count()

    def waiting(self, priority: Priority) -> int:
        """Return how many calls are to be admitted before a new one with this priority."""
        return sum(waiter.priority <= priority for waiter in self._waiters)

    @asynccontextmanager
    async def taken(self, priority: Priority) -> AsyncIterator[None]:
        """Wait for a slot, and hold it within the block."""
        waiter = _Waiter(priority, next(self._numbers))
        heappush(self._waiters, waiter)
        self._admit()
        try:
            await waiter.admitted.wait()
            yield
        finally:
            if not waiter.admitted.is_set():
                self._waiters.remove(waiter)
                heapify(self._waiters)
            elif priority is Priority.BACKGROUND:
                self._background -= 1
            else:
                self._urgent -= 1
            self._admit()

    def _admit(self) -> None:
        """Admit the next calls, while there is a slot for them."""
        while self._waiters and self._has_slot(self._waiters[0].priority):
            waiter = heappop(self._waiters)
            if waiter.priority is Priority.BACKGROUND:
                self._background += 1
            else:
                self._urgent += 1
            waiter.admitted.set()

    def _has_slot(self, priority: Priority) -> bool:
        if self._urgent + self._background >= self._total:
            return False
        if priority is not Priority.BACKGROUND:
            return True
        return self._background < (1 if self._urgent else max(1, self._total // 2))
