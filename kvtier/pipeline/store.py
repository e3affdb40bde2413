"""Store: reserve a chunk in the arena, commit it once the engine has filled it, write it to lower tiers.

Never makes an engine wait. If the arena or a tier's queue has no room, the chunk is dropped and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio
from anyio.lowlevel import checkpoint

from kvtier.catalog.eviction import IncomingPrompt
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.tenants import EvictionScope
from kvtier.events import Event, Evict, Store
from kvtier.memory.header import ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease, Leases
from kvtier.pipeline.base import Hierarchy
from kvtier.pipeline.evict import EvictStage
from kvtier.pipeline.room import may_decline
from kvtier.tiers.batches import batch_size, concurrently
from kvtier.tiers.host_memory import chains_of
from kvtier.tiers.level import ChunkBytes
from kvtier.tiers.router import Transfer
from kvtier.units import format_size


@dataclass(slots=True)
class Reservation:
    """Memory in the arena for one chunk that an engine is about to fill."""

    header: ChunkHeader
    lease: Lease
    generation: int = 0
    """The chunk's generation in the catalog; see :class:`ChunkBytes`."""


MAX_OVERFLOW_KEYS = 100_000
MAX_DECLINED = 4096
"""Chunks to remember because what continues them is declined as well."""
ADMITTED_AT_ONCE = 64
"""Chunks to queue before other tasks run. About 0.3 ms."""


@dataclass
class WriteQueue:
    """Chunks that are queued for one tier. Bounded, because they keep the arena's memory leased.

    Chunks beyond the bound go to ``overflow`` by key, and are written later if memory still holds them.
    """

    capacity_bytes: int
    overflow: deque[ChunkKey] = field(default_factory=deque)
    chunks: deque[tuple[Event, ChunkBytes]] = field(default_factory=deque)
    queued_bytes: int = 0
    writing_bytes: int = 0
    wake: anyio.Event = field(default_factory=anyio.Event)

    @property
    def pending_bytes(self) -> int:
        """Bytes that are queued or being written."""
        return self.queued_bytes + self.writing_bytes

    def offer(self, event: Event, chunk: ChunkBytes) -> bool:
        """Queue a chunk and take over its lease, or return ``False`` if the queue is full."""
        if self.queued_bytes + chunk.lease.length > self.capacity_bytes:
            return False
        self.push(event, chunk)
        return True

    def push(self, event: Event, chunk: ChunkBytes) -> None:
        """Queue a chunk and take over its lease, regardless of the capacity."""
        self.chunks.append((event, chunk))
        self.queued_bytes += chunk.lease.length
        self.wake.set()

    def take(self) -> tuple[Event, list[ChunkBytes]]:
        """Remove and return the first batch, which counts as being written."""
        event = self.chunks[0][0]
        size = batch_size(chunk.lease.length for _, chunk in self.chunks)
        batch = [self.chunks.popleft()[1] for _ in range(size)]
        taken = sum(chunk.lease.length for chunk in batch)
        self.queued_bytes -= taken
        self.writing_bytes += taken
        return event, batch

    async def wait(self) -> None:
        """Wait until there are chunks."""
        while not self.chunks:
            if self.wake.is_set():
                self.wake = anyio.Event()
            await self.wake.wait()


class StoreStage:
    """Accepts chunks from engines and writes them to lower tiers."""

    def __init__(self, hierarchy: Hierarchy, evicting: EvictStage, queue_bytes: Mapping[int, int]) -> None:
        """``queue_bytes``: capacity of the write queue of each lower tier, by its index."""
        self._hierarchy = hierarchy
        self._memory = hierarchy.memory
        self._evicting = evicting
        self._declined: dict[ChunkKey, None] = {}
        """The last chunks of declined prompts, the oldest first: what continues them would be useless."""
        self._queues = {tier: WriteQueue(capacity) for tier, capacity in queue_bytes.items()}

    def reserve_all(
        self,
        headers: Sequence[ChunkHeader],
        hints: Sequence[ChunkHints | None] = (),
        *,
        declining: bool = False,
    ) -> list[Reservation | None]:
        """Reserve memory for chunks of one namespace. ``None`` for those READY or PENDING, or without room.

        After the first chunk that does not fit, no others are tried: later chunks of the prompt would be
        useless without it, and the search for victims is expensive. ``declining``: the eviction policy of a
        single tier may decline chunks, see :meth:`EvictionPolicy.victims_for`. The other prompts are tried.
        """
        hierarchy = self._hierarchy
        keys = [header.key for header in headers]
        absent = self._memory.absent(keys)
        if len({keys[at] for at in absent}) < len(absent):  # Two requests store the same chunk.
            absent = sorted({keys[at]: at for at in reversed(absent)}.values())
        hierarchy.counts["store_known"] += len(headers) - len(absent)
        missing = [headers[at] for at in absent]
        hints = [hints[at] for at in absent] if hints else []
        if declining and may_decline(hierarchy.tiers):
            taken, leases, left = self._allocate_unless_declined(missing, hints)
        else:
            lengths = [object_bytes(header.payload_bytes) for header in missing]
            leases, left = self._evicting.allocate_all(lengths), iter(())
            taken = list(range(len(leases)))
            if len(leases) < len(absent):
                self._count_dropped(lengths[len(leases) :])
        reservations: list[Reservation | None] = [None] * len(headers)
        hints = [hints[at] for at in taken] if hints else []
        generations = self._memory.begin([missing[at] for at in taken], leases, hints)
        for at, lease, generation in zip(taken, leases, generations, strict=True):
            reservations[absent[at]] = Reservation(missing[at], lease, generation)
        for rest in left:
            hierarchy.catalog.decline(self._memory.index, rest)
        return reservations

    def _allocate_unless_declined(
        self, headers: Sequence[ChunkHeader], hints: Sequence[ChunkHints | None]
    ) -> tuple[list[int], list[Lease], Iterator[IncomingPrompt]]:
        """Return the positions of the chunks that get room, their leases, and those without room by prompt.

        The latter are evaluated lazily, once the former are in the catalog: their parents are among them.
        """
        taken, leases, left = list[int](), list[Lease](), list[slice]()
        hints = hints or [None] * len(headers)
        keys, parents = [header.key for header in headers], [header.parent for header in headers]
        lengths = [object_bytes(header.payload_bytes) for header in headers]

        def prompt_of(run: slice) -> IncomingPrompt:
            at = run.start
            return self._hierarchy.catalog.incoming_prompt(keys[run], lengths[run], parents[at], hints[at])

        for start, stop in chains_of(keys, parents, hints):
            found, declined = list[Lease](), self._continues_declined(parents[start])
            if not declined:
                found, declined = self._evicting.allocate_for(prompt_of(slice(start, stop)))
            fits = start + len(found)
            taken += range(start, fits)
            leases += found
            for key in keys[start:fits] if self._declined else ():
                self._declined.pop(key, None)
            if fits == stop:
                continue
            left.append(slice(fits, stop))
            if not declined:
                self._count_dropped(lengths[fits:])
                break
            self._hierarchy.counts["store_declined"] += stop - fits
            # The last chunk may be the partial one at the end of a prompt, which the next whole one replaces.
            self._declined.update(dict.fromkeys(keys[max(fits, stop - 2) : stop]))
            while len(self._declined) > MAX_DECLINED:
                del self._declined[next(iter(self._declined))]
        return taken, leases, map(prompt_of, left)

    def _continues_declined(self, parent: ChunkKey) -> bool:
        """Whether a chunk was declined, and is not held: those that continue it would be useless."""
        return parent in self._declined and parent not in self._hierarchy.catalog

    def _count_dropped(self, lengths: Sequence[int]) -> None:
        """Count and log chunks that an engine cannot store."""
        hierarchy = self._hierarchy
        hierarchy.counts["store_dropped"] += len(lengths)
        message = "tier %s: no room to store %s (%d chunks); they are not cached"
        hierarchy.warn("store", message, self._memory.name, format_size(sum(lengths)), len(lengths))

    def void(self, reservations: Sequence[Reservation]) -> None:
        """Abort reservations that will not be filled. Their memory stays leased."""
        if not reservations:
            return
        self._hierarchy.abort([reservation.header.key for reservation in reservations], self._memory.index)
        self._hierarchy.counts["store_aborted"] += len(reservations)

    def abandon(self, reservations: Sequence[Reservation]) -> None:
        """Abort reservations that will not be filled, and free their memory."""
        self.void(reservations)
        Leases.of([reservation.lease for reservation in reservations]).release_all()

    def commit(self, reservations: Sequence[Reservation], *, pushed: bool = False) -> None:
        """Make filled chunks READY in the first tier, and queue them for the write-through tiers.

        ``pushed``: by a peer, for a request that will look them up.
        """
        chunks = [ChunkBytes(filled.header.key, filled.lease, filled.generation) for filled in reservations]
        self._hierarchy.adopt(chunks)
        self._hierarchy.counts["stored"] += len(chunks)
        router, event = self._hierarchy.router, Store(keys=[chunk.key for chunk in chunks])
        (router.admission.pushed if pushed else router.admission.stored)(event.keys)
        self._queue(event, router.store(event))

    def used(self, rows: Sequence[int]) -> None:
        """Count a use of chunks, given their rows. Queue those that lower tiers admit only now."""
        if again := self._hierarchy.router.admission.used(rows):
            self.admit(self._hierarchy.catalog.columns.keys_of(again))

    def admit(self, keys: Sequence[ChunkKey]) -> None:
        """Queue chunks of the first tier for the tiers that did not admit them before. Returns at once."""
        self._hierarchy.tasks.start_soon(self._queue_later, keys)

    async def _queue_later(self, keys: Sequence[ChunkKey]) -> None:
        for start in range(0, len(keys), ADMITTED_AT_ONCE):
            event = Store(keys=keys[start : start + ADMITTED_AT_ONCE])
            self._queue(event, self._hierarchy.router.store_later(event))
            await checkpoint()

    def _queue(self, event: Store, plan: Sequence[Transfer]) -> None:
        """Queue chunks of the first tier for lower ones."""
        for transfer in plan:
            if transfer.target is not None:
                self._offer(transfer.target, event, transfer.keys)

    def _offer(self, tier: int, event: Event, keys: Sequence[ChunkKey]) -> None:
        queue, name = self._queues[tier], self._hierarchy.name(tier)
        for chunk in self._memory.lease_ready(keys):
            if queue.offer(event, chunk):
                continue
            chunk.lease.release()
            if len(queue.overflow) < MAX_OVERFLOW_KEYS:
                queue.overflow.append(chunk.key)
                self._hierarchy.counts["write_deferred"] += 1
            else:
                self._hierarchy.counts["write_dropped"] += 1
                message = "tier %s: write backlog is full (%d chunks); further chunks are dropped"
                self._hierarchy.warn(f"dropped {name}", message, name, MAX_OVERFLOW_KEYS)

    def _refill(self, queue: WriteQueue) -> None:
        """Move chunks from the overflow to an empty queue."""
        event = Store(keys=())
        while queue.overflow and queue.queued_bytes < queue.capacity_bytes // 2:
            for chunk in self._memory.lease_ready([queue.overflow.popleft()]):
                queue.push(event, chunk)

    async def run(self, tier: int) -> None:
        """Write the chunks queued for one tier, while the cache is open."""
        await concurrently(partial(self._write_queued, tier, self._queues[tier]))

    async def _write_queued(self, tier: int, queue: WriteQueue) -> None:
        while True:
            await queue.wait()
            event, chunks = queue.take()
            length = sum(chunk.lease.length for chunk in chunks)
            await self._evicting.write(event, tier, chunks)
            queue.writing_bytes -= length
            if not queue.chunks:
                self._refill(queue)

    def flush(self) -> None:
        """Queue chunks that only memory holds, warmest first. For shutdown, after the last commit.

        As on eviction, those that no tier admits are dropped: what was used once is seldom worth a write.
        """
        hierarchy, memory = self._hierarchy, self._memory
        coldest = hierarchy.catalog.victims(memory.index, scope=EvictionScope.ANY)
        event = Evict(keys=coldest[::-1], tier=memory.index)
        for transfer in hierarchy.router.evict(event):
            if not transfer.admitted:
                hierarchy.counts["not_admitted"] += len(transfer.keys)
            if transfer.target is not None:
                for chunk in memory.lease_ready(transfer.keys):
                    self._queues[transfer.target].push(event, chunk)

    @property
    def pending_bytes(self) -> int:
        """Bytes that are not written to all their tiers yet."""
        return sum(queue.pending_bytes for queue in self._queues.values())
