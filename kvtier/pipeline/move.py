"""Move: transfer chunks between tiers of this host. The source drops them only once the target has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.backends.base import Outcome
from kvtier.catalog.catalog import State
from kvtier.catalog.eviction import RemovalReason
from kvtier.events import Event, Move, Prefetch, Priority
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease
from kvtier.pipeline.base import Hierarchy
from kvtier.pipeline.evict import EvictStage
from kvtier.pipeline.prefetch import PrefetchStage
from kvtier.tiers.batches import in_batches

Allocate = Callable[[int], Lease | None]
"""Allocates bytes in the arena; ``None`` if there is no room."""


class MoveStage:
    """Executes moves between tiers of this host."""

    def __init__(self, hierarchy: Hierarchy, evicting: EvictStage, prefetching: PrefetchStage) -> None:
        self._hierarchy = hierarchy
        self._evicting = evicting
        self._prefetching = prefetching

    async def execute(self, event: Move) -> int:
        """Execute a move, and return how many of its chunks the target holds afterwards.

        The source keeps the chunks if this host cannot rely on what the target holds.
        """
        for transfer in self._hierarchy.router.move(event):
            if event.target == self._hierarchy.memory.index:
                await self.promote(transfer.keys)
            else:
                await self.write(event, transfer.source, event.target, transfer.keys, self._evicting.allocate)
        held = [key for key in event.keys if self._hierarchy.catalog.state(key, event.target) is State.READY]
        if not event.copy and self._hierarchy.tiers[event.target].keeps:
            await self._delete_source(event, held)
        return len(held)

    async def promote(self, keys: Sequence[ChunkKey]) -> None:
        """Promote chunks of lower tiers into memory, and wait until they have arrived or failed."""
        self._prefetching.start(Prefetch(keys=keys, priority=Priority.AHEAD))
        flights = [self._prefetching.flights[key] for key in keys if key in self._prefetching.flights]
        for flight in flights:
            if not flight.ended:  # Waiting for an event that is set takes a turn of the event loop.
                await flight.done.wait()

    async def write(
        self, event: Event, source: int, target: int, keys: Sequence[ChunkKey], allocate: Allocate
    ) -> Sequence[Outcome]:
        """Write chunks of ``source`` to a lower tier. Return the outcomes of those that were read."""

        async def write(batch: Sequence[ChunkKey]) -> Sequence[Outcome]:
            chunks = await self._hierarchy.leased(event, source, batch, allocate)
            return await self._evicting.write(event, target, chunks)

        return await in_batches(write, keys, self._hierarchy.length)

    async def _delete_source(self, event: Move, keys: Sequence[ChunkKey]) -> None:
        """Remove chunks that the target holds from the source."""
        catalog = self._hierarchy.catalog
        keys = [key for key in keys if catalog.state(key, event.source) is State.READY]
        await self._evicting.remove(keys, event.source, RemovalReason.MOVED)
