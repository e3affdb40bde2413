"""Drain abandoned connections: read the pending reply to its end, then close.

An InfiniStore (0.2.35) that has data to send on a closed connection frees it twice and crashes, for all its
clients. So callers that time out pass their connection to a drain instead of closing it.
"""

from __future__ import annotations

import select
import time
from threading import Lock, Thread
from typing import Protocol

TIMEOUT_SECONDS = 600.0
"""A connection to a server that hangs longer than this is closed anyway."""
MAX_CONNECTIONS = 256
SCRATCH_BYTES = 256 << 10
POLL_SECONDS = 0.05
"""Maximum delay until a new connection is polled."""


class Draining(Protocol):
    """A connection whose reply is no longer needed."""

    def fileno(self) -> int:
        """Return the socket's descriptor."""

    def discard(self, scratch: memoryview) -> bool:
        """Read available data into ``scratch`` without blocking. Return whether the reply is complete."""

    def hang_up(self) -> None:
        """Close the socket immediately."""


class Drain:
    """Drains any number of connections in one thread, which ends with the last of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._until: dict[Draining, float] = {}
        self._close_at = float("inf")
        self._thread: Thread | None = None

    def add(self, connection: Draining) -> None:
        """Read the rest of the reply, then close ``connection``. Does not block."""
        with self._lock:
            if len(self._until) < MAX_CONNECTIONS:
                self._until[connection] = time.monotonic() + TIMEOUT_SECONDS
                if self._thread is None:
                    self._thread = Thread(target=self._run, name="kvtier-drain", daemon=True)
                    self._thread.start()
                return
        connection.hang_up()

    def close(self, seconds: float) -> None:
        """Wait up to ``seconds`` for pending replies, then close all connections. Blocks. Must be last."""
        with self._lock:
            self._close_at = time.monotonic() + seconds
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        scratch = memoryview(bytearray(SCRATCH_BYTES))
        while connections := self._pending():
            poll = select.poll()
            for descriptor in connections:
                poll.register(descriptor, select.POLLIN)
            ended = [
                connections[descriptor]
                for descriptor, _ in poll.poll(1000 * POLL_SECONDS)
                if connections[descriptor].discard(scratch)
            ]
            now = time.monotonic()
            with self._lock:
                ended += [
                    connection
                    for connection, until in self._until.items()
                    if now > min(until, self._close_at) and connection not in ended
                ]
                for connection in ended:
                    del self._until[connection]
            for connection in ended:
                connection.hang_up()

    def _pending(self) -> dict[int, Draining]:
        """Return the connections by descriptor. If empty, the thread must end; ``add`` starts another one."""
        with self._lock:
            if not self._until:
                self._thread = None
            return {connection.fileno(): connection for connection in self._until}
