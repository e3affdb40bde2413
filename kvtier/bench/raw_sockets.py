"""Bytes between two arenas by hand, on blocking sockets with a thread each: the limit of a TCP transport.

A request is a kind, an offset and a length. ``R`` is answered with so many bytes of the server's arena, ``W``
is followed by as many for it and answered when they are there, ``E`` is followed by as many to be dropped,
and answered with as many as its offset says.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import NamedTuple

from kvtier.arena import Arena
from kvtier.slices import PAGE_BYTES
from kvtier.transports.base import Access

_REQUEST = struct.Struct("<c7xQQ40x")
"""64 bytes: the kernel takes up to twice as long over copies that are not aligned."""
_DONE = bytes(64)


class Span(NamedTuple):
    """Bytes of both arenas."""

    ours: int
    theirs: int
    length: int


Viewing = Callable[[int, int], memoryview]
"""Gives so many bytes of an arena from an offset on."""


@contextmanager
def serving(view: Viewing) -> Iterator[int]:
    """Take connections at the port that is given, a thread for each, until the block is left."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, view), daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, view: Viewing) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection, view), daemon=True).start()


def _serve(connection: socket.socket, view: Viewing) -> None:
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
    """The side that asks. Each connection moves an equal share of what is to be moved."""

    def __init__(self, arena: Arena, port: int, connections: int) -> None:
        self._arena = arena
        self._connections = [_connected(port) for _ in range(connections)]
        self._threads = ThreadPoolExecutor(connections)

    async def move(self, access: Access, spans: Sequence[Span]) -> float:
        """Read or write all spans; the seconds that it took."""
        loop = asyncio.get_running_loop()
        started = time.perf_counter()
        shares = _shares(spans, len(self._connections))
        await asyncio.gather(
            *(
                loop.run_in_executor(self._threads, self._move, connection, access, share)
                for connection, share in zip(self._connections, shares, strict=False)
            )
        )
        return time.perf_counter() - started

    async def one_by_one(self, span: Span, runs: int) -> list[float]:
        """Read one span so many times; the seconds of each. Blocks the loop, which has nothing else to do."""
        seconds = []
        for _ in range(runs):
            started = time.perf_counter()
            self._move(self._connections[0], Access.READ, [span])
            seconds.append(time.perf_counter() - started)
        return seconds

    def ask(self, question: memoryview, answer: memoryview) -> None:
        """Send the one and wait for the other. Blocks."""
        connection = self._connections[0]
        connection.sendmsg([_REQUEST.pack(b"E", len(answer), len(question)), question])
        _fill(connection, answer)

    def _move(self, connection: socket.socket, access: Access, share: Sequence[Span]) -> None:
        if access is Access.READ:
            connection.sendall(b"".join(_REQUEST.pack(b"R", theirs, length) for _, theirs, length in share))
            for ours, _, length in share:
                _fill(connection, self._arena.view(ours, length))
            return
        for ours, theirs, length in share:
            connection.sendall(_REQUEST.pack(b"W", theirs, length))
            connection.sendall(self._arena.view(ours, length))
        _fill(connection, memoryview(bytearray(len(share) * len(_DONE))))

    def close(self) -> None:
        """Let go of connections and threads."""
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()


def _shares(spans: Sequence[Span], count: int) -> list[list[Span]]:
    """The same bytes in so many equal shares, each of them in one piece as far as can be."""
    total = sum(span.length for span in spans)
    share_bytes = -(-total // count // PAGE_BYTES) * PAGE_BYTES
    shares: list[list[Span]] = [[]]
    room = share_bytes
    for ours, theirs, length in spans:
        done = 0
        while done < length:
            if not room:
                shares.append([])
                room = share_bytes
            part = min(room, length - done)
            shares[-1].append(Span(ours + done, theirs + done, part))
            done += part
            room -= part
    return shares


def _connected(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _fill(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        received = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        if not received:
            raise ConnectionResetError("the other side has closed")
        view = view[received:]
