"""Evict: make room, coldest leaves first, and lose nothing that a lower tier would keep.

Room in the arena must be found while an engine waits, so :meth:`EvictStage.allocate` only drops what
is safe to drop at once. The rest is demoted ahead of need by one background task, between a high and a
low watermark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

import anyio

from kvtier.backends.base import Outcome
from kvtier.events import Event, Evict
from kvtier.keys import ChunkKey
from kvtier.pipeline.base import Hierarchy
from kvtier.router import FIRST, Transfer
from kvtier.slices import Lease
from kvtier.tier import ChunkBytes

BATCH_BYTES = 64 << 20
"""Demoted in one go: enough to keep a disk busy, little enough to free memory soon."""
SCAN_LIMIT = 1024
"""Victims looked at in one go: what is leased is passed over, and many may be."""
RETRY_SECONDS = 0.01
LONGEST_RETRY_SECONDS = 1.0
"""Pause where everything cold is leased or pinned, before looking again: from the first to the second."""


class EvictStage:
    """Makes room in every tier."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._needed = anyio.Event()
        self.demoting_bytes = 0
        """Bytes on their way from one tier to the next."""
        self._refused_bytes = 0
        """The largest allocation since the last eviction that found no room."""

    def allocate(self, length: int) -> Lease | None:
        """A lease on ``length`` bytes of the arena, evicting for it what may go at once; never waits.

        ``None`` where all that is cold is leased, pinned or has still to be demoted.
        """
        arena = self._hierarchy.memory.arena
        lease = arena.allocate(length)
        if lease is None:
            lease = self._allocate_by_dropping(length)
        if lease is None and length <= arena.capacity:
            self._refused_bytes = max(self._refused_bytes, length)
        # Including this lease, which the catalog does not count yet.
        if lease is None or self._hierarchy.tiers[FIRST].excess_bytes(length):
            self._needed.set()
        return lease

    def allocate_all(self, length: int, count: int) -> list[Lease]:
        """At most ``count`` leases of ``length`` bytes, evicting what may go at once; never waits."""
        leases = self._hierarchy.memory.arena.allocate_all(length, count)
        while len(leases) < count and (lease := self.allocate(length)) is not None:
            leases.append(lease)
        if leases and self._hierarchy.tiers[FIRST].excess_bytes(length * len(leases)):
            self._needed.set()
        return leases

    def _allocate_by_dropping(self, length: int) -> Lease | None:
        hierarchy = self._hierarchy
        for limit in (SCAN_LIMIT // 16, SCAN_LIMIT):
            event = Evict(keys=self._idle_victims(limit), tier=FIRST)
            droppable = (plan.keys for plan in hierarchy.router.evict(event) if plan.target is None)
            freed = 0
            for key in chain.from_iterable(droppable):
                freed += hierarchy.catalog.length(key)
                self._drop_first([key])
                if freed >= length and (lease := hierarchy.memory.arena.allocate(length)) is not None:
                    return lease
        return None

    def _idle_victims(self, limit: int) -> list[ChunkKey]:
        """Those of the ``limit`` coldest chunks of the arena that nobody is using."""
        coldest = islice(self._hierarchy.catalog.victims(FIRST), limit)
        return [key for key in coldest if self._hierarchy.memory.idle(key)]

    def _drop_first(self, keys: Sequence[ChunkKey]) -> None:
        self._hierarchy.drop(keys)
        self._hierarchy.counts["evicted"] += len(keys)

    async def run(self) -> None:
        """Keep the arena under its high watermark, and able to take chunks, while the cache is open."""
        while True:
            await self._needed.wait()
            self._needed = anyio.Event()
            pause = RETRY_SECONDS
            while excess := self._excess_bytes():
                if await self._relieve(excess):
                    self._refused_bytes = 0
                    pause = RETRY_SECONDS
                else:
                    await anyio.sleep(pause)
                    pause = min(2 * pause, LONGEST_RETRY_SECONDS)

    def _excess_bytes(self) -> int:
        """How many bytes must go from the arena.

        It may be full below its watermark: what is left there is less than a chunk, or lies in pieces.
        """
        refused = self._refused_bytes
        return max(self._hierarchy.tiers[FIRST].excess_bytes(refused), refused)

    async def _relieve(self, excess: int) -> int:
        """Evict up to ``excess`` bytes from the arena; how many chunks went."""
        hierarchy = self._hierarchy
        event = Evict(keys=self._up_to(self._idle_victims(SCAN_LIMIT), min(excess, BATCH_BYTES)), tier=FIRST)
        gone = 0
        for transfer in hierarchy.router.evict(event):
            if transfer.target is not None:
                # A tier that takes nothing must not keep the arena full of what is cold: after one
                # try the chunk goes, demoted or not.
                await self._demote(event, transfer)
            idle = [key for key in transfer.keys if hierarchy.memory.idle(key)]
            self._drop_first(idle)
            gone += len(idle)
        return gone

    def _up_to(self, keys: Iterable[ChunkKey], wanted: float) -> list[ChunkKey]:
        taken: list[ChunkKey] = []
        total = 0
        for key in keys:
            if total >= wanted:
                break
            taken.append(key)
            total += self._hierarchy.catalog.length(key)
        return taken

    async def make_room(self, tier: int, incoming: int) -> None:
        """Delete the coldest chunks of a lower tier until ``incoming`` bytes more are under its watermark.

        Of a shared pool the coldest are only put out of mind: they are not this host's to delete.
        """
        target = self._hierarchy.tiers[tier]
        if surplus := target.surplus_chunks:
            for key in list(islice(self._hierarchy.catalog.victims(tier), surplus)):
                self._hierarchy.catalog.remove(key, tier)
        excess = target.excess_bytes(incoming)
        if not excess:
            return
        victims = self._up_to(self._hierarchy.catalog.victims(tier), min(excess, incoming + BATCH_BYTES))
        event = Evict(keys=victims, tier=tier)
        for transfer in self._hierarchy.router.evict(event):
            if transfer.target is not None:
                await self._demote(event, transfer)
            await self.delete(event, transfer)

    async def _demote(self, event: Evict, transfer: Transfer) -> None:
        """Write what would be lost to the tier that inherits it."""
        hierarchy = self._hierarchy
        assert transfer.target is not None
        clearings = hierarchy.clearings
        if transfer.source == FIRST:
            chunks = hierarchy.shares(transfer.keys)
        else:
            chunks = await hierarchy.lift(event, transfer.source, transfer.keys, self.allocate)
        length = sum(chunk.lease.length for chunk in chunks)
        self.demoting_bytes += length
        try:
            outcomes = await self.write(event, transfer.source, transfer.target, chunks, clearings)
        finally:
            self.demoting_bytes -= length
        hierarchy.counts["demoted"] += outcomes.count(Outcome.OK)

    async def write(
        self, event: Event, source: int, target: int, chunks: Sequence[ChunkBytes], clearings: int
    ) -> Sequence[Outcome]:
        """Make room in a lower tier and write there what ``source`` still holds; takes over the leases.

        The outcomes are of these alone. ``clearings`` are those when the chunks were leased.
        """
        try:
            await self.make_room(target, sum(chunk.lease.length for chunk in chunks))
        except BaseException:
            for chunk in chunks:
                chunk.lease.release()
            raise
        held = self._hierarchy.still_held(source, chunks, clearings)
        return await self._hierarchy.write(event, target, held)

    async def delete(self, event: Evict, transfer: Transfer) -> None:
        """Remove what is READY in a lower tier."""
        hierarchy = self._hierarchy
        held = [key for key in transfer.keys if transfer.source in hierarchy.catalog.tiers(key)]
        hierarchy.counts["evicted"] += len(held)
        # Told before its bytes are gone: by then it may have been stored again.
        hierarchy.changed(transfer.source, removed=held)
        with hierarchy.reporting(event, Transfer(transfer.source, None, held)) as outcomes:
            await hierarchy.tiers[transfer.source].delete(held)
            outcomes += [Outcome.OK] * len(held)
