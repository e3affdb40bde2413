"""Turns on keys and on threads, for which nobody waits longer than a tier's deadline."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio

from kvtier.keys import ChunkKey
from kvtier.threads import WorkerThreads, spread

ResultT = TypeVar("ResultT")


class Threads:
    """A bounded number of worker threads. Called from the event loop."""

    def __init__(self, count: int, patience: float) -> None:
        self._free = anyio.Semaphore(count)
        self._patience = patience
        self._hop = WorkerThreads(count)

    async def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Call ``function`` in a thread; raises ``TimeoutError`` where none is free within the patience.

        Ends only when the thread is through, also where it is cancelled.
        """
        with anyio.fail_after(self._patience):
            await self._free.acquire()
        try:
            (result,) = await spread(_call, [function], parts=1, hop=self._hop)
        finally:
            self._free.release()
        return result


class _Ticket:
    """One batch's place in the queue of each of its keys."""

    __slots__ = ("exclusive", "keys", "may_go")

    def __init__(self, keys: frozenset[ChunkKey], *, exclusive: bool) -> None:
        self.keys = keys
        self.exclusive = exclusive
        self.may_go = anyio.Event()


class KeyLocks:
    """Lets batches that read a key go together, and one that changes it alone, first come first served.

    A batch waits for all its keys at once, and stands in all its queues from the moment that it comes: no two
    batches wait for each other. Not thread-safe.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._queues: dict[ChunkKey, deque[_Ticket]] = {}

    @asynccontextmanager
    async def held(self, keys: Iterable[ChunkKey], *, exclusive: bool) -> AsyncIterator[None]:
        """Hold ``keys``, which may name one more than once. Raises ``TimeoutError`` after the patience."""
        ticket = _Ticket(frozenset(keys), exclusive=exclusive)
        for key in ticket.keys:
            self._queues.setdefault(key, deque()).append(ticket)
        try:
            if not self._is_due(ticket):
                with anyio.fail_after(self._patience):
                    await ticket.may_go.wait()
            yield
        finally:
            self._leave(ticket)

    def _is_due(self, ticket: _Ticket) -> bool:
        """Whether nobody before it, in any of its queues, is in its way."""
        for key in ticket.keys:
            for earlier in self._queues[key]:
                if earlier is ticket:
                    break
                if ticket.exclusive or earlier.exclusive:
                    return False
        return True

    def _leave(self, ticket: _Ticket) -> None:
        behind: dict[_Ticket, None] = {}
        for key in ticket.keys:
            queue = self._queues[key]
            queue.remove(ticket)
            behind.update(dict.fromkeys(queue))
            if not queue:
                del self._queues[key]
        for waiting in behind:
            if self._is_due(waiting):
                waiting.may_go.set()


def _call(function: Callable[[], ResultT]) -> ResultT:
    return function()
