"""Write: the one way into a tier below memory, for new chunks, demotions and moves.

=========  ==============================================================================================
queue      new chunks wait for their tier, bounded, because they keep memory leased (:class:`WriteQueue`)
make room  the coldest chunks of the tier are demoted or deleted (:meth:`Writer.make_room`)
begin      the chunks become PENDING in the catalog, and count as used (:meth:`Writer._begin`)
put        the tier seals and stores them, within its deadline (:meth:`~kvtier.tiers.tier.Tier.put`)
settle     the catalog learns the outcome of each, even after the deadline (:meth:`Writer._settle`)
=========  ==============================================================================================
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio

from kvtier.backends.base import Outcome
from kvtier.catalog.catalog import State
from kvtier.catalog.eviction import RemovalReason
from kvtier.catalog.misses import MissReason
from kvtier.events import Event, Evict, Store
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.read import Allocate, Reader
from kvtier.tiers.batches import batch_size, concurrently, in_batches
from kvtier.tiers.level import ChunkBytes
from kvtier.tiers.planner import Transfer
from kvtier.units import format_size

MAX_OVERFLOW_KEYS = 100_000


@dataclass
class WriteQueue:
    """Chunks that are queued for one tier. Bounded, because they keep the arena's memory leased.

    Chunks beyond the bound go to ``overflow`` by key, and are written later if memory still holds them.
    """

    capacity_bytes: int
    overflow: deque[ChunkKey] = field(default_factory=deque)
    chunks: deque[ChunkBytes] = field(default_factory=deque)
    queued_bytes: int = 0
    writing_bytes: int = 0
    wake: anyio.Event = field(default_factory=anyio.Event)

    @property
    def pending_bytes(self) -> int:
        """Bytes that are queued or being written."""
        return self.queued_bytes + self.writing_bytes

    def offer(self, chunk: ChunkBytes) -> bool:
        """Queue a chunk and take over its lease, or return ``False`` if the queue is full."""
        if self.queued_bytes + chunk.lease.length > self.capacity_bytes:
            return False
        self.push(chunk)
        return True

    def push(self, chunk: ChunkBytes) -> None:
        """Queue a chunk and take over its lease, regardless of the capacity."""
        self.chunks.append(chunk)
        self.queued_bytes += chunk.lease.length
        self.wake.set()

    async def take(self) -> list[ChunkBytes]:
        """Wait for chunks. Remove and return the first batch, which counts as being written."""
        while not self.chunks:
            if self.wake.is_set():
                self.wake = anyio.Event()
            await self.wake.wait()
        size = batch_size(chunk.lease.length for chunk in self.chunks)
        batch = [self.chunks.popleft() for _ in range(size)]
        taken = sum(chunk.lease.length for chunk in batch)
        self.queued_bytes -= taken
        self.writing_bytes += taken
        return batch


class Writer:
    """Writes chunk objects to the tiers below memory, and makes room there."""

    def __init__(self, hierarchy: Hierarchy, reader: Reader, queue_bytes: Mapping[int, int]) -> None:
        """``queue_bytes``: capacity of the write queue of each lower tier, by its index."""
        self._hierarchy = hierarchy
        self._memory = hierarchy.memory
        self._reader = reader
        self._queues = {tier: WriteQueue(capacity) for tier, capacity in queue_bytes.items()}
        self._making_room: defaultdict[int, anyio.Lock] = defaultdict(anyio.Lock)
        self._copying_bytes = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes that are queued or being written, without moves from one lower tier to another."""
        return self._copying_bytes + sum(queue.pending_bytes for queue in self._queues.values())

    # 1. Queue.

    def queue(self, plan: Sequence[Transfer], *, bounded: bool = True) -> None:
        """Queue chunks of the first tier for lower ones. Does not wait.

        Unless ``bounded``, however many they are, which only a shutdown may do.
        """
        for transfer in plan:
            if transfer.target is not None:
                queue = self._queues[transfer.target]
                for chunk in self._memory.lease_ready(transfer.keys):
                    if not bounded:
                        queue.push(chunk)
                    elif not queue.offer(chunk):
                        chunk.lease.release()
                        self._defer(transfer.target, chunk.key)

    def _defer(self, tier: int, key: ChunkKey) -> None:
        """Remember a chunk for which the queue has no room."""
        overflow, name = self._queues[tier].overflow, self._hierarchy.tiers[tier].name
        self._hierarchy.catalog.gone.note([key], MissReason.STORE_FAILED, tier)
        if len(overflow) < MAX_OVERFLOW_KEYS:
            overflow.append(key)
            self._hierarchy.counts["write_deferred"] += 1
        else:
            self._hierarchy.counts["write_dropped"] += 1
            message = "tier %s: write backlog is full (%d chunks); further chunks are dropped"
            self._hierarchy.warn(f"dropped {name}", message, name, MAX_OVERFLOW_KEYS)

    async def run(self, tier: int) -> None:
        """Write the chunks queued for one tier, while the cache is open."""
        await concurrently(partial(self._write_queued, tier, self._queues[tier]))

    async def _write_queued(self, tier: int, queue: WriteQueue) -> None:
        while True:
            chunks = await queue.take()
            length = sum(chunk.lease.length for chunk in chunks)
            await self.write(Store(keys=[chunk.key for chunk in chunks]), tier, chunks)
            queue.writing_bytes -= length
            # New chunks first: they are more likely to be used than deferred ones.
            if not queue.chunks:
                self._refill(queue)

    def _refill(self, queue: WriteQueue) -> None:
        """Move deferred chunks that memory still holds to the queue, up to half of its capacity."""
        while queue.overflow and queue.queued_bytes < queue.capacity_bytes // 2:
            for chunk in self._memory.lease_ready([queue.overflow.popleft()]):
                queue.push(chunk)

    # 2. Write: make room, begin, put, settle.

    async def write(self, event: Event, target: int, chunks: Sequence[ChunkBytes]) -> Sequence[Outcome]:
        """Write a batch of leased chunk objects to a lower tier. Takes over the leases.

        A chunk that is already READY or PENDING there is OK without another write. One that has been cleared
        since it was leased, and perhaps stored again by a model with other weights, is a MISS, and so is one
        that is in quarantine there.
        """
        hierarchy = self._hierarchy
        try:
            # Until the chunks are in the catalog, other writes would take the room that was made for them.
            async with self._making_room[target]:
                await self.make_room(target, sum(chunk.lease.length for chunk in chunks))
                outcomes, absent = self._begin(target, chunks)
        except BaseException:
            for chunk in chunks:
                chunk.lease.release()
            raise
        keys, incoming = [chunk.key for chunk in absent], sum(chunk.lease.length for chunk in absent)
        with hierarchy.reporting(event, Transfer(self._memory.index, target, keys)) as written:
            written += await hierarchy.tier(target).put(absent, partial(self._settle, target), event.priority)
        outcomes.update(zip(keys, written, strict=True))
        if hierarchy.tiers[target].over_maximum_bytes:
            async with self._making_room[target]:
                await self._evict_over_maximum(target, incoming)
        return [outcomes[chunk.key] for chunk in chunks]

    async def make_room(self, tier: int, incoming: int) -> None:
        """Evict the coldest chunks of a lower tier until ``incoming`` more bytes fit below its watermark.

        For a shared pool, only removes the coldest chunks from the catalog: other hosts use them, too.
        """
        target = self._hierarchy.tiers[tier]
        if over := target.over_limit():
            self._hierarchy.catalog.remove_all(over, tier)
        await self._evict(Evict(keys=target.victims_for(incoming), tier=tier))
        await self._evict_over_maximum(tier, incoming)

    async def _evict_over_maximum(self, tier: int, incoming: int) -> None:
        """Evict chunks of tenants that exceed their maximum in a lower tier."""
        keys = self._hierarchy.tiers[tier].victims_over_maximum(incoming)
        await self._evict(Evict(keys=keys, tier=tier))

    async def _evict(self, event: Evict) -> None:
        for transfer in self._hierarchy.planner.evict(event):
            if transfer.target is not None:
                await self.demote(event, transfer)
            await self.delete(event, transfer)

    def _begin(
        self, target: int, chunks: Sequence[ChunkBytes]
    ) -> tuple[dict[ChunkKey, Outcome], list[ChunkBytes]]:
        """Make chunks PENDING. Return those to write, and the outcomes of the others, whose leases end.

        Evicts nothing: of what does not fit after :meth:`make_room`, all chunks are in use.
        """
        hierarchy, catalog, tier = self._hierarchy, self._hierarchy.catalog, self._hierarchy.tiers[target]
        outcomes = {chunk.key: Outcome.OK for chunk in chunks}
        absent: dict[ChunkKey, ChunkBytes] = {}
        incoming = dropped = 0
        for chunk in chunks:
            key, length = chunk.key, chunk.lease.length
            if key in absent or catalog.state(key, target) is not State.ABSENT:
                chunk.lease.release()
            elif catalog.generation(key) != chunk.generation or not hierarchy.usable_of([key]) >> target & 1:
                chunk.lease.release()
                outcomes[key] = Outcome.MISS
                hierarchy.counts["put_miss"] += 1
            elif not tier.fits(incoming + length):
                chunk.lease.release()
                outcomes[key] = Outcome.FULL
                dropped += length
                hierarchy.counts["put_full"] += 1
            else:
                incoming += length
                absent[key] = chunk
        catalog.add_copies(list(absent), target)
        if left := [key for key, outcome in outcomes.items() if outcome is Outcome.FULL]:
            catalog.gone.note(left, MissReason.STORE_FAILED, target)
            message = "tier %s: no room for %s (%d of %d chunks); they are dropped"
            size = format_size(dropped)
            hierarchy.warn(f"full {tier.name}", message, tier.name, size, len(left), len(chunks))
        return outcomes, list(absent.values())

    def _settle(self, target: int, chunks: Sequence[ChunkBytes], outcomes: Sequence[Outcome]) -> None:
        """Make chunks READY that the medium has stored, and remove the others."""
        hierarchy, catalog = self._hierarchy, self._hierarchy.catalog
        stored = []
        for chunk, outcome in zip(chunks, outcomes, strict=True):
            hierarchy.counts[f"put_{outcome.value}"] += 1
            if outcome is not Outcome.OK:
                catalog.remove_all([chunk.key], target, RemovalReason.ABORTED)
                # Once memory evicts it, no tier holds it.
                catalog.gone.note([chunk.key], MissReason.STORE_FAILED, target)
            elif catalog.generation(chunk.key) != chunk.generation:
                # It was cleared during the write, so the medium must not keep it.
                tier = hierarchy.tier(target)
                hierarchy.tasks.start_soon(tier.delete, [chunk.key], RemovalReason.CLEARED)
            else:
                catalog.set_ready(chunk.key, target)
                stored.append(chunk.key)
        hierarchy.changed(target, stored=stored)

    # From another tier.

    async def demote(self, event: Evict, transfer: Transfer) -> None:
        """Write chunks that would be lost to their demotion target."""
        assert transfer.target is not None
        outcomes = await self.copy(event, transfer.source, transfer.target, transfer.keys)
        self._hierarchy.counts["demoted"] += outcomes.count(Outcome.OK)

    async def copy(
        self,
        event: Event,
        source: int,
        target: int,
        keys: Sequence[ChunkKey],
        allocate: Allocate | None = None,
    ) -> Sequence[Outcome]:
        """Write chunks of ``source`` to a lower tier, batch by batch. Return the outcomes of those read.

        ``allocate``: see :meth:`Reader.lease`.
        """
        # A shutdown waits for what it may lose, but not for a long copy between lower tiers.
        may_be_lost = source == self._memory.index or isinstance(event, Evict)

        async def copy(batch: Sequence[ChunkKey]) -> Sequence[Outcome]:
            chunks = await self._reader.lease(event, source, batch, allocate)
            length = sum(chunk.lease.length for chunk in chunks) if may_be_lost else 0
            self._copying_bytes += length
            try:
                return await self.write(event, target, chunks)
            finally:
                self._copying_bytes -= length

        return await in_batches(copy, keys, self._hierarchy.length)

    # Delete.

    async def delete(
        self, event: Evict, transfer: Transfer, reason: RemovalReason = RemovalReason.EVICTED
    ) -> None:
        """Remove chunks that are READY in a lower tier."""
        hierarchy = self._hierarchy
        held = [key for key in transfer.keys if transfer.source in hierarchy.catalog.tiers(key)]
        hierarchy.counts["evicted"] += len(held) if reason is RemovalReason.EVICTED else 0
        hierarchy.counts["not_admitted"] += 0 if transfer.admitted else len(held)
        # Notify before the delete: by the time it has finished, the chunks may have been stored again.
        hierarchy.changed(transfer.source, removed=held)
        with hierarchy.reporting(event, Transfer(transfer.source, None, held)) as outcomes:
            await hierarchy.tier(transfer.source).delete(held, reason)
            outcomes += [Outcome.OK] * len(held)
