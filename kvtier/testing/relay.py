"""A relay between the two ends of TCP connections, which can hold bytes back, and cut."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

CHUNK_BYTES = 1 << 18
SOCKET_BYTES = 1 << 17
"""What the kernel may hold of what was sent here: else it would take in megabytes that are held back."""
_FOREVER = 1 << 62


class Relay:
    """Listens on loopback and passes on what comes, both ways, in threads of its own.

    ``hold_after`` lets so many further bytes through, of all connections together, and holds back the rest
    until ``let_go``. ``cut`` breaks every connection, and each new one at once, until ``heal``. Callable from
    any thread; nothing blocks but :meth:`close`.
    """

    def __init__(self, port: int) -> None:
        self.forwarded = 0
        """Bytes that were passed on, in both directions together."""
        self.accepted = 0
        """Connections."""
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Those that it accepts inherit it.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        self.port: int = self._listener.getsockname()[1]
        self._budget = _FOREVER
        self._condition = threading.Condition()
        self._is_cut = False
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @classmethod
    @contextmanager
    def to(cls, port: int) -> Iterator[Relay]:
        """A relay to a port of this host, for as long as the block lasts."""
        relay = cls(port)
        try:
            yield relay
        finally:
            relay.close()

    @property
    def is_holding(self) -> bool:
        """Whether all that may pass has passed."""
        with self._condition:
            return self._budget <= 0

    def hold_after(self, count: int) -> None:
        """Pass on ``count`` more bytes and no others."""
        with self._condition:
            self._budget = count
            self._condition.notify_all()

    def let_go(self) -> None:
        """Pass on all there is."""
        self.hold_after(_FOREVER)

    def cut(self) -> None:
        """Break what there is and what comes, as a network does that is gone; what was held back is lost."""
        with self._condition:
            self._is_cut = True
            for one in self._sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            self._condition.notify_all()

    def heal(self) -> None:
        """Take connections again."""
        with self._condition:
            self._is_cut = False

    def close(self) -> None:
        """Break everything and end the threads."""
        self.cut()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, name="kvtier-relay", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            far = socket.socket()
            try:
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
                far.connect(("127.0.0.1", self._target))
            except OSError:
                near.close()
                far.close()
                continue
            with self._condition:
                if self._is_cut:
                    near.close()
                    far.close()
                    continue
                self._sockets |= {near, far}
            self._start(self._pass_on, near, far)
            self._start(self._pass_on, far, near)

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with suppress(OSError):
            while received := one.recv_into(buffer):
                sent = 0
                while sent < received:
                    allowed = self._allowed(received - sent)
                    other.sendall(buffer[sent : sent + allowed])
                    sent += allowed
                    with self._condition:
                        self.forwarded += allowed
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        # The second of the two to come here has both to itself.
        with self._condition:
            if one not in self._sockets:
                one.close()
                other.close()
            self._sockets -= {one, other}

    def _allowed(self, wanted: int) -> int:
        with self._condition:
            while self._budget <= 0 and not self._is_cut:
                self._condition.wait()
            if self._is_cut:
                raise ConnectionResetError
            allowed = min(wanted, self._budget)
            self._budget -= allowed
            return allowed
