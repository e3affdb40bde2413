"""Move: bring chunks from one tier of this host to another. The source goes only after the target has it."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.catalog import State
from kvtier.events import Evict, Move, Prefetch, Priority
from kvtier.keys import ChunkKey
from kvtier.pipeline.base import Hierarchy
from kvtier.pipeline.evict import BATCH_BYTES, EvictStage
from kvtier.pipeline.prefetch import PrefetchStage
from kvtier.router import FIRST, Transfer


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
                await self._raise(transfer.keys)
            else:
                await self._write(event, transfer)
        there = [key for key in event.keys if self._hierarchy.catalog.state(key, event.target) is State.READY]
        if not event.copy and self._hierarchy.tiers[event.target].keeps:
            await self._leave(event, there)
        return len(there)

    async def _raise(self, keys: Sequence[ChunkKey]) -> None:
        self._prefetching.start(Prefetch(keys=keys, priority=Priority.AHEAD))
        flights = [self._prefetching.flights[key] for key in keys if key in self._prefetching.flights]
        for flight in flights:
            await flight.landed.wait()

    async def _write(self, event: Move, transfer: Transfer) -> None:
        hierarchy = self._hierarchy
        at = 0
        while at < len(transfer.keys):
            keys = self._batch(transfer.keys[at:])
            at += len(keys)
            clearings = hierarchy.clearings
            if transfer.source == FIRST:
                chunks = hierarchy.shares(keys)
            else:
                chunks = await hierarchy.lift(event, transfer.source, keys, self._evicting.allocate)
            await self._evicting.make_room(event.target, sum(chunk.lease.length for chunk in chunks))
            held = hierarchy.still_held(transfer.source, chunks, clearings)
            await hierarchy.write(event, event.target, held)

    async def _leave(self, event: Move, keys: Sequence[ChunkKey]) -> None:
        """Take from the source what the target has confirmed."""
        catalog = self._hierarchy.catalog
        keys = [key for key in keys if catalog.state(key, event.source) is State.READY]
        if event.source == FIRST:
            self._hierarchy.drop(keys)
        else:
            evict = Evict(keys=keys, tier=event.source)
            await self._evicting.delete(evict, Transfer(event.source, None, keys))

    def _batch(self, keys: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        total = 0
        for count, key in enumerate(keys):
            total += self._hierarchy.catalog.length(key)
            if total > BATCH_BYTES and count:
                return keys[:count]
        return keys
