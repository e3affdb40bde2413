"""What a look-up has found: chunks that are leased, and those that may yet come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import anyio

from kvtier.arena import Lease, Leases
from kvtier.keys import ChunkKey
from kvtier.pipeline.expect import Expectation
from kvtier.pipeline.prefetch import Flight
from kvtier.router import FIRST


@dataclass(slots=True)
class FoundChunk:
    """One chunk of a look-up: leased, and on its way up where it was not in memory."""

    key: ChunkKey
    lease: Lease
    flight: Flight | None = None

    @property
    def source(self) -> int:
        """The tier that it was in when it was asked for. Final once it has arrived."""
        return FIRST if self.flight is None else self.flight.source

    @property
    def arrived(self) -> bool:
        """Whether its bytes may be read."""
        return self.flight is None or self.flight.arrived


class Ready(NamedTuple):
    """Leading chunks of a look-up that can be read now. The leases are the caller's."""

    leases: Leases
    sources: list[int]
    """The tier that each was in when it was asked for."""


class LookUp:
    """The leading chunks of a prompt that are held, each with a lease that is the caller's to release."""

    def __init__(self) -> None:
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

    def take_ready(self) -> Ready:
        """The leading chunks that can be read now, with their leases; what is under way stays here."""
        if self._head is not None and not self._chunks:
            leases, self._head = self._head[1], None
            return Ready(leases, [FIRST] * len(leases))
        ready = self.chunks[: self.ready]
        del self._chunks[: len(ready)]
        return Ready(Leases.of([chunk.lease for chunk in ready]), [chunk.source for chunk in ready])

    async def settle(self, seconds: float | None) -> None:
        """Wait for what is on its way, ``None`` for as long as it takes, then forget what did not arrive."""
        with anyio.move_on_after(seconds):
            if self.unknown:
                await self.answered.wait()
            for chunk in self._chunks:
                if chunk.flight is not None:
                    await chunk.flight.landed.wait()
                if not chunk.arrived:
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
            chunk.lease.release()
        del self._chunks[count:]

    def release(self) -> None:
        """Release everything; harmless when repeated."""
        self.keep(0)
