"""What a link has still to bring, and who is about to bring it. Used from the event loop and from threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock

from kvtier.sockets.connection import Connection
from kvtier.transports.base import Access
from kvtier.transports.tcp.batch import Batch, Part


class PartQueue:
    """Parts in the order in which they were asked for. Nothing here blocks for longer than the lock."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._parts: deque[Part] = deque()
        self._pumps = 0
        self._held: dict[Connection, Part] = {}
        """The part whose memory the thread with this connection is touching now."""
        self._interrupted: set[Connection] = set()

    def add(self, parts: Sequence[Part]) -> None:
        """Put parts at the end."""
        with self.lock:
            self._parts.extend(parts)

    def put_back(self, parts: Sequence[Part]) -> None:
        """Put parts at the front that were taken and not brought."""
        with self.lock:
            self._parts.extendleft(part for part in reversed(parts) if part.pieces and not part.batch.is_over)

    def next(self, access: Access | None = None) -> Part | None:
        """Take the first part; with ``access`` only where it is of that."""
        with self.lock:
            if not self._parts or (access is not None and self._parts[0].batch.access is not access):
                return None
            return self._parts.popleft()

    def clear(self) -> None:
        """Forget all parts."""
        with self.lock:
            self._parts.clear()

    def fail(self) -> None:
        """Nothing of what there is will ever be brought."""
        with self.lock:
            batches = {part.batch for part in self._parts}
            self._parts.clear()
            for batch in batches:
                batch.end()

    def abandon(self, batch: Batch) -> None:
        """Nobody waits for this batch any longer: have its memory let go of soon."""
        with self.lock:
            batch.end()
            self._parts = deque(part for part in self._parts if part.batch is not batch)
            held = set()
            for connection, part in self._held.items():
                if part.batch is batch:
                    held.add(part)
                    self._interrupted.add(connection)
                    connection.interrupt()
            for part in batch.parts:
                if part not in held:
                    part.pieces.clear()

    def grip(self, connection: Connection, part: Part) -> bool:
        """The thread with this connection is about to touch a part's memory; ``False``: it must not."""
        with self.lock:
            if not part.batch.grip():
                return False
            self._held[connection] = part
            return True

    def ungrip(self, connection: Connection) -> None:
        """It has let go of it."""
        with self.lock:
            self._held.pop(connection).batch.ungrip()

    def was_interrupted(self, connection: Connection) -> bool:
        """Whether a connection broke only because somebody gave up. Asked once."""
        with self.lock:
            was = connection in self._interrupted
            self._interrupted.discard(connection)
            return was

    def take_on(self, most: int) -> int:
        """How many threads to start for what there is, where there may be ``most``. Count them as started."""
        with self.lock:
            more = max(min(most - self._pumps, len(self._parts)), 0)
            self._pumps += more
            return more

    def goes_on(self) -> bool:
        """Whether there is something for a thread to do; else it has ended."""
        with self.lock:
            if not self._parts:
                self._pumps -= 1
                return False
            return True

    def leave(self) -> None:
        """A thread ends with something left to do."""
        with self.lock:
            self._pumps -= 1
