"""Locks on chunks: shared for operations that only copy or pin, exclusive for those that delete or unpin.

Two concurrent moves of one prompt in opposite directions could each delete what the other has just confirmed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from kvtier.memory.keys import ChunkKey


class LockRequest:
    """The chunks that an operation locks, between ``enqueue`` and ``release``."""

    def __init__(
        self, instances: frozenset[str], roots: frozenset[ChunkKey] | None, *, exclusive: bool
    ) -> None:
        """``roots`` are the first keys of prompts; ``None`` for all chunks of the ``instances``.

        A key depends on all tokens before it, so two prompts share chunks only if they share the first one.
        Locking by first key is conservative, and takes one comparison regardless of the prompts' length.
        """
        self._instances = instances
        self._roots = roots
        self._exclusive = exclusive
        self.released = anyio.Event()

    def conflicts_with(self, other: LockRequest) -> bool:
        """Return whether the two operations must not run concurrently."""
        if not (self._exclusive or other._exclusive):
            return False
        if self._roots is None or other._roots is None:
            return not self._instances.isdisjoint(other._instances)
        return not self._roots.isdisjoint(other._roots)


class LockManager:
    """All lock requests, granted and waiting, in FIFO order."""

    def __init__(self) -> None:
        self._requests: dict[LockRequest, None] = {}

    def is_free(self, request: LockRequest) -> bool:
        """Return whether a request would be granted immediately."""
        return not any(request.conflicts_with(other) for other in self._requests)

    def enqueue(self, request: LockRequest) -> None:
        """Append a request to the queue. The caller must then :meth:`acquire` or :meth:`release` it."""
        self._requests[request] = None

    def release(self, request: LockRequest) -> None:
        """Remove a request from the queue and wake its waiters. Idempotent."""
        self._requests.pop(request, None)
        request.released.set()

    @asynccontextmanager
    async def acquire(self, request: LockRequest) -> AsyncIterator[None]:
        """Wait until all earlier conflicting requests are released, and hold the lock within the block.

        A request never waits for a later one, so deadlocks are impossible.
        """
        try:
            before = []
            for other in self._requests:
                if other is request:
                    break
                if request.conflicts_with(other):
                    before.append(other)
            for other in before:
                await other.released.wait()
            yield
        finally:
            self.release(request)
