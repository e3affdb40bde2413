"""What a look-up has found: chunks that are leased, and those that may yet come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

import anyio

from kvtier.keys import ChunkKey
from kvtier.pipeline.expect import Expectation
from kvtier.pipeline.prefetch import Flight
from kvtier.router import FIRST
from kvtier.slices import Lease, Leases
from kvtier.tasks import set_within


class Staged(Protocol):
    """Chunks that were pushed past the tiers, into memory of the engine that looks them up."""

    @property
    def closed(self) -> bool:
        """Whether that memory is gone."""

    def find(self, key: ChunkKey) -> Lease | None:
        """A lease on a chunk that is there whole."""

    def drop(self, key: ChunkKey) -> None:
        """It has been loaded, or is not wanted any longer. The memory is free with its last lease."""


ReportProgress = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class FoundChunk:
    """One chunk of a look-up: leased, and on its way up where it was not in memory."""

    key: ChunkKey
    lease: Lease
    flight: Flight | None = None
    staged: Staged | None = None
    """Where it lies, if that is not the arena."""

    @property
    def source(self) -> int:
        """The tier that it was in when it was asked for. Final once it has arrived."""
        return FIRST if self.flight is None else self.flight.source

    @property
    def arrived(self) -> bool:
        """Whether its bytes may be read."""
        return self.flight is None or self.flight.arrived

    def release(self) -> None:
        """Let go of the lease. What was staged goes with that: the engine has it, or never will."""
        self.lease.release()
        if self.staged is not None:
            self.staged.drop(self.key)


class Ready(NamedTuple):
    """Consecutive chunks of a look-up that can be read now, in one memory. The leases are the caller's."""

    leases: Leases
    sources: list[int]
    """The tier that each was in when it was asked for; of no meaning where they are staged."""
    staged: Staged | None = None
    """Where they lie, if that is not the arena."""
    keys: Sequence[ChunkKey] = ()
    """Of those that are staged, which are to be dropped there when their leases are released."""

    @classmethod
    def of(cls, chunks: Sequence[FoundChunk]) -> Ready:
        """Of the same memory; takes over their leases."""
        leases = Leases.of([chunk.lease for chunk in chunks])
        staged = chunks[0].staged
        keys = () if staged is None else [chunk.key for chunk in chunks]
        return cls(leases, [chunk.source for chunk in chunks], staged, keys)

    @property
    def stands(self) -> bool:
        """Whether the memory that was leased is there still."""
        return self.staged is None or not self.staged.closed

    def release(self, index: int) -> None:
        """Let go of one, and have it dropped where it is staged. Once."""
        self.leases.release(index)
        if self.staged is not None:
            self.staged.drop(self.keys[index])

    def release_all(self) -> None:
        """Let go of all, of which none has been let go of before."""
        self.leases.release_all()
        if self.staged is not None:
            for key in self.keys:
                self.staged.drop(key)


class LookUp:
    """The leading chunks of a prompt that are held, each with a lease that is the caller's to release."""

    def __init__(self, staged: Staged | None = None) -> None:
        """``staged``: where chunks are found besides the tiers."""
        self.staged = staged
        self.unknown = 0
        """How many chunks after these may yet be found, while anybody wants to know.

        Pushed chunks are waited for, then the shared pools are asked.
        """
        self.pushed: Expectation | None = None
        """What waits for the chunks that are pushed here; they are added as they come."""
        self._answered: anyio.Event | None = None
        self._head: tuple[Sequence[ChunkKey], Leases] | None = None
        self._chunks: list[FoundChunk] = []

    @property
    def chunks(self) -> list[FoundChunk]:
        """Each chunk on its own. It is far cheaper to take them with :meth:`take_ready`, all at once."""
        if self._head is not None:
            keys, leases = self._head
            self._head = None
            self._chunks[:0] = map(FoundChunk, keys, leases.apart())
        return self._chunks

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return len(self._chunks) + (0 if self._head is None else len(self._head[1]))

    @property
    def answered(self) -> anyio.Event:
        """Set when all is known, and what was found is among the chunks. Not set where nobody was asked."""
        if self._answered is None:
            self._answered = anyio.Event()
        return self._answered

    @property
    def ready(self) -> int:
        """How many leading chunks can be read now."""
        return self.count - self._waiting

    @property
    def _waiting(self) -> int:
        """How many chunks are on their way, or come after one that is."""
        for count, chunk in enumerate(self._chunks):
            if not chunk.arrived:
                return len(self._chunks) - count
        return 0

    @property
    def under_way(self) -> int:
        """How many further chunks may yet arrive."""
        return self._waiting + self.unknown

    def lead(self, keys: Sequence[ChunkKey], leases: Leases) -> None:
        """Begin with chunks that can be read now, whose leases it takes over. Where there are none yet."""
        self._head = keys, leases

    def add(self, chunks: Sequence[FoundChunk]) -> None:
        """Further chunks, whose leases it takes over."""
        self._chunks += chunks

    def add_staged(self, key: ChunkKey) -> bool:
        """A further chunk, where it is found besides the tiers; whether it is."""
        lease = None if self.staged is None else self.staged.find(key)
        if lease is not None:
            self._chunks.append(FoundChunk(key, lease, staged=self.staged))
        return lease is not None

    def take_ready(self) -> list[Ready]:
        """The leading chunks that can be read now, with their leases; what is under way stays here.

        In prefix order, apart where arena and staging take turns.
        """
        if self._head is not None and not self._chunks:
            leases, self._head = self._head[1], None
            return [Ready(leases, [FIRST] * len(leases))] if len(leases) else []
        ready = self.chunks[: self.ready]
        del self._chunks[: len(ready)]
        runs = groupby(ready, key=lambda chunk: chunk.staged is not None)
        return [Ready.of(list(run)) for _, run in runs]

    async def settle(self, seconds: float | None, progress: ReportProgress | None = None) -> None:
        """Wait for the chunks in flight, then drop those that did not arrive.

        Ends early where nothing has arrived for ``seconds``; ``None`` waits for as long as it takes. Calls
        ``progress`` whenever an answer or some chunks have arrived while others are in flight.
        """
        answer_arrived = self.unknown > 0 and await set_within(self.answered, seconds)
        for chunk in self._chunks:
            if chunk.flight is None or chunk.arrived:
                continue
            if progress is not None and (answer_arrived or chunk is not self._chunks[0]):
                await progress()
            if not await set_within(chunk.flight.landed, seconds) or not chunk.arrived:
                break
        self.keep(self.ready)

    def keep(self, count: int) -> None:
        """Release all but the first ``count`` chunks, and want nothing that comes after them."""
        self.unknown = 0
        if self.pushed is not None:
            self.pushed.end()
        if self._head is not None and not count:
            self._head[1].release_all()
            self._head = None
        for chunk in self.chunks[count:]:
            chunk.release()
        del self._chunks[count:]

    def release(self) -> None:
        """Release everything; harmless when repeated."""
        self.keep(0)
