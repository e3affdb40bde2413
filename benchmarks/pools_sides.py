"""Who takes part in the benchmark of the pools, beside those that kvtier.bench has.

All sides move the same chunk objects, between the same arena and the same server. Each stores them under
names of its own, and lets go of them after its turn.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from kvtier.arena import Arena
from kvtier.bench import raw_resp
from kvtier.bench.chunks import make_chunks
from kvtier.bench.raw_resp import connected, exactly, fill, line
from kvtier.bench.sides import Chunk, InThreads, expect
from kvtier.keys import KEY_BYTES, ChunkKey


def chunk_key(index: int) -> ChunkKey:
    """The key of the chunk of that number."""
    return ChunkKey(index.to_bytes(2, "big") * (KEY_BYTES // 2))


class RawRESP(raw_resp.RawRESP):
    """GET, SET and EXISTS by hand, on a server that nobody else uses."""

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Remove everything, from whichever side, and wait until its memory is free.

        Not with FLUSHALL, which would give that back to the system: a pool that is full has it at hand.
        """
        connection = self._connections[0]
        connection.sendall(b"KEYS *\r\n")
        held = int(line(connection)[1:])
        names = [exactly(connection, int(line(connection)[1:]) + 2) for _ in range(held)]
        connection.sendall(b"".join(b"DEL %b" % name for name in names))
        expect(0, exactly(connection, 4 * held) == b":1\r\n" * held, held)


class Pump(InThreads):
    """As many bytes over loopback, from and to a process that does nothing else: what no server can beat."""

    fills = False

    def __init__(self, connections: int, chunk_bytes: int) -> None:
        command = [sys.executable, "-m", "benchmarks.pools_pump"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        super().__init__([connected(("127.0.0.1", port)) for _ in range(connections)])
        self._scratch = {connection: bytearray(chunk_bytes) for connection in self._connections}

    def put_one(self, connection: socket.socket, key: ChunkKey, view: memoryview) -> None:
        connection.sendmsg([b"P%19d" % len(view), view])
        exactly(connection, 1)

    def get_one(self, connection: socket.socket, key: ChunkKey, view: memoryview) -> None:
        # What comes is no chunk: elsewhere with it.
        connection.sendall(b"G%19d" % len(view))
        fill(connection, memoryview(self._scratch[connection])[: len(view)])

    async def look_up(self, keys: Sequence[ChunkKey]) -> float:
        """As many bytes as a look-up with RESP has, there and back."""
        started = time.perf_counter()
        question = bytes(len(keys) * 88)
        self._connections[0].sendmsg([b"A%19d" % len(question), question])
        exactly(self._connections[0], 4 * len(keys))
        return time.perf_counter() - started

    async def hold(self, chunks: Sequence[Chunk]) -> None:
        """It holds nothing."""

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """It holds nothing."""

    async def close(self) -> None:
        await super().close()
        self._process.communicate()  # Its input ends, and so does it.


def fill_arena(arena: Arena, count: int, size: int) -> list[Chunk]:
    """Chunk objects under the keys of the first numbers."""
    return make_chunks(arena, [chunk_key(index) for index in range(count)], size)
