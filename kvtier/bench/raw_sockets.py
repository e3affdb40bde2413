"""Limit of a TCP transport: move bytes between two arenas on blocking sockets, with a thread each.

A request is a kind, an offset and a length. ``R``: the server replies with ``length`` bytes of its arena.
``W``: ``length`` bytes for its arena follow; the server acknowledges them. ``E``: ``length`` bytes follow,
which the server drops; it replies with ``offset`` bytes.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from kvtier.concurrency.threads import WorkerThreads, spread
from kvtier.memory.arena import Arena
from kvtier.memory.slices import PAGE_BYTES
from kvtier.transports.base import Access

_REQUEST = struct.Struct("<c7xQQ40x")
"""64 bytes, because the kernel takes up to twice as long for unaligned copies."""
_DONE = bytes(64)


class Span(NamedTuple):
    """A byte range in both arenas: the offset in each, and the length."""

    local: int
    remote: int
    length: int


GetView = Callable[[int, int], memoryview]
"""Returns a view of an arena, given offset and length."""


@contextmanager
def serving(view: GetView) -> Iterator[int]:
    """Serve connections, with a thread each, until the block exits. Yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, view), daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, view: GetView) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection, view), daemon=True).start()


def _serve(connection: socket.socket, view: GetView) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    scratch = memoryview(bytearray(1 << 20))
    with connection, suppress(ConnectionError):
        while request := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
            kind, offset, length = _REQUEST.unpack(request)
            if kind == b"R":
                connection.sendall(view(offset, length))
            elif kind == b"W":
                _fill(connection, view(offset, length))
                connection.sendall(_DONE)
            else:
                _fill(connection, scratch[:length])
                connection.sendall(scratch[:offset])


class RawSockets:
    """The client. Each connection moves an equal share of the bytes."""

    def __init__(self, arena: Arena, port: int, connections: int) -> None:
        self._arena = arena
        self._connections = [_connect(port) for _ in range(connections)]
        self._threads = WorkerThreads(connections)

    async def move(self, access: Access, spans: Sequence[Span]) -> float:
        """Read or write all spans; return the duration in seconds."""
        started = time.perf_counter()
        shares = _split(spans, len(self._connections))
        moves = list(zip(self._connections, shares, strict=False))
        await spread(
            lambda move: self._move(move[0], access, move[1]), moves, parts=len(moves), executor=self._threads
        )
        return time.perf_counter() - started

    async def read_repeatedly(self, span: Span, runs: int) -> list[float]:
        """Read one span ``runs`` times; return the seconds of each. Blocks the event loop, on purpose."""
        seconds = []
        for _ in range(runs):
            started = time.perf_counter()
            self._move(self._connections[0], Access.READ, [span])
            seconds.append(time.perf_counter() - started)
        return seconds

    def ask(self, request: memoryview, reply: memoryview) -> None:
        """Send ``request`` and fill ``reply``. Blocks."""
        connection = self._connections[0]
        connection.sendmsg([_REQUEST.pack(b"E", len(reply), len(request)), request])
        _fill(connection, reply)

    def _move(self, connection: socket.socket, access: Access, share: Sequence[Span]) -> None:
        if access is Access.READ:
            connection.sendall(b"".join(_REQUEST.pack(b"R", remote, length) for _, remote, length in share))
            for local, _, length in share:
                _fill(connection, self._arena.view(local, length))
            return
        for local, remote, length in share:
            connection.sendall(_REQUEST.pack(b"W", remote, length))
            connection.sendall(self._arena.view(local, length))
        _fill(connection, memoryview(bytearray(len(share) * len(_DONE))))

    def close(self) -> None:
        """Close the connections and let the threads exit."""
        self._threads.close()
        for connection in self._connections:
            connection.close()


def _split(spans: Sequence[Span], count: int) -> list[list[Span]]:
    """Split the bytes into ``count`` equal shares, each as contiguous as possible."""
    total = sum(span.length for span in spans)
    share_bytes = -(-total // count // PAGE_BYTES) * PAGE_BYTES
    shares: list[list[Span]] = [[]]
    room = share_bytes
    for local, remote, length in spans:
        done = 0
        while done < length:
            if not room:
                shares.append([])
                room = share_bytes
            part = min(room, length - done)
            shares[-1].append(Span(local + done, remote + done, part))
            done += part
            room -= part
    return shares


def _connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _fill(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        received = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        if not received:
            raise ConnectionResetError("the peer closed the connection")
        view = view[received:]
