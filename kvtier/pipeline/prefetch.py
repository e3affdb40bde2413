"""Prefetch: bring chunks up into the arena, in prefix order, one flight per chunk however many want it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio

from kvtier.arena import Lease
from kvtier.backends.base import Outcome
from kvtier.catalog import State
from kvtier.events import Prefetch
from kvtier.keys import ChunkKey
from kvtier.pipeline.base import Hierarchy
from kvtier.pipeline.evict import BATCH_BYTES, EvictStage
from kvtier.router import FIRST, Transfer
from kvtier.tier import ChunkBytes


@dataclass(slots=True, eq=False)
class Flight:
    """One chunk on its way into the arena. Its lease may be shared at once, and read once it has arrived."""

    key: ChunkKey
    source: int
    lease: Lease
    landed: anyio.Event = field(default_factory=anyio.Event)
    arrived: bool = False
    """Whether the chunk is whole and verified; set before ``landed``."""


class PrefetchStage:
    """Starts flights and lands them."""

    def __init__(self, hierarchy: Hierarchy, evicting: EvictStage) -> None:
        self._hierarchy = hierarchy
        self._evicting = evicting
        self.flights: dict[ChunkKey, Flight] = {}

    def start(self, event: Prefetch) -> None:
        """Put in flight, in prefix order, what is below and finds room; never waits."""
        for transfer in self._hierarchy.router.prefetch(event):
            flights = self._take_off(transfer)
            if flights:
                self._hierarchy.tasks.start_soon(self._fly, event, transfer.source, flights)
            if len(flights) < len(transfer.keys):
                return

    def _take_off(self, transfer: Transfer) -> list[Flight]:
        catalog = self._hierarchy.catalog
        flights = []
        for key in transfer.keys:
            lease = self._evicting.allocate(catalog.length(key))
            if lease is None:
                self._hierarchy.counts["prefetch_no_room"] += 1
                break
            catalog.add(key, FIRST, lease.length, State.PENDING)
            flight = self.flights[key] = Flight(key, transfer.source, lease)
            flights.append(flight)
        return flights

    async def _fly(self, event: Prefetch, source: int, flights: Sequence[Flight]) -> None:
        """Read one run of chunks from one tier, a batch after another, so that the first arrive first."""
        at = 0
        try:
            while at < len(flights):
                batch = _batch(flights[at:])
                at += len(batch)
                await self._read(event, source, batch)
        finally:
            # Cancelled: a batch that a tier was given is settled by that tier, the rest is settled here.
            self._settle(source, flights[at:], [Outcome.FAILED] * (len(flights) - at))
            for flight in flights[at:]:
                flight.lease.release()
            self._land(flights[at:])

    async def _read(self, event: Prefetch, source: int, flights: Sequence[Flight]) -> None:
        tier = self._hierarchy.tiers[source]
        chunks = [ChunkBytes(flight.key, flight.lease) for flight in flights]
        keys = [flight.key for flight in flights]
        try:
            with self._hierarchy.reporting(event, Transfer(source, FIRST, keys)) as outcomes:
                outcomes += await tier.get(chunks, partial(self._settle, source, flights))
        finally:
            self._land(flights)

    def _settle(self, source: int, flights: Sequence[Flight], outcomes: Sequence[Outcome]) -> None:
        """The tier has let go of the memory: enter into the catalog what is there now."""
        hierarchy = self._hierarchy
        arrived, missing = [], []
        for flight, outcome in zip(flights, outcomes, strict=True):
            hierarchy.counts[f"get_{outcome.value}"] += 1
            if outcome is Outcome.OK:
                flight.arrived = True
                arrived.append(ChunkBytes(flight.key, flight.lease.share()))
                continue
            hierarchy.forget(flight.key, FIRST)
            if outcome is Outcome.MISS and source in hierarchy.catalog.tiers(flight.key):
                hierarchy.catalog.remove(flight.key, source)
                missing.append(flight.key)
        hierarchy.adopt(arrived)
        hierarchy.changed(source, removed=missing)

    def _land(self, flights: Sequence[Flight]) -> None:
        """Nobody need wait for these any longer, be they there or not."""
        for flight in flights:
            self.flights.pop(flight.key, None)
            flight.landed.set()


def _batch(flights: Sequence[Flight]) -> Sequence[Flight]:
    """The first flights, about :data:`BATCH_BYTES` of them, at least one."""
    total = 0
    for count, flight in enumerate(flights):
        total += flight.lease.length
        if total > BATCH_BYTES and count:
            return flights[:count]
    return flights
