"""Sides of the pools benchmark, in addition to those of kvtier.lab.bench.

All sides move the same chunk objects, between the same arena and the same server. Each stores them under its
own names, and deletes them after its turn.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Sequence

from kvtier.lab.bench import limits, raw_resp
from kvtier.lab.bench.limits import name_of
from kvtier.lab.bench.raw_resp import connected, exactly, fill, line
from kvtier.lab.bench.sides import BackendSide, Chunk, InThreads, Side, expect, make_chunks
from kvtier.memory.arena import Arena
from kvtier.memory.keys import KEY_BYTES, ChunkKey


def chunk_key(index: int) -> ChunkKey:
    """Return the key of the chunk with that number."""
    return ChunkKey(index.to_bytes(2, "big") * (KEY_BYTES // 2))


class PoolSide(Side):
    """A side that also looks up keys."""

    @abstractmethod
    async def look_up(self, keys: Sequence[ChunkKey]) -> float:
        """Look up which keys are held. All are, after :meth:`hold`."""

    async def prefix(self, keys: Sequence[ChunkKey]) -> float | None:
        """Look up how many leading keys are held, which is all. ``None`` if the medium has no such call."""
        return None

    async def hold(self, chunks: Sequence[Chunk]) -> None:
        """Store chunks for lookups."""
        await self.put(chunks)


class TierSide(BackendSide, PoolSide):
    """A backend of kvtier."""


class InfiniStoreLibrary(limits.InfiniStoreLibrary, PoolSide):
    """InfiniStore's own client library."""

    async def look_up(self, keys: Sequence[ChunkKey]) -> float:
        names = [name_of(key) for key in keys]
        started = time.perf_counter()
        held = [self._connections[0].check_exist(name) for name in names]
        return expect(time.perf_counter() - started, all(held), held)

    async def prefix(self, keys: Sequence[ChunkKey]) -> float | None:
        names = [name_of(key) for key in keys]
        started = time.perf_counter()
        last = self._connections[0].get_match_last_index(names)
        return expect(time.perf_counter() - started, last == len(keys) - 1, last)


class MooncakeLibrary(limits.MooncakeLibrary, PoolSide):
    """Mooncake's own client library."""

    async def look_up(self, keys: Sequence[ChunkKey]) -> float:
        names = [name_of(key) for key in keys]
        started = time.perf_counter()
        held = self._store.batch_is_exist(names)
        return expect(time.perf_counter() - started, set(held) == {1}, held)


class ObstoreLibrary(limits.ObstoreLibrary, PoolSide):
    """obstore alone."""

    async def look_up(self, keys: Sequence[ChunkKey]) -> float:
        names = [name_of(key) for key in keys]
        started = time.perf_counter()
        found = list(self._threads.map(lambda name: self._store.head(name), names))
        return expect(time.perf_counter() - started, len(found) == len(names), "an object is missing")


class RawRESP(raw_resp.RawRESP, PoolSide):
    """GET, SET and EXISTS on raw sockets, with exclusive use of the server."""

    async def look_up(self, keys: Sequence[ChunkKey]) -> float:
        started = time.perf_counter()
        commands = b"".join(b"*2\r\n$6\r\nEXISTS\r\n$68\r\nraw:%b\r\n" % key.hex().encode() for key in keys)
        self._connections[0].sendall(commands)
        reply = exactly(self._connections[0], 4 * len(keys))
        return expect(time.perf_counter() - started, reply == b":1\r\n" * len(keys), "a chunk is missing")

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Delete all keys, of all sides, and wait until their memory is free.

        Does not use FLUSHALL, which returns memory to the system: a full pool reuses the memory that it has.
        """
        connection = self._connections[0]
        connection.sendall(b"KEYS *\r\n")
        held = int(line(connection)[1:])
        names = [exactly(connection, int(line(connection)[1:]) + 2) for _ in range(held)]
        connection.sendall(b"".join(b"DEL %b" % name for name in names))
        expect(0, exactly(connection, 4 * held) == b":1\r\n" * held, held)


class Pump(InThreads, PoolSide):
    """Moves as many bytes over loopback, from and to a process that does nothing else: an upper bound."""

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
        # The bytes are no chunk, so they must not overwrite the view.
        connection.sendall(b"G%19d" % len(view))
        fill(connection, memoryview(self._scratch[connection])[: len(view)])

    async def look_up(self, keys: Sequence[ChunkKey]) -> float:
        """Send and receive as many bytes as a lookup with RESP."""
        started = time.perf_counter()
        request = bytes(len(keys) * 88)
        self._connections[0].sendmsg([b"A%19d" % len(request), request])
        exactly(self._connections[0], 4 * len(keys))
        return time.perf_counter() - started

    async def hold(self, chunks: Sequence[Chunk]) -> None:
        """Do nothing: the server stores nothing."""

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Do nothing: the server stores nothing."""

    async def close(self) -> None:
        await super().close()
        self._process.communicate()  # Closes its input, which ends it.


def fill_arena(arena: Arena, count: int, size: int) -> list[Chunk]:
    """Return ``count`` chunk objects in the arena, with the keys of the numbers from 0."""
    return make_chunks(arena, [chunk_key(index) for index in range(count)], size)
