"""Prefetch: bring chunks up into the arena, in prefix order, one flight per chunk however many want it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio

from kvtier.backends.base import Outcome
from kvtier.catalog import State
from kvtier.events import Prefetch
from kvtier.keys import ChunkKey
from kvtier.pipeline.base import Hierarchy
from kvtier.pipeline.evict import EvictStage
from kvtier.router import FIRST, Transfer
from kvtier.slices import Lease
from kvtier.tier import ChunkBytes
from kvtier.units import MIB, format_size

READ_BYTES = 16 * MIB
"""Read in one go: a request that waits sees progress with each, and its time to wait begins anew."""
READS_IN_FLIGHT = 2
"""While one batch is verified the next is read. More at once gains no medium anything."""


@dataclass(slots=True, eq=False)
class Flight:
    """One chunk on its way into the arena. Its lease may be shared at once, and read once it has arrived."""

    key: ChunkKey
    source: int
    """The tier that it comes from: the next one, where another did not give it."""
    lease: Lease
    """Held until it has landed."""
    untried: int
    """A bit for each tier that it may still be read from."""
    landed: anyio.Event = field(default_factory=anyio.Event)
    arrived: bool = False
    """Whether the chunk is whole and verified; set before ``landed``."""


@dataclass(slots=True, eq=False)
class Read:
    """One batch of flights, asked of one tier."""

    source: int
    flights: Sequence[Flight]
    chunks: Sequence[ChunkBytes]
    """The flights' memory, leased for as long as the tier has it."""
    settled: bool = False
    """Whether the tier has let go of the memory."""
    given_up: bool = False
    """Whether the flights landed before it had."""
    failed: bool = True
    """Whether nothing has come of it so far, be it that the tier had something to give."""


class PrefetchStage:
    """Starts flights and lands them."""

    def __init__(self, hierarchy: Hierarchy, evicting: EvictStage) -> None:
        self._hierarchy = hierarchy
        self._evicting = evicting
        self.flights: dict[ChunkKey, Flight] = {}

    def start(self, event: Prefetch) -> None:
        """Put in flight, in prefix order, what is below and finds room; never waits."""
        for transfer in self._hierarchy.router.prefetch(event):
            flights = self._take_off(transfer, event.among)
            if flights:
                self._hierarchy.tasks.start_soon(self._fly, event, flights)
            if len(flights) < len(transfer.keys):
                return

    def _take_off(self, transfer: Transfer, among: int) -> list[Flight]:
        catalog = self._hierarchy.catalog
        flights: list[Flight] = []
        for key in transfer.keys:
            lease = self._evicting.allocate(catalog.length(key))
            if lease is None:
                self._hierarchy.counts["prefetch_no_room"] += 1
                left = len(transfer.keys) - len(flights)
                message = "tier %s: no room to load %d chunks from tier %s; they count as missing"
                names = self._hierarchy.name(FIRST), left, self._hierarchy.name(transfer.source)
                self._hierarchy.warn("prefetch", message, *names)
                break
            catalog.add(key, FIRST, lease.length, State.PENDING)
            flight = self.flights[key] = Flight(key, transfer.source, lease, among)
            flights.append(flight)
        return flights

    async def _fly(self, event: Prefetch, flights: Sequence[Flight]) -> None:
        """Read one run of chunks in small batches, a few in flight, so that the first arrive first."""
        waiting = deque(flights)
        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(READS_IN_FLIGHT):
                    tasks.start_soon(self._read_all, event, waiting)
        finally:
            self._give_up(waiting)

    async def _read_all(self, event: Prefetch, waiting: deque[Flight]) -> None:
        """Read one batch after another.

        What a tier does not give is read from another before the rest, whose use depends on it.
        """
        while waiting:
            read = self._next_read(waiting)
            try:
                await self._carry_out(event, read)
            finally:
                waiting.extendleft(reversed(self._finish(read)))
            if read.failed:
                self._divert(waiting, read.source)

    def _next_read(self, waiting: deque[Flight]) -> Read:
        """Take the first flights that have one source, about :data:`READ_BYTES` of them, at least one."""
        source = waiting[0].source
        flights: list[Flight] = []
        room = READ_BYTES
        while waiting and waiting[0].source == source and (not flights or waiting[0].lease.length <= room):
            flight = waiting.popleft()
            flight.untried &= ~(1 << source)
            flights.append(flight)
            room -= flight.lease.length
        return Read(source, flights, [ChunkBytes(flight.key, flight.lease.share()) for flight in flights])

    async def _carry_out(self, event: Prefetch, read: Read) -> None:
        transfer = Transfer(read.source, FIRST, [flight.key for flight in read.flights])
        with self._hierarchy.reporting(event, transfer) as outcomes:
            tier = self._hierarchy.tiers[read.source]
            outcomes += await tier.get(read.chunks, partial(self._settle, read))

    def _settle(self, read: Read, outcomes: Sequence[Outcome]) -> None:
        """The tier has let go of the memory: enter into the catalog what is there now."""
        hierarchy = self._hierarchy
        arrived, missing = [], []
        for flight, chunk, outcome in zip(read.flights, read.chunks, outcomes, strict=True):
            hierarchy.counts[f"get_{outcome.value}"] += 1
            if outcome is Outcome.OK:
                flight.arrived = True
                arrived.append(ChunkBytes(flight.key, chunk.lease.share()))
            elif outcome is Outcome.MISS and read.source in hierarchy.catalog.tiers(flight.key):
                hierarchy.catalog.remove(flight.key, read.source)
                missing.append(flight.key)
        hierarchy.adopt(arrived)
        hierarchy.changed(read.source, removed=missing)
        read.settled = True
        read.failed = not arrived and Outcome.FAILED in outcomes
        if read.given_up:
            self._forget(read.flights)

    def _finish(self, read: Read) -> list[Flight]:
        """Land the flights of a read that is over, but for those that another tier may serve.

        Memory that its tier has not let go of is not given to another, whose chunk a late answer would
        overwrite. Nor does it get other memory: who waited has waited for long enough.
        """
        if not read.settled:
            read.given_up = True
            self._land(read.flights)
            return []
        self._land([flight for flight in read.flights if flight.arrived])
        unserved = [flight for flight in read.flights if not flight.arrived]
        again, lost = [], []
        for flight, source in zip(unserved, self._sources(unserved), strict=True):
            if source is None:
                lost.append(flight)
            else:
                flight.source = source
                again.append(flight)
        self._hierarchy.counts["fell_back"] += len(again)
        tier = self._hierarchy.tiers[read.source]
        # What a pool does not hold any longer is no surprise.
        if lost and (read.failed or not tier.shared):
            size = format_size(sum(flight.lease.length for flight in lost))
            message = "tier %s: %s (%d chunks) could not be read; they count as missing"
            self._hierarchy.warn(f"lost {tier.name}", message, tier.name, size, len(lost))
        self._give_up(lost)
        return again

    def _divert(self, waiting: Iterable[Flight], failing: int) -> None:
        """Read from other tiers first what has not been asked of one that fails."""
        affected = [flight for flight in waiting if flight.source == failing]
        for flight, source in zip(affected, self._sources(affected, but=failing), strict=True):
            if source is not None:
                flight.source = source

    def _sources(self, flights: Sequence[Flight], but: int = FIRST) -> list[int | None]:
        """The cheapest tier that each of these has not been read from."""
        keys = [flight.key for flight in flights]
        return self._hierarchy.router.sources(keys, [flight.untried & ~(1 << but) for flight in flights])

    def _give_up(self, flights: Iterable[Flight]) -> None:
        """No tier gives these: they land without having arrived. Their memory must be nobody's."""
        flights = list(flights)
        self._forget(flights)
        self._land(flights)

    def _forget(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            if not flight.arrived:
                self._hierarchy.forget(flight.key, FIRST)

    def _land(self, flights: Sequence[Flight]) -> None:
        """Nobody need wait for these any longer, be they there or not."""
        for flight in flights:
            self.flights.pop(flight.key, None)
            flight.lease.release()
            flight.landed.set()
