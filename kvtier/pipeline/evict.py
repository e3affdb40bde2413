"""Evict: make room, coldest leaves first, and demote what a lower tier should keep.

Engines wait for allocations in the arena, so :meth:`EvictStage.allocate` only drops chunks that need no
demotion. A background task demotes the others in advance, between a high and a low watermark.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import groupby

import anyio

from kvtier.backends.base import Outcome
from kvtier.catalog.eviction import IncomingPrompt, RemovalReason
from kvtier.catalog.tenants import EvictionScope
from kvtier.concurrency.breaker import Backoff
from kvtier.events import Event, Evict
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease
from kvtier.pipeline.base import Hierarchy
from kvtier.pipeline.room import may_decline, surplus_of, victims_for, victims_over_maximum
from kvtier.tiers.batches import BATCH_BYTES, concurrently, in_batches
from kvtier.tiers.level import ChunkBytes
from kvtier.tiers.router import Transfer

SCAN_LIMIT = 1024
"""Maximum victims to examine per attempt. Many may be leased, and these are skipped."""
RETRY_SECONDS = 0.01
MAX_RETRY_SECONDS = 1.0
"""Initial and maximum back-off while all cold chunks are leased or pinned."""


class EvictStage:
    """Makes room in every tier."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._memory = hierarchy.memory
        self._written_below = any(tier.settings.write != "never" for tier in hierarchy.lower)
        self._needed = anyio.Event()
        self._making_room: defaultdict[int, anyio.Lock] = defaultdict(anyio.Lock)
        """Held from the eviction in a lower tier until the chunks for which it made room count there."""
        self.demoting_bytes = 0
        """Bytes of demotions in flight."""
        self._leaving_bytes = 0
        """Bytes of the arena that are being evicted."""
        self._refused_bytes = 0
        """The largest allocation that has failed since the last eviction."""

    def allocate(self, length: int) -> Lease | None:
        """Allocate ``length`` bytes of the arena, dropping chunks that need no demotion. Does not wait.

        ``None`` if all cold chunks are leased, pinned or not demoted yet.
        """
        return next(iter(self.allocate_all((length,))), None)

    def allocate_all(self, lengths: Sequence[int]) -> list[Lease]:
        """Allocate memory for each length as :meth:`allocate`, up to the first that does not fit."""
        leases = self._allocate_all(lengths)
        if len(leases) < len(lengths):
            self._refuse(lengths[len(leases)])
        return leases

    def allocate_for(self, prompt: IncomingPrompt) -> tuple[list[Lease], bool]:
        """Allocate memory for new chunks as :meth:`allocate_all`, but drop nothing that is worth more.

        Return the leases, and whether the last chunks have none for that reason.
        """
        leases = self._allocate_all(prompt.lengths, prompt)
        if len(leases) == len(prompt.lengths):
            return leases, False
        declined = bool(self._memory.victims(SCAN_LIMIT, 1, EvictionScope.ABOVE_SHARE))
        if not declined:
            self._refuse(prompt.lengths[len(leases)])
        return leases, declined

    def _refuse(self, length: int) -> None:
        """Make room in the background, since there was none for ``length`` bytes."""
        if length <= self._memory.arena.capacity:
            self._refused_bytes = max(self._refused_bytes, length)
        self._needed.set()

    def _allocate_all(self, lengths: Sequence[int], prompt: IncomingPrompt | None = None) -> list[Lease]:
        memory, leases = self._memory, list[Lease]()
        for length, run in groupby(lengths):
            wanted = len(leases) + len(list(run))
            leases += memory.arena.allocate_all(length, wanted - len(leases))
            if len(leases) < wanted:
                leases += self._allocate_by_dropping(length, wanted - len(leases), prompt)
            if len(leases) < wanted:
                break
        # Includes these leases, which are not in the catalog yet.
        if leases and self._evicts_ahead(sum(lengths[: len(leases)])):
            self._needed.set()
        return leases

    def _evicts_ahead(self, incoming: int) -> bool:
        """Whether to evict in the background once ``incoming`` more bytes are stored.

        Not if the policy may decline: in free space, worse chunks would replace better ones.
        """
        tenants = self._memory.tenants is not None  # One may be above its maximum then.
        return tenants or (not may_decline(self._hierarchy.tiers) and self._memory.excess_bytes(incoming) > 0)

    def _allocate_by_dropping(self, length: int, count: int, prompt: IncomingPrompt | None) -> list[Lease]:
        """Drop chunks that need no demotion, and allocate ``length`` bytes up to ``count`` times instead.

        The second search is for chunks behind those that do need one, or whose memory lies together.
        """
        hierarchy, memory = self._hierarchy, self._memory
        leases: list[Lease] = []
        for needed in (count * length, sys.maxsize):
            victims = memory.victims(SCAN_LIMIT, needed, EvictionScope.ABOVE_SHARE, prompt)
            if not victims:
                break
            plans = hierarchy.router.evict(Evict(keys=victims, tier=memory.index))
            droppable = (plan for plan in plans if plan.target is None)
            freed = 0
            for key, admitted in ((key, plan.admitted) for plan in droppable for key in plan.keys):
                freed += hierarchy.catalog.length(key)
                self._drop([key], admitted=admitted)
                if freed >= length and (lease := memory.arena.allocate(length)) is not None:
                    leases.append(lease)
                    freed -= length
                    if len(leases) == count:
                        return leases
        return leases

    def _drop(self, keys: Sequence[ChunkKey], *, admitted: bool) -> None:
        if admitted and self._written_below:
            places = self._hierarchy.catalog.places(keys)
            lost = sum(not (ready | pending) >> 1 for ready, pending in places)
            self._hierarchy.counts["evicted_unwritten"] += lost
        self._hierarchy.drop(keys)
        self._hierarchy.counts["evicted"] += len(keys)
        self._hierarchy.counts["not_admitted"] += 0 if admitted else len(keys)

    async def run(self) -> None:
        """Keep the arena below its high watermark and allocatable, while the cache is open."""
        await concurrently(self._evict_excess)

    async def _evict_excess(self) -> None:
        backoff = Backoff(RETRY_SECONDS, MAX_RETRY_SECONDS)
        while True:
            await self._needed.wait()
            self._needed = anyio.Event()
            backoff.reset()
            while (excess := self._excess_bytes()) > 0:
                if await self._evict(excess):
                    self._refused_bytes = 0
                    backoff.reset()
                else:
                    await anyio.sleep(backoff.next())
            # If these are in use, the next allocation tries again.
            scope = EvictionScope.OVER_MAXIMUM
            while (over := self._memory.over_maximum_bytes) and await self._evict(over, scope):
                pass

    def _excess_bytes(self) -> int:
        """Return the number of bytes to evict from the arena, in addition to those that are leaving.

        Allocations can fail below the watermark: the free space may be less than a chunk, or fragmented.
        """
        refused = self._refused_bytes
        return max(self._memory.excess_bytes(refused), refused) - self._leaving_bytes

    async def _evict(self, excess: int, scope: EvictionScope = EvictionScope.ALL) -> int:
        """Evict up to ``excess`` bytes, at most one batch, from the arena. Return the number of chunks."""
        hierarchy = self._hierarchy
        victims = self._memory.victims(SCAN_LIMIT, min(excess, BATCH_BYTES), scope)
        event = Evict(keys=victims, tier=self._memory.index)
        length = sum(map(hierarchy.length, victims))
        evicted = 0
        self._leaving_bytes += length
        try:
            for transfer in hierarchy.router.evict(event):
                if transfer.target is not None:
                    # A tier that accepts nothing must not keep the arena full of cold chunks: after one
                    # attempt the chunk is dropped, demoted or not.
                    await self._demote(event, transfer)
                idle = [key for key in transfer.keys if self._memory.is_idle(key)]
                self._drop(idle, admitted=transfer.admitted)
                evicted += len(idle)
        finally:
            self._leaving_bytes -= length
        return evicted

    async def make_room(self, tier: int, incoming: int) -> None:
        """Delete the coldest chunks of a lower tier until ``incoming`` more bytes fit below its watermark.

        For a shared pool, only removes the coldest chunks from the catalog: other hosts use them, too.
        """
        target = self._hierarchy.tiers[tier]
        catalog = self._hierarchy.catalog
        if surplus := surplus_of(catalog, target):
            catalog.remove_all(surplus, tier)
        await self._evict_lower(Evict(keys=victims_for(catalog, target, incoming), tier=tier))
        await self._evict_over_maximum(tier, incoming)

    async def _evict_over_maximum(self, tier: int, incoming: int) -> None:
        """Delete chunks in a lower tier of tenants who hold more there than they may."""
        keys = victims_over_maximum(self._hierarchy.catalog, self._hierarchy.tiers[tier], incoming)
        await self._evict_lower(Evict(keys=keys, tier=tier))

    async def _evict_lower(self, event: Evict) -> None:
        for transfer in self._hierarchy.router.evict(event):
            if transfer.target is not None:
                await self._demote(event, transfer)
            await self.delete(event, transfer)

    async def _demote(self, event: Evict, transfer: Transfer) -> None:
        """Write chunks that would be lost to their demotion target."""
        demote = partial(self._demote_batch, event, transfer)
        outcomes = await in_batches(demote, transfer.keys, self._hierarchy.length)
        self._hierarchy.counts["demoted"] += outcomes.count(Outcome.OK)

    async def _demote_batch(
        self, event: Evict, transfer: Transfer, keys: Sequence[ChunkKey]
    ) -> Sequence[Outcome]:
        assert transfer.target is not None
        chunks = await self._hierarchy.leased(event, transfer.source, keys, self.allocate)
        length = sum(chunk.lease.length for chunk in chunks)
        self.demoting_bytes += length
        try:
            return await self.write(event, transfer.target, chunks)
        finally:
            self.demoting_bytes -= length

    async def write(self, event: Event, target: int, chunks: Sequence[ChunkBytes]) -> Sequence[Outcome]:
        """Make room in a lower tier and write a batch of leased chunk objects. Takes over the leases.

        See :meth:`Hierarchy.begin_write`.
        """
        try:
            async with self._making_room[target]:
                await self.make_room(target, sum(chunk.lease.length for chunk in chunks))
                outcomes, absent = self._hierarchy.begin_write(target, chunks)
        except BaseException:
            for chunk in chunks:
                chunk.lease.release()
            raise
        written = await self._hierarchy.write(event, target, absent)
        outcomes.update(zip((chunk.key for chunk in absent), written, strict=True))
        if self._hierarchy.tiers[target].over_maximum_bytes:
            async with self._making_room[target]:
                await self._evict_over_maximum(target, sum(chunk.lease.length for chunk in absent))
        return [outcomes[chunk.key] for chunk in chunks]

    async def remove(self, keys: Sequence[ChunkKey], source: int, reason: RemovalReason) -> None:
        """Remove READY chunks from any tier for another reason than eviction."""
        if source == self._memory.index:
            self._hierarchy.drop(keys, reason)
        else:
            await self.delete(Evict(keys=keys, tier=source), Transfer(source, None, keys), reason)

    async def delete(
        self, event: Evict, transfer: Transfer, reason: RemovalReason = RemovalReason.EVICTED
    ) -> None:
        """Remove chunks that are READY in a lower tier."""
        hierarchy = self._hierarchy
        held = [key for key in transfer.keys if transfer.source in hierarchy.catalog.tiers(key)]
        hierarchy.counts["evicted"] += len(held)
        hierarchy.counts["not_admitted"] += 0 if transfer.admitted else len(held)
        # Notify before the delete: by the time it has finished, the chunks may have been stored again.
        hierarchy.changed(transfer.source, removed=held)
        with hierarchy.reporting(event, Transfer(transfer.source, None, held)) as outcomes:
            await hierarchy.tier(transfer.source).delete(held, reason)
            outcomes += [Outcome.OK] * len(held)
