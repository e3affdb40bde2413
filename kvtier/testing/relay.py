"""A TCP proxy for tests that can hold bytes back and break connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

CHUNK_BYTES = 1 << 18
SOCKET_BYTES = 1 << 17
"""Receive buffer size. With the default, the kernel would accept megabytes of the bytes held back."""
_FOREVER = 1 << 62


class Relay:
    """A proxy on loopback that forwards bytes in both directions, in its own threads.

    ``hold_after`` forwards that many further bytes, of all connections in total, and holds back the rest
    until ``release``. ``cut`` breaks all connections, including new ones, until ``heal``. Thread-safe; only
    :meth:`close` blocks.
    """

    def __init__(self, port: int) -> None:
        self.forwarded = 0
        """Number of bytes forwarded in both directions."""
        self.accepted = 0
        """Number of accepted connections."""
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Accepted sockets inherit this.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        self.port: int = self._listener.getsockname()[1]
        """Where it listens, on loopback."""
        self._budget = _FOREVER
        self._condition = threading.Condition()
        self._is_cut = False
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @classmethod
    @contextmanager
    def to(cls, port: int) -> Iterator[Relay]:
        """Run a relay to a port of this host within the block."""
        relay = cls(port)
        try:
            yield relay
        finally:
            relay.close()

    @property
    def is_holding(self) -> bool:
        """Whether the byte limit of :meth:`hold_after` is reached."""
        with self._condition:
            return self._budget <= 0

    def hold_after(self, count: int) -> None:
        """Forward ``count`` more bytes, then hold back."""
        with self._condition:
            self._budget = count
            self._condition.notify_all()

    def release(self) -> None:
        """Forward everything, including the bytes held back."""
        self.hold_after(_FOREVER)

    def cut(self) -> None:
        """Break all connections, and new ones, as if the network were down. Bytes held back are lost."""
        with self._condition:
            self._is_cut = True
            for connected in self._sockets:
                with suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)
            self._condition.notify_all()

    def heal(self) -> None:
        """Accept connections again."""
        with self._condition:
            self._is_cut = False

    def close(self) -> None:
        """Break all connections and stop the threads."""
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
            self._start(self._forward, near, far)
            self._start(self._forward, far, near)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with suppress(OSError):
            while received := source.recv_into(buffer):
                sent = 0
                while sent < received:
                    allowed = self._allowed(received - sent)
                    target.sendall(buffer[sent : sent + allowed])
                    sent += allowed
                    with self._condition:
                        self.forwarded += allowed
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        # The second of the two threads closes both sockets.
        with self._condition:
            if source not in self._sockets:
                source.close()
                target.close()
            self._sockets -= {source, target}

    def _allowed(self, requested: int) -> int:
        with self._condition:
            while self._budget <= 0 and not self._is_cut:
                self._condition.wait()
            if self._is_cut:
                raise ConnectionResetError
            allowed = min(requested, self._budget)
            self._budget -= allowed
            return allowed
