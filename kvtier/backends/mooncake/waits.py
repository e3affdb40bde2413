"""Locks on keys and a bounded thread pool, both with the tier's deadline as their timeout."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import anyio

from kvtier.concurrency.threads import WorkerThreads, in_thread
from kvtier.memory.keys import ChunkKey

ResultT = TypeVar("ResultT")


class Threads:
    """A bounded number of worker threads. For use from the event loop."""

    def __init__(self, count: int, timeout: float) -> None:
        self._free = anyio.Semaphore(count)
        self._timeout = timeout
        self._executor = WorkerThreads(count)

    async def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Call ``function`` in a thread. Raises ``TimeoutError`` if none is free within the timeout.

        Returns only after the function has returned, even if cancelled.
        """
        with anyio.fail_after(self._timeout):
            await self._free.acquire()
        try:
            return await in_thread(function, self._executor)
        finally:
            self._free.release()


@dataclass(slots=True, eq=False)
class _Ticket:
    """A batch's position in the queue of each of its keys."""

    keys: frozenset[ChunkKey]
    exclusive: bool
    granted: anyio.Event = field(default_factory=anyio.Event)


class KeyLocks:
    """Fair reader-writer locks on keys: readers share a key, a writer has it alone, in FIFO order.

    A batch enters the queues of all its keys at once, so that two batches cannot deadlock. Not thread-safe.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._queues: dict[ChunkKey, deque[_Ticket]] = {}

    @asynccontextmanager
    async def held(self, keys: Iterable[ChunkKey], *, exclusive: bool) -> AsyncIterator[None]:
        """Lock ``keys``, which may contain duplicates. Raises ``TimeoutError`` after the timeout."""
        ticket = _Ticket(frozenset(keys), exclusive)
        for key in ticket.keys:
            self._queues.setdefault(key, deque()).append(ticket)
        try:
            if not self._can_run(ticket):
                with anyio.fail_after(self._timeout):
                    await ticket.granted.wait()
            yield
        finally:
            self._release(ticket)

    def _can_run(self, ticket: _Ticket) -> bool:
        """Return whether no earlier ticket in any of its queues conflicts with this one."""
        for key in ticket.keys:
            for earlier in self._queues[key]:
                if earlier is ticket:
                    break
                if ticket.exclusive or earlier.exclusive:
                    return False
        return True

    def _release(self, ticket: _Ticket) -> None:
        behind: dict[_Ticket, None] = {}
        for key in ticket.keys:
            queue = self._queues[key]
            queue.remove(ticket)
            behind.update(dict.fromkeys(queue))
            if not queue:
                del self._queues[key]
        for waiting in behind:
            if self._can_run(waiting):
                waiting.granted.set()
