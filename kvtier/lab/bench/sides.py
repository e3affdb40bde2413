"""A side is one way to a medium: a kvtier backend, or its limit. Sides run interleaved, with the same chunks.

Each side stores the chunks under its own names, and deletes them after its turn. Stamps show cheaply whether
they were transferred.
"""

from __future__ import annotations

import mmap
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from blake3 import blake3

from kvtier.backends.base import Backend, Outcome
from kvtier.errors import KVTierError
from kvtier.memory.arena import Arena
from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from kvtier.memory.keys import KEY_BYTES, ChunkKey
from kvtier.tiers.batches import in_batches
from kvtier.tiers.seal import Seal
from kvtier.units import MIB, format_duration

Chunk = tuple[ChunkKey, memoryview]
STAMP_BYTES = 8

Stamps = list[tuple[bytes, bytes]]


def object_length(chunk: Chunk) -> int:
    """Return the size of a chunk object."""
    return len(chunk[1])


class Side(ABC):
    """One way to a medium. Each call processes one batch and returns its duration in seconds.

    All methods may block the event loop, which has nothing else to do. They raise :class:`BenchFailed` or
    ``OSError`` if the medium fails.
    """

    title: ClassVar[str] = ""
    """Name of a limit in the table."""
    fills: ClassVar[bool] = True
    """Whether :meth:`get` fills the views passed to it, not memory of its own."""
    helpers: Collection[int] = ()
    """Processes that poll even while idle, so that they are stopped in other sides' turns."""

    @abstractmethod
    async def put(self, chunks: Sequence[Chunk]) -> float:
        """Store chunks."""

    @abstractmethod
    async def get(self, chunks: Sequence[Chunk]) -> float:
        """Fill the views with the chunks that :meth:`put` stored."""

    @abstractmethod
    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Delete chunks that this side stored."""

    async def close(self) -> None:  # noqa: B027 - has a default on purpose
        """Release connections and threads."""


class BackendSide(Side):
    """A backend opened by the caller, plain, or with a seal and in batches as a tier's."""

    def __init__(self, backend: Backend, seal: Seal | None = None) -> None:
        self._backend = backend
        self._seal = seal

    async def put(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.put`."""
        seal = self._seal
        unseal(chunks)
        if seal is None:
            seconds, outcomes = await timed(lambda: self._backend.put(chunks))
        else:
            seconds, outcomes = await timed(lambda: in_batches(seal.put, chunks, object_length))
        return expect_ok("store", seconds, outcomes, len(chunks))

    async def get(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.get`."""
        seal = self._seal
        if seal is None:
            seconds, outcomes = await timed(lambda: self._backend.get(chunks))
        else:
            seconds, outcomes = await timed(lambda: in_batches(seal.get, chunks, object_length))
        return expect_ok("return", seconds, outcomes, len(chunks))

    async def look_up(self, keys: Sequence[ChunkKey]) -> float:
        """Look up which keys are held. All are."""
        seconds, held = await timed(lambda: self._backend.contains(keys))
        return expect(
            seconds, all(held), f"the backend holds {sum(held)} of {len(keys)} chunks that were stored"
        )

    async def prefix(self, keys: Sequence[ChunkKey]) -> float | None:
        """Look up how many leading keys are held, which is all. ``None`` if the backend has no such call."""
        backend = self._backend.capabilities().prefix
        if backend is None:
            return None
        seconds, held = await timed(lambda: backend.held_prefix(keys))
        return expect(
            seconds, held == len(keys), f"the backend holds {held} of {len(keys)} chunks that were stored"
        )

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Side.forget`."""
        await self._backend.delete(keys)


class InThreads(Side):
    """A side with blocking calls: threads move chunks, each over a connection of its own."""

    def __init__(self, connections: Sequence[Any]) -> None:
        """``connections``: one for each thread; ``None`` if the medium has none."""
        self._connections = connections
        self._threads = ThreadPoolExecutor(len(connections))

    async def put(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.put`."""
        return self._move(self.put_one, chunks)

    async def get(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.get`."""
        return self._move(self.get_one, chunks)

    async def close(self) -> None:
        """See :meth:`Side.close`."""
        self._threads.shutdown()
        for connection in self._connections:
            if connection is not None:
                connection.close()

    @abstractmethod
    def put_one(self, connection: Any, key: ChunkKey, view: memoryview) -> None:  # noqa: ANN401
        """Store one chunk. Runs in a thread."""

    @abstractmethod
    def get_one(self, connection: Any, key: ChunkKey, view: memoryview) -> None:  # noqa: ANN401
        """Fill one view. Runs in a thread."""

    def _move(self, move_one: Callable[[Any, ChunkKey, memoryview], None], chunks: Sequence[Chunk]) -> float:
        pending = deque(chunks)

        def run(connection: Any) -> None:  # noqa: ANN401
            while pending:
                try:
                    key, view = pending.popleft()
                except IndexError:  # Another thread has taken the last one.
                    return
                move_one(connection, key, view)

        used = self._connections[: len(chunks)]
        started = time.perf_counter()
        # Consumed, to wait for all threads, and to raise what one of them has raised.
        for _ in self._threads.map(run, used) if len(used) > 1 else map(run, used):
            pass
        return time.perf_counter() - started


def random_keys(count: int) -> list[ChunkKey]:
    """Return random keys, which do not collide with the hashes that caches use."""
    return [ChunkKey(os.urandom(KEY_BYTES)) for _ in range(count)]


def make_chunks(arena: Arena, keys: Sequence[ChunkKey], size: int) -> list[Chunk]:
    """Return sealed chunk objects of ``size`` bytes each, in the arena until it is closed.

    Their contents differ and do not compress, because some media handle equal or compressible data at a
    different speed. Raises :class:`BenchFailed` if the arena is too small.
    """
    chunks = []
    for key in keys:
        lease = arena.allocate(size)
        if lease is None:
            raise BenchFailed("the arena has no room for the chunks")
        view = lease.view
        fill(view, key)
        ChunkHeader(key, key, bytes(KEY_BYTES), size - HEADER_BYTES).seal(view)
        chunks.append((key, view))
    arena.settle()
    return chunks


def clear_stamps(chunks: Sequence[Chunk]) -> Stamps:
    """Zero the first and last bytes of each chunk; return the original bytes."""
    stamps = [(bytes(view[:STAMP_BYTES]), bytes(view[-STAMP_BYTES:])) for _, view in chunks]
    for _, view in chunks:
        view[:STAMP_BYTES] = view[-STAMP_BYTES:] = bytes(STAMP_BYTES)
    return stamps


def have_stamps(chunks: Sequence[Chunk], stamps: Stamps) -> bool:
    """Whether the first and last bytes of each chunk are restored."""
    return stamps == [(bytes(view[:STAMP_BYTES]), bytes(view[-STAMP_BYTES:])) for _, view in chunks]


def put_stamps(chunks: Sequence[Chunk], stamps: Stamps) -> None:
    """Undo :func:`clear_stamps`."""
    for (_, view), (head, tail) in zip(chunks, stamps, strict=True):
        view[:STAMP_BYTES], view[-STAMP_BYTES:] = head, tail


def filled(length: int) -> memoryview:
    """Return page-aligned memory with incompressible contents; see :func:`fill`."""
    view = memoryview(mmap.mmap(-1, length))
    fill(view)
    return view


def fill(view: memoryview, seed: bytes = b"") -> None:
    """Fill a view with bytes that do not compress or deduplicate, except with views of the same seed."""
    for start in range(0, len(view), MIB):
        piece = view[start : start + MIB]
        piece[:] = blake3(seed + start.to_bytes(8, "little")).digest(length=len(piece))


def unseal(chunks: Sequence[Chunk]) -> None:
    """Clear the checksums in the headers, so that storing the chunks costs as much as storing new ones."""
    for _, view in chunks:
        view[:HEADER_BYTES] = ChunkHeader.parse(view).packed()


async def timed(call: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    """Return the duration of a call in seconds, and its result."""
    started = time.perf_counter()
    result = await call()
    return time.perf_counter() - started, result


def expect(seconds: float, ok: bool, error: object) -> float:
    """Return ``seconds`` if ``ok``. Otherwise raise :class:`BenchFailed` with the text of ``error``."""
    if not ok:
        raise BenchFailed(str(error))
    return seconds


def expect_ok(action: str, seconds: float, outcomes: Sequence[Outcome], count: int) -> float:
    """Return ``seconds`` if all chunks were moved. Raises :class:`BenchFailed`."""
    expect(0, len(outcomes) == count, f"the medium returned {len(outcomes)} outcomes for {count} chunks")
    failures = ", ".join(
        sorted({outcome.value for outcome in outcomes} - {Outcome.OK.value, Outcome.VERIFIED.value})
    )
    return expect(seconds, not failures, f"the medium did not {action} all chunks: {failures}")


class BenchFailed(KVTierError):
    """A measured tier or transport, or its limit, failed. The message states how."""


class Overdue(BenchFailed):
    """A call has exceeded its deadline."""

    def __init__(self, doing: str, seconds: float) -> None:
        super().__init__(f"{doing} exceeded the deadline of {format_duration(seconds)}")
        self.doing = doing
        self.seconds = seconds


class Stuck(Overdue):
    """It does not end, either, although it was cancelled. It may still access the memory passed to it."""

    def __str__(self) -> str:
        return f"{self.doing} does not end when cancelled"
