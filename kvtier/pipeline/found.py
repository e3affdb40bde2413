"""The result of a lookup: chunks that are leased, and chunks still in flight."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

import anyio

from kvtier.catalog.misses import MissReason
from kvtier.catalog.partial_matches import PartialMatch
from kvtier.concurrency.tasks import wait_for_event
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease, Leases
from kvtier.pipeline.expect import Expectation
from kvtier.pipeline.query import Query
from kvtier.pipeline.read import Flight
from kvtier.pipeline.usage import TokenCounts
from kvtier.tiers.planner import FIRST

COMPUTE_TIMES = 2.0
"""A request waits for its next chunk at most this many times as long as it would compute all missing ones."""
MIN_TIMEOUT_SECONDS = 0.1
"""And this much longer: a cache process gets no CPU for as long on a busy machine."""


class Staged(Protocol):
    """Chunks that were pushed into a staging buffer of the engine, bypassing the tiers."""

    @property
    def closed(self) -> bool:
        """Whether the memory has been released."""

    def find(self, key: ChunkKey) -> Lease | None:
        """Return a lease on a chunk, or ``None`` if it is not complete."""

    def drop(self, key: ChunkKey) -> None:
        """Remove a chunk that was loaded or is not needed. The memory is freed with its last lease."""


ReportProgress = Callable[[], Awaitable[None]]

WorthWaiting = Callable[[int, int], bool]
"""Whether to wait on, by the number of chunks that have arrived and of those that may still arrive."""


@dataclass(slots=True)
class FoundChunk:
    """One chunk of a lookup: leased, and in flight if it was not in memory."""

    key: ChunkKey
    lease: Lease
    flight: Flight | None = None
    staged: Staged | None = None
    """The staging buffer that contains it, if it is not in the arena."""

    @property
    def source(self) -> int:
        """The tier that held it at the lookup. Final once it has arrived."""
        return FIRST if self.flight is None else self.flight.source

    @property
    def arrived(self) -> bool:
        """Whether its bytes are readable."""
        return self.flight is None or self.flight.arrived

    def release(self) -> None:
        """Release the lease. Drops a staged chunk: the engine has loaded it, or never will."""
        self.lease.release()
        if self.staged is not None:
            self.staged.drop(self.key)


class Cut(NamedTuple):
    """Why a lookup gave up chunks that are held."""

    reason: MissReason
    tier: int
    """The tier that is too slow."""
    seconds: float
    """How long was waited for them, or would have been."""


class Ready(NamedTuple):
    """Consecutive readable chunks of a lookup, in the same memory. The caller owns the leases."""

    leases: Leases
    sources: list[int]
    """The tier that held each chunk at the lookup. Meaningless for staged chunks."""
    staged: Staged | None = None
    """The staging buffer that contains them, if they are not in the arena."""
    keys: Sequence[ChunkKey] = ()
    """The keys of staged chunks, to drop these when their leases are released."""

    @classmethod
    def of(cls, chunks: Sequence[FoundChunk]) -> Ready:
        """Combine chunks in the same memory. Takes over their leases."""
        leases = Leases.of([chunk.lease for chunk in chunks])
        staged = chunks[0].staged
        keys = () if staged is None else [chunk.key for chunk in chunks]
        return cls(leases, [chunk.source for chunk in chunks], staged, keys)

    @property
    def valid(self) -> bool:
        """Whether the leased memory still exists."""
        return self.staged is None or not self.staged.closed

    def release(self, index: int) -> None:
        """Release one lease, and drop the chunk if it is staged. Not idempotent."""
        self.leases.release(index)
        if self.staged is not None:
            self.staged.drop(self.keys[index])

    def release_all(self) -> None:
        """Release all leases, none of which may have been released before."""
        self.leases.release_all()
        if self.staged is not None:
            for key in self.keys:
                self.staged.drop(key)


class FoundPrefix:
    """The leading chunks of a prompt that are held. The caller must release their leases."""

    def __init__(self, query: Query, staged: Staged | None = None) -> None:
        """``staged``: a staging buffer to search besides the tiers."""
        self.query = query
        self.staged = staged
        self.compute = query.compute_seconds / max(1, len(query.keys))
        """The seconds in which the engine computes a chunk; 0 if that is unknown."""
        self.tokens = self.chunk_tokens = 0
        """Of the chunks that may be found, and of a whole chunk; 0 if they do not count for the hit rate."""
        self.counts: Sequence[TokenCounts] = ()
        """To which its hits are added."""
        self.began_at = time.monotonic()
        self.expected: float | None = 0.0
        """In how many seconds the chunks in flight are expected; ``None`` if unknown."""
        self.partial: PartialMatch | None = None
        """The last chunk, if it only begins like the prompt. Compare its block hashes."""
        self.cut: Cut | None = None
        """Why chunks after the last one were given up, if they are held."""
        self.not_answered: float | None = None
        """How many seconds the lookup has waited for shared pools, if they have not answered in time."""
        self.held = 0
        """For a model with states: how many leading chunks are held, also beyond the last state."""
        self.needed = 0
        """How many chunks there must be. With fewer, all are useless and none is returned."""
        self.taken = 0
        """Number of chunks that were removed by :meth:`take_ready`."""
        self.unknown = 0
        """How many more chunks may still be found.

        The lookup first waits for pushed chunks, then queries the shared pools.
        """
        self.pushed: Expectation | None = None
        """Waits for chunks that are pushed here, and adds them as they arrive."""
        self._answered: anyio.Event | None = None
        self._head: tuple[Sequence[ChunkKey], Leases] | None = None
        self._chunks: list[FoundChunk] = []

    @property
    def chunks(self) -> list[FoundChunk]:
        """The chunks one by one. Taking them in bulk with :meth:`take_ready` is far cheaper."""
        if self._head is not None:
            keys, leases = self._head
            self._head = None
            self._chunks[:0] = map(FoundChunk, keys, leases.split())
        return self._chunks

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self._chunks) + (0 if self._head is None else len(self._head[1]))

    @property
    def total(self) -> int:
        """Number of chunks, including those that were taken."""
        return self.taken + self.count

    @property
    def whole(self) -> int:
        """Number of leading chunks of the prompt itself, without one that only begins like it, or a state."""
        return max(0, self.total - (self.partial is not None or self.needed > 0))

    @property
    def hit_tokens(self) -> int:
        """Tokens that count as hits, of this lookup and of those that it repeats."""
        return max(self.query.counted or 0, min(self.tokens, self.total * self.chunk_tokens))

    @property
    def answered(self) -> anyio.Event:
        """Set when the query for unknown chunks has ended and its results were added. Not set without one."""
        if self._answered is None:
            self._answered = anyio.Event()
        return self._answered

    @property
    def ready(self) -> int:
        """Number of leading chunks that are readable."""
        return self.count - self._waiting

    @property
    def _waiting(self) -> int:
        """Number of chunks from the first one in flight on."""
        for count, chunk in enumerate(self._chunks):
            if not chunk.arrived:
                return len(self._chunks) - count
        return 0

    @property
    def in_flight(self) -> int:
        """Number of chunks that may still arrive."""
        return self._waiting + self.unknown

    def set_head(self, keys: Sequence[ChunkKey], leases: Leases) -> None:
        """Add the first chunks, which must be readable, to an empty lookup. Takes over their leases."""
        self._head = keys, leases

    def add(self, chunks: Sequence[FoundChunk]) -> None:
        """Append chunks. Takes over their leases."""
        self._chunks += chunks

    def add_staged(self, key: ChunkKey) -> bool:
        """Append a chunk from the staging buffer. Return whether it was there."""
        lease = None if self.staged is None else self.staged.find(key)
        if lease is not None:
            self._chunks.append(FoundChunk(key, lease, staged=self.staged))
        return lease is not None

    def take_ready(self) -> list[Ready]:
        """Remove and return the leading readable chunks with their leases. Chunks in flight stay.

        In prefix order, with one :class:`Ready` for each run of chunks in the arena or in staging.
        """
        self.taken += self.ready
        if self._head is not None and not self._chunks:
            leases, self._head = self._head[1], None
            return [Ready(leases, [FIRST] * len(leases))] if len(leases) else []
        ready = self.chunks[: self.ready]
        del self._chunks[: len(ready)]
        runs = groupby(ready, key=lambda chunk: chunk.staged is not None)
        return [Ready.of(list(run)) for _, run in runs]

    async def settle(
        self,
        seconds: float | None,
        progress: ReportProgress | None = None,
        worth_waiting: WorthWaiting = lambda _arrived, _waiting: True,
    ) -> None:
        """Wait for the chunks in flight, then drop those that did not arrive.

        Stops early if nothing arrives for ``seconds``; ``None`` waits without a timeout. Calls ``progress``
        whenever the query's answer or some chunks have arrived while others are in flight; it may take them.
        Asks ``worth_waiting`` before each wait.
        """
        news = self.unknown > 0 and await wait_for_event(self.answered, seconds)
        at = 0
        while at < len(self._chunks):
            chunk = self._chunks[at]
            if chunk.flight is None or chunk.arrived:
                at, news = at + 1, True
                continue
            if progress is not None and news:
                news, waiting = False, len(self._chunks) - at
                await progress()
                at = max(0, len(self._chunks) - waiting)  # It may have taken the others, or released all.
                continue
            waiting = len(self._chunks) - at
            if not worth_waiting(self.total - waiting, waiting):
                break
            if not await wait_for_event(chunk.flight.done, self._timeout(seconds)) or not chunk.arrived:
                break
        self.give_up()

    def give_up(self) -> None:
        """Drop what has not arrived, and note why."""
        seconds = time.monotonic() - self.began_at
        if self.unknown > 0:
            self.not_answered = seconds
        late = next((chunk for chunk in self._chunks if not chunk.arrived), None)
        if self.cut is None and late is not None and late.flight is not None:
            failed = late.flight.done.is_set()
            self.cut = Cut(MissReason.LOAD_FAILED if failed else MissReason.TOO_LATE, late.source, seconds)
        self.keep(self.ready)

    def _timeout(self, seconds: float | None) -> float | None:
        """Return how long to wait for the next chunk: not much longer than all of them take to compute."""
        if seconds is None or not self.compute:
            return seconds
        return min(seconds, MIN_TIMEOUT_SECONDS + COMPUTE_TIMES * self.compute * self._waiting)

    def pending_sources(self) -> list[tuple[int, int]]:
        """Return the sources of the chunks that were not taken, in prefix order: each tier, and how many."""
        return [(source, sum(1 for _ in run)) for source, run in groupby(c.source for c in self.chunks)]

    def keep(self, count: int) -> None:
        """Keep only the first ``count`` chunks. Release the others and stop waiting for more."""
        if self.taken + count < self.needed:
            count = 0
        self.unknown = 0
        if count < self.count:
            self.partial = None
        if self.pushed is not None:
            self.pushed.end()
        if self._head is not None and not count:
            self._head[1].release_all()
            self._head = None
        for chunk in self.chunks[count:]:
            chunk.release()
        del self._chunks[count:]

    def release(self) -> None:
        """Release everything. Idempotent."""
        self.keep(0)
