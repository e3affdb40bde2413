"""Limit of the TCP transport: move chunks between two arenas on blocking sockets, with a thread each.

As a program, it serves an arena on a port. A request is a kind, an offset and a length. ``R``: the server
replies with ``length`` bytes of the arena. ``W``: ``length`` bytes for the arena follow; the server
acknowledges them.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import anyio

from kvtier.lab.bench.mirror import Helper, Mirror
from kvtier.lab.bench.raw_resp import connected, exactly, fill
from kvtier.lab.bench.sides import Chunk, InThreads
from kvtier.memory.arena import ArenaMap
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import PAGE_BYTES
from kvtier.testing.transport_sides import serve_commands

_REQUEST = struct.Struct("<c7xQQ40x")
"""64 bytes, because the kernel takes up to twice as long for unaligned copies."""
_DONE = bytes(64)


class RawSockets(InThreads):
    """The client. Each connection moves an equal share of the bytes."""

    title = "raw socket pair"

    def __init__(self, mirror: Mirror, connections: int) -> None:
        self._mirror = mirror
        self._server = Helper(__name__)
        self._server.start()
        port = self._server.call("listen", path=str(mirror.path), capacity=mirror.capacity)
        super().__init__([connected(("127.0.0.1", port)) for _ in range(connections)])

    def put_one(self, connection: socket.socket, key: ChunkKey, view: memoryview) -> None:
        """See :meth:`InThreads.put_one`."""
        connection.sendall(_REQUEST.pack(b"W", self._mirror.offset(view), len(view)))
        connection.sendall(view)
        exactly(connection, len(_DONE))

    def get_one(self, connection: socket.socket, key: ChunkKey, view: memoryview) -> None:
        """See :meth:`InThreads.get_one`."""
        connection.sendall(_REQUEST.pack(b"R", self._mirror.offset(view), len(view)))
        fill(connection, view)

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Side.forget`."""
        self._mirror.clear(keys)

    async def close(self) -> None:
        """See :meth:`Side.close`."""
        await super().close()
        self._server.kill()

    def _move(self, move_one: Callable[[Any, ChunkKey, memoryview], None], chunks: Sequence[Chunk]) -> float:
        return super()._move(move_one, list(_split(chunks, len(self._connections))))


def _split(chunks: Sequence[Chunk], count: int) -> Iterator[Chunk]:
    """Cut chunks into parts of whole pages, so that each of ``count`` threads moves as much."""
    total = sum(len(view) for _, view in chunks)
    part_bytes = -(-total // count // PAGE_BYTES) * PAGE_BYTES
    for key, view in chunks:
        for start in range(0, len(view), part_bytes):
            yield key, view[start : start + part_bytes]


def _serve(connection: socket.socket, arena: ArenaMap) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, suppress(ConnectionError):
        while request := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
            kind, offset, length = _REQUEST.unpack(request)
            if kind == b"R":
                connection.sendall(arena.view(offset, length))
            else:
                fill(connection, arena.view(offset, length))
                connection.sendall(_DONE)


class _Server:
    async def listen(self, path: str, capacity: int) -> int:
        """Serve connections to an arena, with a thread each. Return the port."""
        arena = ArenaMap(os.open(path, os.O_RDWR), capacity)
        listener = socket.create_server(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]

        def accept() -> None:
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=_serve, args=(connection, arena), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return port


if __name__ == "__main__":
    anyio.run(serve_commands, _Server())
