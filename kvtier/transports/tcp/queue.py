"""The parts that a link has yet to transfer, and its drivers. Used from the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvtier.concurrency.sockets.connection import Connection
from kvtier.transports.base import Access
from kvtier.transports.tcp.batch import Batch, Part


class PartQueue:
    """A FIFO queue of parts, with a count of the drivers that process it."""

    def __init__(self) -> None:
        self._parts: deque[Part] = deque()
        self._drivers = 0
        self._in_use: dict[Connection, Sequence[Part]] = {}
        """The parts whose memory a connection is using now."""
        self._interrupted: set[Connection] = set()

    def add(self, parts: Sequence[Part]) -> None:
        """Append parts."""
        self._parts.extend(parts)

    def requeue(self, parts: Sequence[Part]) -> None:
        """Put unfinished parts back at the front."""
        self._parts.extendleft(part for part in reversed(parts) if part.pieces and not part.batch.ended)

    def next(self, access: Access | None = None) -> Part | None:
        """Remove and return the first part; with ``access``, only if the part has that access."""
        if not self._parts or (access is not None and self._parts[0].batch.access is not access):
            return None
        return self._parts.popleft()

    def clear(self) -> None:
        """Remove all parts."""
        self._parts.clear()

    def fail(self) -> None:
        """Fail all queued parts."""
        batches = {part.batch for part in self._parts}
        self._parts.clear()
        for batch in batches:
            batch.end()

    def abandon(self, batch: Batch) -> None:
        """End a batch, and interrupt the connections that use its memory."""
        batch.end()
        self._parts = deque(part for part in self._parts if part.batch is not batch)
        in_use: set[Part] = set()
        for connection, parts in self._in_use.items():
            if any(part.batch is batch for part in parts):
                in_use.update(parts)
                self._interrupted.add(connection)
                connection.interrupt()
        for part in batch.parts:
            if part not in in_use:
                part.pieces.clear()

    def acquire(self, connection: Connection, parts: Sequence[Part]) -> None:
        """Mark the memory of these parts as in use by a connection. Their batches must not have ended."""
        for part in parts:
            part.batch.acquire()
        self._in_use[connection] = parts

    def release(self, connection: Connection) -> None:
        """Undo :meth:`acquire`."""
        for part in self._in_use.pop(connection):
            part.batch.release()

    def was_interrupted(self, connection: Connection) -> bool:
        """Return whether a connection broke only because of :meth:`abandon`, and reset that."""
        was = connection in self._interrupted
        self._interrupted.discard(connection)
        return was

    def add_drivers(self, limit: int) -> int:
        """Return how many drivers to start for the queued parts, at most ``limit`` in all, and count them."""
        more = max(min(limit - self._drivers, len(self._parts)), 0)
        self._drivers += more
        return more

    def keep_driver(self) -> bool:
        """Return whether the calling driver has work. If not, it must exit, and is not counted any more."""
        if not self._parts:
            self._drivers -= 1
            return False
        return True

    def remove_driver(self) -> None:
        """Uncount a driver that exits before the queue is empty."""
        self._drivers -= 1
