"""Read: the one way out of a tier below memory.

Chunks that a request waits for are promoted: :meth:`Reader.start` begins one shared flight per chunk, in
prefix order, and each flight allocates, is read and settled, or is read again from the next tier. Chunks on
the way to another tier are copied into the arena without becoming part of it: :meth:`Reader.lease`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

import anyio

from kvtier.backends.base import Outcome
from kvtier.catalog.catalog import State
from kvtier.catalog.eviction import RemovalReason
from kvtier.events import Event, Prefetch, Priority
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease
from kvtier.pipeline.allocate import Allocator
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.tiers.batches import BATCH_BYTES, batch_limit, batch_size, concurrently
from kvtier.tiers.level import ChunkBytes
from kvtier.tiers.planner import Transfer
from kvtier.tiers.throughput import Throughput
from kvtier.units import format_size


@dataclass(slots=True, eq=False)
class Flight:
    """A chunk in flight into the arena. Its lease may be shared immediately, and read once it has arrived."""

    key: ChunkKey
    source: int
    """The tier to read from. Changes to the next one if that fails."""
    lease: Lease
    """Held until ``done``."""
    untried: int
    """A bit for each tier that it may still be read from."""
    generation: int
    """The chunk's generation in the catalog; see :class:`ChunkBytes`."""
    arrived: bool = False
    """Whether the chunk is complete and verified; set before ``ended``."""
    ended: bool = False
    _done: anyio.Event | None = None

    @property
    def done(self) -> anyio.Event:
        """An event that is set when the flight ends. Most flights of a prompt are never waited for."""
        if self._done is None:
            self._done = anyio.Event()
            if self.ended:
                self._done.set()
        return self._done

    def end(self) -> None:
        """Release the lease and wake the waiters."""
        self.lease.release()
        self.ended = True
        if self._done is not None:
            self._done.set()


@dataclass(slots=True, eq=False)
class Read:
    """A batch of flights that is read from one tier."""

    source: int
    flights: Sequence[Flight]
    chunks: Sequence[ChunkBytes]
    """The flights' memory, leased while the tier uses it."""
    settled: bool = False
    """Whether the tier has released the memory."""
    abandoned: bool = False
    """Whether the flights ended before that."""
    failed: bool = True
    """Whether no chunk has arrived, and the read has failed or is still pending."""


Allocate = Callable[[int], Lease | None]
"""Allocates bytes in the arena; ``None`` if there is no room."""


class Reader:
    """Reads from the tiers below memory."""

    def __init__(self, hierarchy: Hierarchy, allocator: Allocator) -> None:
        self._hierarchy = hierarchy
        self._allocator = allocator
        self.flights: dict[ChunkKey, Flight] = {}
        self._throughputs = [Throughput(BATCH_BYTES) for _ in hierarchy.tiers]

    def expected(self, source: int, length: int) -> float | None:
        """Return in how many seconds a tier will have read as many bytes more; ``None`` if unknown."""
        return self._throughputs[source].expected(length)

    def start(self, event: Prefetch) -> None:
        """Start to read the chunks of lower tiers, in prefix order, while there is room. Does not wait."""
        event = replace(event, among=event.among & self._hierarchy.usable_of(event.keys))
        for transfer in self._hierarchy.planner.prefetch(event):
            flights = self._begin(transfer, event.among)
            if flights:
                self._hierarchy.tasks.start_soon(self._run, event, flights)
            if len(flights) < len(transfer.keys):
                return

    def _begin(self, transfer: Transfer, among: int) -> list[Flight]:
        catalog, memory = self._hierarchy.catalog, self._hierarchy.memory
        leases = self._allocator.allocate_all([catalog.length(key) for key in transfer.keys])
        if missing := len(transfer.keys) - len(leases):
            self._hierarchy.counts["prefetch_no_room"] += 1
            message = "tier %s: no room to load %d chunks from tier %s; counted as misses"
            source = self._hierarchy.tiers[transfer.source].name
            self._hierarchy.warn("prefetch", message, memory.name, missing, source)
        keys = transfer.keys[: len(leases)]
        begun = zip(keys, leases, memory.begin_copies(keys), strict=True)
        flights = [Flight(key, transfer.source, lease, among, generation) for key, lease, generation in begun]
        self.flights.update(zip(keys, flights, strict=True))
        self._throughputs[transfer.source].begin(_total_bytes(flights))
        return flights

    async def promote(self, keys: Sequence[ChunkKey]) -> None:
        """Promote chunks into memory, and wait until they have arrived or failed."""
        self.start(Prefetch(keys=keys, priority=Priority.AHEAD))
        flights = [self.flights[key] for key in keys if key in self.flights]
        for flight in flights:
            if not flight.ended:  # Waiting for an event that is set takes a turn of the event loop.
                await flight.done.wait()

    async def _run(self, event: Prefetch, flights: Sequence[Flight]) -> None:
        """Read one run of chunks, batch by batch, so that the first arrive first."""
        waiting = deque(flights)
        try:
            await concurrently(partial(self._read_all, event, waiting))
        finally:
            self._fail(waiting)

    async def _read_all(self, event: Prefetch, waiting: deque[Flight]) -> None:
        """Read one batch after another.

        Chunks that a tier does not return are read from another one first, because later chunks need them.
        """
        while waiting:
            read = self._next_read(waiting)
            try:
                await self._execute(event, read)
            finally:
                # To the front again, in prefix order: later chunks are of no use without them.
                waiting.extendleft(reversed(self._finish(read)))
            if read.failed:
                self._divert(waiting, read.source)

    def _next_read(self, waiting: deque[Flight]) -> Read:
        """Take the first batch of flights with the same source."""
        source = waiting[0].source
        run = takewhile(lambda flight: flight.source == source, waiting)
        limit = batch_limit(self._hierarchy.tier(source).cost(BATCH_BYTES))
        count = batch_size((flight.lease.length for flight in run), limit)
        flights = [waiting.popleft() for _ in range(count)]
        for flight in flights:
            flight.untried &= ~(1 << source)
        # The tier has leases of its own: after a deadline, it uses the memory longer than the flights do.
        return Read(source, flights, [ChunkBytes(flight.key, flight.lease.share()) for flight in flights])

    async def _execute(self, event: Prefetch, read: Read) -> None:
        keys = [flight.key for flight in read.flights]
        transfer = Transfer(read.source, self._hierarchy.memory.index, keys)
        with self._hierarchy.reporting(event, transfer) as outcomes:
            tier = self._hierarchy.tier(read.source)
            outcomes += await tier.get(read.chunks, partial(self._settle, read), event.priority)

    def _settle(self, read: Read, chunks: Sequence[ChunkBytes], outcomes: Sequence[Outcome]) -> None:
        """Update the catalog after the tier has released the memory."""
        hierarchy = self._hierarchy
        arrived, missing = [], []
        hierarchy.counts.update(f"get_{outcome.value}" for outcome in outcomes)
        for flight, chunk, outcome in zip(read.flights, chunks, outcomes, strict=True):
            if outcome is Outcome.OK:
                flight.arrived = True
                arrived.append(ChunkBytes(flight.key, chunk.lease.share(), flight.generation))
            elif outcome is Outcome.MISS:
                missing.append(flight.key)
        hierarchy.changed(hierarchy.memory.index, stored=hierarchy.memory.adopt(arrived))
        self._remove(missing, read.source)
        read.settled = True
        read.failed = not arrived and Outcome.FAILED in outcomes
        if read.abandoned:
            self._abort(read.flights)

    def _finish(self, read: Read) -> list[Flight]:
        """End the flights of a read. Return those to retry on another tier.

        If the tier has not released the memory, there is no retry: a late reply would overwrite the other
        tier's chunk. New memory is not allocated either, because the caller has already waited long enough.
        """
        if not read.settled:
            read.abandoned = True
            self._end(read.flights)
            return []
        self._end([flight for flight in read.flights if flight.arrived])
        failed = [flight for flight in read.flights if not flight.arrived]
        retries, lost = [], []
        for flight, source in zip(failed, self._sources(failed), strict=True):
            if source is None:
                lost.append(flight)
            else:
                self._redirect(flight, source)
                retries.append(flight)
        self._hierarchy.counts["fallback"] += len(retries)
        tier = self._hierarchy.tiers[read.source]
        # A miss in a shared pool is normal: the pool may have evicted the chunk.
        if lost and (read.failed or not tier.shared):
            size = format_size(sum(flight.lease.length for flight in lost))
            message = "tier %s: %s (%d chunks) could not be read; counted as misses"
            self._hierarchy.warn(f"lost {tier.name}", message, tier.name, size, len(lost))
        self._fail(lost)
        return retries

    def _divert(self, waiting: Iterable[Flight], failing: int) -> None:
        """Switch waiting flights from a failing tier to other ones."""
        affected = [flight for flight in waiting if flight.source == failing]
        for flight, source in zip(affected, self._sources(affected, but=failing), strict=True):
            if source is not None:
                self._redirect(flight, source)

    def _redirect(self, flight: Flight, source: int) -> None:
        self._throughputs[flight.source].end(flight.lease.length, 0)
        self._throughputs[source].begin(flight.lease.length)
        flight.source = source

    def _sources(self, flights: Sequence[Flight], but: int | None = None) -> list[int | None]:
        """Return for each flight the cheapest tier that has not been tried, and is not ``but``."""
        keys = [flight.key for flight in flights]
        others = ~(0 if but is None else 1 << but)
        return self._hierarchy.planner.sources(keys, [flight.untried & others for flight in flights])

    def _fail(self, flights: Iterable[Flight]) -> None:
        """End flights that no tier can serve. No tier may still use their memory."""
        flights = list(flights)
        self._abort(flights)
        self._end(flights)

    def _abort(self, flights: Sequence[Flight]) -> None:
        self._hierarchy.memory.abort([flight.key for flight in flights if not flight.arrived])

    def _end(self, flights: Sequence[Flight]) -> None:
        """Wake the waiters of flights that have arrived or failed."""
        for source in {flight.source for flight in flights}:
            own = [flight for flight in flights if flight.source == source]
            arrived = _total_bytes([flight for flight in own if flight.arrived])
            self._throughputs[source].end(_total_bytes(own), arrived)
        for flight in flights:
            self.flights.pop(flight.key, None)
            flight.end()

    # On the way to another tier.

    async def lease(
        self, event: Event, source: int, keys: Sequence[ChunkKey], allocate: Allocate | None = None
    ) -> list[ChunkBytes]:
        """Return leases on chunks of any tier, to be written to another one.

        Chunks of a lower tier are copied into the arena, outside the catalog. Omits chunks that fail, and
        keys that the tier does not hold: they may have been removed meanwhile.
        """
        hierarchy, allocate = self._hierarchy, allocate or self._allocator.allocate
        if source == hierarchy.memory.index:
            return hierarchy.memory.lease_ready(keys)
        catalog = hierarchy.catalog
        usable = hierarchy.usable_of(keys) >> source & 1
        held = [key for key in keys if usable and catalog.state(key, source) is State.READY]
        room = ((key, allocate(catalog.length(key))) for key in held)
        chunks = [ChunkBytes(key, lease, catalog.generation(key)) for key, lease in room if lease is not None]
        mine = [chunk._replace(lease=chunk.lease.share()) for chunk in chunks]
        transfer = Transfer(source, hierarchy.memory.index, [chunk.key for chunk in chunks])
        outcomes: Sequence[Outcome] = [Outcome.FAILED] * len(mine)
        try:
            with hierarchy.reporting(event, transfer) as reported:
                tier = hierarchy.tier(source)
                outcomes = await tier.get(chunks, partial(self._settle_copies, source), event.priority)
                reported += outcomes
        finally:
            for chunk, outcome in zip(mine, outcomes, strict=True):
                if outcome is not Outcome.OK:
                    chunk.lease.release()
        return [chunk for chunk, outcome in zip(mine, outcomes, strict=True) if outcome is Outcome.OK]

    def _settle_copies(self, source: int, chunks: Sequence[ChunkBytes], outcomes: Sequence[Outcome]) -> None:
        results = zip(chunks, outcomes, strict=True)
        self._remove([chunk.key for chunk, outcome in results if outcome is Outcome.MISS], source)

    def _remove(self, missing: Sequence[ChunkKey], source: int) -> None:
        """Remove from the catalog the chunks that a tier turned out not to hold."""
        catalog = self._hierarchy.catalog
        lost = [key for key in missing if source in catalog.tiers(key)]
        catalog.remove_all(lost, source, RemovalReason.LOST)
        self._hierarchy.changed(source, removed=lost)


def _total_bytes(flights: Sequence[Flight]) -> int:
    return sum(flight.lease.length for flight in flights)
