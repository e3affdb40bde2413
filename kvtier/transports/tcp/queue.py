"""What a link has still to bring, and who is about to bring it. Used from the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvtier.sockets.connection import Connection
from kvtier.transports.base import Access
from kvtier.transports.tcp.batch import Batch, Part


class PartQueue:
    """Parts in the order in which they were asked for."""

    def __init__(self) -> None:
        self._parts: deque[Part] = deque()
        self._drivers = 0
        self._held: dict[Connection, Sequence[Part]] = {}
        """The parts whose memory is being used for this connection now."""
        self._interrupted: set[Connection] = set()

    def add(self, parts: Sequence[Part]) -> None:
        """Put parts at the end."""
        self._parts.extend(parts)

    def put_back(self, parts: Sequence[Part]) -> None:
        """Put parts at the front that were taken and not brought."""
        self._parts.extendleft(part for part in reversed(parts) if part.pieces and not part.batch.is_over)

    def next(self, access: Access | None = None) -> Part | None:
        """Take the first part; with ``access`` only where it is of that."""
        if not self._parts or (access is not None and self._parts[0].batch.access is not access):
            return None
        return self._parts.popleft()

    def clear(self) -> None:
        """Forget all parts."""
        self._parts.clear()

    def fail(self) -> None:
        """Nothing of what there is will ever be brought."""
        batches = {part.batch for part in self._parts}
        self._parts.clear()
        for batch in batches:
            batch.end()

    def abandon(self, batch: Batch) -> None:
        """Nobody waits for this batch any longer: have its memory let go of soon."""
        batch.end()
        self._parts = deque(part for part in self._parts if part.batch is not batch)
        held: set[Part] = set()
        for connection, parts in self._held.items():
            if any(part.batch is batch for part in parts):
                held.update(parts)
                self._interrupted.add(connection)
                connection.interrupt()
        for part in batch.parts:
            if part not in held:
                part.pieces.clear()

    def grip(self, connection: Connection, parts: Sequence[Part]) -> None:
        """The memory of these parts, whose batches are not over, is about to be used for a connection."""
        for part in parts:
            part.batch.grip()
        self._held[connection] = parts

    def ungrip(self, connection: Connection) -> None:
        """It is not any longer."""
        for part in self._held.pop(connection):
            part.batch.ungrip()

    def was_interrupted(self, connection: Connection) -> bool:
        """Whether a connection broke only because somebody gave up. Asked once."""
        was = connection in self._interrupted
        self._interrupted.discard(connection)
        return was

    def take_on(self, most: int) -> int:
        """How many drivers to start for what there is, where there may be ``most``. They count as started."""
        more = max(min(most - self._drivers, len(self._parts)), 0)
        self._drivers += more
        return more

    def goes_on(self) -> bool:
        """Whether there is something for a driver to do; else it has ended."""
        if not self._parts:
            self._drivers -= 1
            return False
        return True

    def leave(self) -> None:
        """A driver ends with something left to do."""
        self._drivers -= 1
