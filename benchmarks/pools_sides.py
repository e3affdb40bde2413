"""Who takes part in the benchmark of the pools: kvtier's backends, and the limits that they are held against.

All sides move the same chunk objects, between the same arena and the same server. Each stores them under
names of its own, and lets go of them after its turn.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.common import filled
from kvtier.arena import Arena
from kvtier.backends.base import Backend, Outcome, SupportsPrefix
from kvtier.header import HEADER_BYTES, ChunkHeader
from kvtier.keys import KEY_BYTES, ChunkKey

Chunk = tuple[ChunkKey, memoryview]
ACKNOWLEDGED = b"+OK\r\n"


def chunk_key(index: int) -> ChunkKey:
    """The key of the chunk of that number."""
    return ChunkKey(index.to_bytes(2, "big") * (KEY_BYTES // 2))


def seal(key: ChunkKey, view: memoryview) -> None:
    """Make a chunk object of memory that has been filled."""
    ChunkHeader(key, key, bytes(32), len(view) - HEADER_BYTES).seal(view)


class Side(ABC):
    """One way to a pool. Each call takes one batch and returns how many seconds that took."""

    @abstractmethod
    async def put(self, chunks: Sequence[Chunk]) -> float:
        """Store chunks."""

    @abstractmethod
    async def get(self, chunks: Sequence[Chunk]) -> float:
        """Fill the views with what :meth:`put` has stored."""

    @abstractmethod
    async def look_up(self, keys: Sequence[ChunkKey]) -> float:
        """Ask which keys are held: all are, since :meth:`hold`."""

    async def prefix(self, keys: Sequence[ChunkKey]) -> float | None:
        """Ask how many leading keys are held: all of them. ``None``: there is no such call."""
        return None

    @abstractmethod
    async def hold(self, chunks: Sequence[Chunk]) -> None:
        """Have keys held that are to be looked up."""

    @abstractmethod
    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Remove what this side has stored."""

    async def close(self) -> None:  # noqa: B027 - has a default on purpose
        """Let go of connections and threads."""


class Tier(Side):
    """A backend, opened by the caller, as it is or with a header and a checksum around it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def put(self, chunks: Sequence[Chunk]) -> float:
        seconds, outcomes = await timed(lambda: self._backend.put(chunks))
        return expect(seconds, set(outcomes) == {Outcome.OK}, outcomes)

    async def get(self, chunks: Sequence[Chunk]) -> float:
        seconds, outcomes = await timed(lambda: self._backend.get(chunks))
        return expect(seconds, set(outcomes) == {Outcome.OK}, outcomes)

    async def look_up(self, keys: Sequence[ChunkKey]) -> float:
        seconds, held = await timed(lambda: self._backend.contains(keys))
        return expect(seconds, all(held), held)

    async def prefix(self, keys: Sequence[ChunkKey]) -> float | None:
        if not isinstance(self._backend, SupportsPrefix):
            return None
        backend = self._backend
        seconds, held = await timed(lambda: backend.held_prefix(keys))
        return expect(seconds, held == len(keys), held)

    async def hold(self, chunks: Sequence[Chunk]) -> None:
        await self.put(chunks)

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        await self._backend.delete(keys)


class InThreads(Side):
    """A side whose calls block: chunks are moved by as many threads as there are connections."""

    def __init__(self, connections: Sequence[Any]) -> None:
        self._connections = connections
        self._threads = ThreadPoolExecutor(len(connections))

    async def put(self, chunks: Sequence[Chunk]) -> float:
        return self._move(self.put_one, chunks)

    async def get(self, chunks: Sequence[Chunk]) -> float:
        return self._move(self.get_one, chunks)

    async def close(self) -> None:
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()

    @abstractmethod
    def put_one(self, connection: Any, key: ChunkKey, view: memoryview) -> None:  # noqa: ANN401
        """Store one chunk, in a thread."""

    @abstractmethod
    def get_one(self, connection: Any, key: ChunkKey, view: memoryview) -> None:  # noqa: ANN401
        """Fill one view, in a thread."""

    def _move(self, one: Callable[[Any, ChunkKey, memoryview], None], chunks: Sequence[Chunk]) -> float:
        waiting = deque(chunks)

        def take_turns(connection: Any) -> None:  # noqa: ANN401
            while waiting:
                try:
                    key, view = waiting.popleft()
                except IndexError:
                    return
                one(connection, key, view)

        started = time.perf_counter()
        at_once = self._connections[: len(chunks)]
        for _ in self._threads.map(take_turns, at_once):
            pass
        return time.perf_counter() - started


class RawRESP(InThreads):
    """GET, SET and EXISTS of a Redis or Valkey, by hand, on blocking sockets."""

    def __init__(self, address: tuple[str, int], connections: int) -> None:
        super().__init__([connected(address) for _ in range(connections)])

    def put_one(self, connection: socket.socket, key: ChunkKey, view: memoryview) -> None:
        head = b"*3\r\n$3\r\nSET\r\n$68\r\nraw:%b\r\n$%d\r\n" % (key.hex().encode(), len(view))
        sent = connection.sendmsg([head, view, b"\r\n"])
        expect(0, sent == len(head) + len(view) + 2, sent)
        answer = exactly(connection, len(ACKNOWLEDGED))
        expect(0, answer == ACKNOWLEDGED, answer)

    def get_one(self, connection: socket.socket, key: ChunkKey, view: memoryview) -> None:
        connection.sendall(b"*2\r\n$3\r\nGET\r\n$68\r\nraw:%b\r\n" % key.hex().encode())
        head = b"$%d\r\n" % len(view)
        answer = exactly(connection, len(head))
        expect(0, answer == head, answer)
        fill(connection, view)
        exactly(connection, 2)

    async def look_up(self, keys: Sequence[ChunkKey]) -> float:
        started = time.perf_counter()
        question = b"".join(b"*2\r\n$6\r\nEXISTS\r\n$68\r\nraw:%b\r\n" % key.hex().encode() for key in keys)
        self._connections[0].sendall(question)
        answer = exactly(self._connections[0], 4 * len(keys))
        return expect(time.perf_counter() - started, answer == b":1\r\n" * len(keys), answer)

    async def hold(self, chunks: Sequence[Chunk]) -> None:
        await self.put(chunks)

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


def connected(address: tuple[str, int]) -> socket.socket:
    """A blocking connection."""
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def fill(connection: socket.socket, view: memoryview) -> None:
    """Receive as many bytes as the view has."""
    while len(view):
        received = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        expect(0, received > 0, "the connection was closed")
        view = view[received:]


def exactly(connection: socket.socket, length: int) -> bytes:
    """Receive that many bytes."""
    answer = bytearray(length)
    fill(connection, memoryview(answer))
    return bytes(answer)


def line(connection: socket.socket) -> bytes:
    """Receive what comes before the next end of line."""
    received = b""
    while not received.endswith(b"\r\n"):
        received += exactly(connection, 1)
    return received[:-2]


async def timed(call: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    """The seconds that a call took, and what it came to."""
    started = time.perf_counter()
    answer = await call()
    return time.perf_counter() - started, answer


def expect(seconds: float, fine: bool, answer: object) -> float:
    """``seconds``, or the end of the benchmark."""
    if not fine:
        raise SystemExit(f"the pool did not do what it was asked: {answer}")
    return seconds


def fill_arena(arena: Arena, count: int, size: int) -> list[Chunk]:
    """Sealed chunk objects with bytes that differ."""
    chunks = []
    pattern = filled(min(size, 8 << 20))
    for index in range(count):
        lease = arena.allocate(size)
        assert lease is not None
        view = lease.view
        for start in range(0, size, len(pattern)):
            view[start : start + len(pattern)] = pattern[: min(len(pattern), size - start)]
        seal(chunk_key(index), view)
        chunks.append((chunk_key(index), view))
    return chunks
