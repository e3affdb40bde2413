"""Fair reader-writer locks on sets of keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio


class LockRequest:
    """What a caller locks, between :meth:`LockManager.enqueue` and :meth:`LockManager.release`."""

    def __init__(self, keys: frozenset[bytes] | None, owners: frozenset[str], *, exclusive: bool) -> None:
        """``keys``: ``None`` for all that belong to the ``owners``, which matter only then."""
        self._keys = keys
        self._owners = owners
        self._exclusive = exclusive
        self.released = anyio.Event()

    def conflicts_with(self, other: LockRequest) -> bool:
        """Return whether both must not be held at the same time."""
        if not (self._exclusive or other._exclusive):
            return False
        if self._keys is None or other._keys is None:
            return not self._owners.isdisjoint(other._owners)
        return not self._keys.isdisjoint(other._keys)


class LockManager:
    """All lock requests, granted and waiting, in FIFO order. Bound to one event loop.

    A request waits for earlier ones only, and is made for all of its keys at once: deadlocks are impossible.
    """

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
    async def acquire(self, request: LockRequest, seconds: float | None = None) -> AsyncIterator[None]:
        """Wait until earlier conflicting requests are released, and hold the lock within the block.

        Raises ``TimeoutError`` if that takes longer than ``seconds``.
        """
        try:
            with anyio.fail_after(seconds):
                for other in list(self._requests):
                    if other is request:
                        break
                    if request.conflicts_with(other):
                        await other.released.wait()
            yield
        finally:
            self.release(request)

    @asynccontextmanager
    async def held(self, request: LockRequest, seconds: float | None = None) -> AsyncIterator[None]:
        """Append a request to the queue, and hold the lock within the block as :meth:`acquire` does."""
        self.enqueue(request)
        async with self.acquire(request, seconds):
            yield
