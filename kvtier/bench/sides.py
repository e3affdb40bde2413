"""One way to a medium: a kvtier backend, or its limit. All of them move the same chunk objects, in turns.

Each stores them under names of its own, and lets go of them after its turn.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from kvtier.backends.base import Backend, Outcome, SupportsPrefix
from kvtier.backends.sealed import SealedBackend
from kvtier.bench.errors import BenchFailed
from kvtier.header import HEADER_BYTES, ChunkHeader
from kvtier.keys import ChunkKey

Chunk = tuple[ChunkKey, memoryview]


class Side(ABC):
    """One way to a medium. Each call takes one batch and returns how many seconds that took.

    All are called from the event loop, which has nothing else to do: they may block it. They raise
    :class:`BenchFailed` or ``OSError`` where the medium does not do what it is asked.
    """

    fills: ClassVar[bool] = True
    """Whether :meth:`get` fills the views that it is given, and not memory of the side's own."""

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

    async def hold(self, chunks: Sequence[Chunk]) -> None:
        """Have keys held that are to be looked up."""
        await self.put(chunks)

    @abstractmethod
    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Remove what this side has stored."""

    async def close(self) -> None:  # noqa: B027 - has a default on purpose
        """Let go of connections and threads."""


class BackendSide(Side):
    """A backend, opened by the caller, as it is or with a header and a checksum around it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def put(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.put`."""
        if isinstance(self._backend, SealedBackend):
            unseal(chunks)
        seconds, outcomes = await timed(lambda: self._backend.put(chunks))
        return _all_ok("store", seconds, outcomes, len(chunks))

    async def get(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.get`."""
        seconds, outcomes = await timed(lambda: self._backend.get(chunks))
        return _all_ok("give back", seconds, outcomes, len(chunks))

    async def look_up(self, keys: Sequence[ChunkKey]) -> float:
        """See :meth:`Side.look_up`."""
        seconds, held = await timed(lambda: self._backend.contains(keys))
        return expect(seconds, all(held), f"it holds {sum(held)} of {len(keys)} chunks that it has stored")

    async def prefix(self, keys: Sequence[ChunkKey]) -> float | None:
        """See :meth:`Side.prefix`."""
        if not isinstance(self._backend, SupportsPrefix):
            return None
        backend = self._backend
        seconds, held = await timed(lambda: backend.held_prefix(keys))
        return expect(seconds, held == len(keys), f"it holds {held} of {len(keys)} chunks that it has stored")

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Side.forget`."""
        await self._backend.delete(keys)


class InThreads(Side):
    """A side whose calls block: chunks are moved by as many threads as there are connections."""

    def __init__(self, connections: Sequence[Any]) -> None:
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
            connection.close()

    @abstractmethod
    def put_one(self, connection: Any, key: ChunkKey, view: memoryview) -> None:  # noqa: ANN401
        """Store one chunk, in a thread."""

    @abstractmethod
    def get_one(self, connection: Any, key: ChunkKey, view: memoryview) -> None:  # noqa: ANN401
        """Fill one view, in a thread."""

    def _move(self, one: Callable[[Any, ChunkKey, memoryview], None], chunks: Sequence[Chunk]) -> float:
        waiting = deque(chunks)

        def work_off(connection: Any) -> None:  # noqa: ANN401
            while waiting:
                try:
                    key, view = waiting.popleft()
                except IndexError:
                    return
                one(connection, key, view)

        started = time.perf_counter()
        at_once = self._connections[: len(chunks)]
        for _ in self._threads.map(work_off, at_once):
            pass
        return time.perf_counter() - started


def unseal(chunks: Sequence[Chunk]) -> None:
    """Take the checksums out of the headers, so that storing these costs what storing new chunks does."""
    for _, view in chunks:
        view[:HEADER_BYTES] = ChunkHeader.parse(view).packed()


async def timed(call: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    """The seconds that a call took, and what it came to."""
    started = time.perf_counter()
    answer = await call()
    return time.perf_counter() - started, answer


def expect(seconds: float, fine: bool, otherwise: object) -> float:
    """``seconds``, where all is fine. Raises :class:`BenchFailed` with what it is instead."""
    if not fine:
        raise BenchFailed(str(otherwise))
    return seconds


def _all_ok(doing: str, seconds: float, outcomes: Sequence[Outcome], count: int) -> float:
    expect(0, len(outcomes) == count, f"it gave {len(outcomes)} answers to {count} questions")
    told = ", ".join(sorted({outcome.value for outcome in outcomes} - {Outcome.OK.value}))
    return expect(seconds, not told, f"it did not {doing} what it was asked to: {told}")
