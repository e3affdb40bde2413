"""Connections that were given up amid an answer, read to its end before they are closed.

An InfiniStore (0.2.35) that finds a connection closed on which it still has something to send frees it twice
and ends itself, for everybody who uses it. So who is out of time leaves its connection here.
"""

from __future__ import annotations

import select
import time
from threading import Lock, Thread
from typing import Protocol

PATIENCE_SECONDS = 600.0
"""A server that stands still longer than this is hung up on all the same."""
MOST_CONNECTIONS = 256
SCRATCH_BYTES = 256 << 10
TURN_SECONDS = 0.05
"""How soon a connection that has just come is looked at."""


class Leaving(Protocol):
    """A connection whose answer nobody wants any longer."""

    def fileno(self) -> int:
        """Its socket."""
        ...

    def discard(self, scratch: memoryview) -> bool:
        """Read into ``scratch`` what has come, without waiting; whether that was the last of it."""
        ...

    def hang_up(self) -> None:
        """Close the socket now."""
        ...


class Drain:
    """Reads what is still sent on any number of connections, in one thread that ends with the last of them.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._until: dict[Leaving, float] = {}
        self._last_call = float("inf")
        self._thread: Thread | None = None

    def add(self, connection: Leaving) -> None:
        """Read on to the end of the answer, then close ``connection``. Does not block."""
        with self._lock:
            if len(self._until) < MOST_CONNECTIONS:
                self._until[connection] = time.monotonic() + PATIENCE_SECONDS
                if self._thread is None:
                    self._thread = Thread(target=self._run, name="kvtier-drain", daemon=True)
                    self._thread.start()
                return
        connection.hang_up()

    def close(self, seconds: float) -> None:
        """Wait for what is still sent, so long at most, and close the rest. Blocks; the last call of all."""
        with self._lock:
            self._last_call = time.monotonic() + seconds
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        scratch = memoryview(bytearray(SCRATCH_BYTES))
        while connections := self._still_here():
            poll = select.poll()
            for descriptor in connections:
                poll.register(descriptor, select.POLLIN)
            ended = [
                connections[descriptor]
                for descriptor, _ in poll.poll(1000 * TURN_SECONDS)
                if connections[descriptor].discard(scratch)
            ]
            now = time.monotonic()
            with self._lock:
                ended += [
                    connection
                    for connection, until in self._until.items()
                    if now > min(until, self._last_call) and connection not in ended
                ]
                for connection in ended:
                    del self._until[connection]
            for connection in ended:
                connection.hang_up()

    def _still_here(self) -> dict[int, Leaving]:
        """By descriptor. Where there are none, the thread is through: the next connection starts another."""
        with self._lock:
            if not self._until:
                self._thread = None
            return {connection.fileno(): connection for connection in self._until}
