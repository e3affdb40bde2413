"""Move: bring chunks from one tier of this host to another. The source goes only after the target has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvtier.backends.base import Outcome
from kvtier.catalog import State
from kvtier.events import Event, Evict, Move, Prefetch, Priority
from kvtier.keys import ChunkKey
from kvtier.pipeline.base import Hierarchy
from kvtier.pipeline.evict import BATCH_BYTES, EvictStage
from kvtier.pipeline.prefetch import PrefetchStage
from kvtier.router import FIRST, Transfer
from kvtier.slices import Lease

Allocate = Callable[[int], Lease | None]
"""Room in the arena for so many bytes, if there is any."""


class MoveStage:
    """Carries out moves between local tiers."""

    def __init__(self, hierarchy: Hierarchy, evicting: EvictStage, prefetching: PrefetchStage) -> None:
        self._hierarchy = hierarchy
        self._evicting = evicting
        self._prefetching = prefetching

    async def carry_out(self, event: Move) -> int:
        """How many chunks the target holds afterwards; waits until that is known.

        The source keeps them, too, where the target is one whose holdings this host cannot rely on.
        """
        for transfer in self._hierarchy.router.move(event):
            if event.target == FIRST:
                await self.raise_up(transfer.keys)
            else:
                await self._write(event, transfer)
        there = [key for key in event.keys if self._hierarchy.catalog.state(key, event.target) is State.READY]
        if not event.copy and self._hierarchy.tiers[event.target].keeps:
            await self._leave(event, there)
        return len(there)

    async def raise_up(self, keys: Sequence[ChunkKey]) -> None:
        """Bring up into the first tier what is held below, and wait until it has arrived or will not."""
        self._prefetching.start(Prefetch(keys=keys, priority=Priority.AHEAD))
        flights = [self._prefetching.flights[key] for key in keys if key in self._prefetching.flights]
        for flight in flights:
            await flight.landed.wait()

    async def _write(self, event: Move, transfer: Transfer) -> None:
        left = iter(transfer.keys)
        while keys := self._batch(left, transfer.source):
            await self.write(event, transfer.source, event.target, keys, self._evicting.allocate)

    async def write(
        self, event: Event, source: int, target: int, keys: Sequence[ChunkKey], allocate: Allocate
    ) -> Sequence[Outcome]:
        """Write one batch that ``source`` holds to a lower tier; the outcomes of what could be read."""
        hierarchy = self._hierarchy
        clearings = hierarchy.clearings
        if source == FIRST:
            chunks = hierarchy.shares(keys)
        else:
            chunks = await hierarchy.lift(event, source, keys, allocate)
        return await self._evicting.write(event, source, target, chunks, clearings)

    async def _leave(self, event: Move, keys: Sequence[ChunkKey]) -> None:
        """Take from the source what the target has confirmed."""
        catalog = self._hierarchy.catalog
        keys = [key for key in keys if catalog.state(key, event.source) is State.READY]
        if event.source == FIRST:
            self._hierarchy.drop(keys)
        else:
            evict = Evict(keys=keys, tier=event.source)
            await self._evicting.delete(evict, Transfer(event.source, None, keys))

    def _batch(self, keys: Iterator[ChunkKey], source: int) -> Sequence[ChunkKey]:
        """The next of these that the source holds yet: some may have gone while others were written."""
        catalog = self._hierarchy.catalog
        batch: list[ChunkKey] = []
        total = 0
        while total < BATCH_BYTES and (key := next(keys, None)) is not None:
            if catalog.state(key, source) is State.READY:
                batch.append(key)
                total += catalog.length(key)
        return batch
