"""What a look-up has found, and what of it is still on its way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import anyio

from kvtier.arena import Lease
from kvtier.keys import ChunkKey
from kvtier.pipeline.expect import Expectation
from kvtier.pipeline.prefetch import Flight
from kvtier.router import FIRST


class Staged(Protocol):
    """Chunks that were pushed past the tiers, into memory of the engine that looks them up."""

    closed: bool
    """Whether that memory is gone."""

    def find(self, key: ChunkKey) -> Lease | None:
        """A lease on a chunk that is there whole."""

    def drop(self, key: ChunkKey) -> None:
        """It has been loaded, or is not wanted any longer. The memory is free with its last lease."""


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
    def stands(self) -> bool:
        """Whether the memory that was leased is there still."""
        return self.staged is None or not self.staged.closed

    def release(self) -> None:
        """Let go of the lease. What was staged goes with that: the engine has it, or never will."""
        self.lease.release()
        if self.staged is not None:
            self.staged.drop(self.key)

    @property
    def arrived(self) -> bool:
        """Whether its bytes may be read."""
        return self.flight is None or self.flight.arrived


@dataclass(slots=True)
class LookUp:
    """The leading chunks of a prompt that are held, each with a lease that is the caller's to release."""

    chunks: list[FoundChunk] = field(default_factory=list)
    unknown: int = 0
    """How many chunks after these may yet be found, while anybody wants to know.

    Pushed chunks are waited for, then the shared pools are asked.
    """
    answered: anyio.Event = field(default_factory=anyio.Event)
    """Set when all that is known, and what was found is among the chunks. Not set where nobody was asked."""
    staged: Staged | None = None
    """Where chunks are found besides the tiers."""
    pushed: Expectation | None = None
    """What waits for the chunks that are pushed here; they are added as they come."""

    @property
    def ready(self) -> int:
        """How many leading chunks can be read now."""
        for count, chunk in enumerate(self.chunks):
            if not chunk.arrived:
                return count
        return len(self.chunks)

    @property
    def under_way(self) -> int:
        """How many further chunks may yet arrive."""
        return len(self.chunks) - self.ready + self.unknown

    def take_ready(self) -> list[FoundChunk]:
        """The leading chunks that can be read now, with their leases; what is under way stays here."""
        ready = self.chunks[: self.ready]
        del self.chunks[: len(ready)]
        return ready

    def take_staged(self, key: ChunkKey) -> bool:
        """Add a chunk that is found besides the tiers; whether it is."""
        lease = None if self.staged is None else self.staged.find(key)
        if lease is not None:
            self.chunks.append(FoundChunk(key, lease, staged=self.staged))
        return lease is not None

    async def settle(self, seconds: float | None) -> None:
        """Wait for what is on its way, ``None`` for as long as it takes, then forget what did not arrive."""
        with anyio.move_on_after(seconds):
            if self.unknown:
                await self.answered.wait()
            for chunk in self.chunks:
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
        for chunk in self.chunks[count:]:
            chunk.release()
        del self.chunks[count:]

    def release(self) -> None:
        """Release everything; harmless when repeated."""
        self.keep(0)
