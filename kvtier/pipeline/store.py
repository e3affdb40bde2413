"""Store: reserve a chunk in the arena, commit it once the engine has filled it, queue it for lower tiers.

Never makes an engine wait. If the arena or a tier's queue has no room, the chunk is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anyio.lowlevel import checkpoint

from kvtier.catalog.eviction import IncomingPrompt
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.misses import MissReason
from kvtier.catalog.tenants import EvictionScope
from kvtier.events import Evict, Store
from kvtier.memory.header import ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease, Leases
from kvtier.pipeline.allocate import Allocator
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.write import Writer
from kvtier.tiers.host_memory import Reservation, chains_of
from kvtier.tiers.level import may_decline
from kvtier.units import format_size

MAX_DECLINED = 4096
"""Chunks to remember because what extends them is declined as well."""
ADMITTED_AT_ONCE = 64
"""Chunks to queue before other tasks run. About 0.3 ms."""


class StoreStage:
    """Accepts chunks from engines."""

    def __init__(self, hierarchy: Hierarchy, allocator: Allocator, writer: Writer) -> None:
        self._hierarchy = hierarchy
        self._memory = hierarchy.memory
        self._allocator = allocator
        self._writer = writer
        self._declined: dict[ChunkKey, None] = {}
        """The last chunks of declined prompts, the oldest first: what extends them would be useless."""

    def reserve_all(
        self,
        headers: Sequence[ChunkHeader],
        hints: Sequence[ChunkHints | None] = (),
        *,
        declining: bool = False,
        again: bool = False,
    ) -> list[Reservation | None]:
        """Reserve memory for chunks of one namespace. ``None`` for those READY or PENDING, or without room.

        After the first chunk that does not fit, no others are tried: later chunks of the prompt would be
        useless without it, and the search for victims is expensive. ``declining``: the eviction policy of a
        single tier may decline chunks, see :meth:`EvictionPolicy.victims_for`. The other prompts are tried.
        ``again``: they were offered before. So the policy of any first tier may, and neither those held nor
        those without room count.
        """
        hierarchy = self._hierarchy
        if headers and not hierarchy.usable(headers[0].namespace) >> self._memory.index & 1:
            hierarchy.counts["store_quarantined"] += len(headers)
            keys = [header.key for header in headers]
            hierarchy.catalog.gone.note(keys, MissReason.QUARANTINED, self._memory.index)
            return [None] * len(headers)
        keys = [header.key for header in headers]
        absent = self._memory.absent(keys)
        if len({keys[at] for at in absent}) < len(absent):  # Two requests store the same chunk.
            absent = sorted({keys[at]: at for at in reversed(absent)}.values())
        hierarchy.counts["store_known"] += 0 if again else len(headers) - len(absent)
        missing = [headers[at] for at in absent]
        hints = [hints[at] for at in absent] if hints else []
        if again or (declining and may_decline(hierarchy.tiers)):
            taken, leases, left = self._allocate_unless_declined(missing, hints, again=again)
        else:
            lengths = [object_bytes(header.payload_bytes) for header in missing]
            leases, left = self._allocator.allocate_all(lengths), iter(())
            taken = list(range(len(leases)))
            if len(leases) < len(absent):
                self._count_dropped(missing[len(leases) :])
        reservations: list[Reservation | None] = [None] * len(headers)
        hints = [hints[at] for at in taken] if hints else []
        begun = self._memory.begin([missing[at] for at in taken], leases, hints)
        for at, reservation in zip(taken, begun, strict=True):
            reservations[absent[at]] = reservation
        for rest in left:
            hierarchy.catalog.decline(self._memory.index, rest)
        return reservations

    def _allocate_unless_declined(
        self, headers: Sequence[ChunkHeader], hints: Sequence[ChunkHints | None], *, again: bool
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
            found, declined = list[Lease](), self._extends_declined(parents[start])
            if not declined:
                found, declined = self._allocator.allocate_for(prompt_of(slice(start, stop)))
            fits = start + len(found)
            taken += range(start, fits)
            leases += found
            for key in keys[start:fits] if self._declined else ():
                self._declined.pop(key, None)
            if fits == stop:
                continue
            left.append(slice(fits, stop))
            if not declined:
                if not again:
                    self._count_dropped(headers[fits:])
                break
            # Of what is offered again, lower tiers may hold some.
            uncached = [key for key in keys[fits:stop] if key not in self._hierarchy.catalog]
            self._hierarchy.counts["store_declined"] += len(uncached)
            self._hierarchy.catalog.gone.note(uncached, MissReason.DECLINED, self._memory.index)
            # The last chunk may be the partial one at the end of a prompt, which the next whole one replaces.
            self._declined.update(dict.fromkeys(keys[max(fits, stop - 2) : stop]))
            while len(self._declined) > MAX_DECLINED:
                del self._declined[next(iter(self._declined))]
        return taken, leases, map(prompt_of, left)

    def _extends_declined(self, parent: ChunkKey) -> bool:
        """Whether a chunk was declined, and is not held: those that extend it would be useless."""
        return parent in self._declined and parent not in self._hierarchy.catalog

    def _count_dropped(self, headers: Sequence[ChunkHeader]) -> None:
        """Count and log chunks that an engine cannot store."""
        hierarchy, size = self._hierarchy, sum(object_bytes(header.payload_bytes) for header in headers)
        self.note_dropped([header.key for header in headers])
        message = "tier %s: no room to store %s (%d chunks); they are not cached"
        hierarchy.warn("store", message, self._memory.name, format_size(size), len(headers))

    def note_dropped(self, keys: Sequence[ChunkKey]) -> None:
        """Count chunks that an engine cannot store."""
        self._hierarchy.counts["store_dropped"] += len(keys)
        self._hierarchy.catalog.gone.note(keys, MissReason.STORE_FAILED, self._memory.index)

    def cancel(self, reservations: Sequence[Reservation]) -> None:
        """Cancel reservations that will not be filled. Their memory stays leased."""
        if reservations:
            self._memory.abort([reservation.key for reservation in reservations])
            self._hierarchy.counts["store_aborted"] += len(reservations)

    def abandon(self, reservations: Sequence[Reservation]) -> None:
        """Cancel reservations that will not be filled, and free their memory."""
        self.cancel(reservations)
        Leases.of([reservation.lease for reservation in reservations]).release_all()

    def commit(self, reservations: Sequence[Reservation], *, pushed: bool = False) -> None:
        """Make filled chunks READY in the first tier, and queue them for the write-through tiers.

        ``pushed``: by a peer, for a request that will look them up.
        """
        hierarchy, planner = self._hierarchy, self._hierarchy.planner
        hierarchy.changed(self._memory.index, stored=self._memory.adopt(reservations))
        hierarchy.counts["stored"] += len(reservations)
        event = Store(keys=[reservation.key for reservation in reservations])
        (planner.admission.pushed if pushed else planner.admission.stored)(event.keys)
        self._writer.queue(planner.store(event))
        for tier in hierarchy.lower:
            if tier.write == "through" and not tier.available:
                hierarchy.catalog.gone.note(event.keys, MissReason.STORE_FAILED, tier.index)

    def used(self, rows: Sequence[int]) -> None:
        """Count a use of chunks, given their rows. Queue those that lower tiers admit only now."""
        if again := self._hierarchy.planner.admission.used(rows):
            self.admit(self._hierarchy.catalog.columns.keys_of(again))

    def admit(self, keys: Sequence[ChunkKey]) -> None:
        """Queue chunks of the first tier for the tiers that did not admit them before. Returns at once."""
        self._hierarchy.tasks.start_soon(self._queue_later, keys)

    async def _queue_later(self, keys: Sequence[ChunkKey]) -> None:
        for start in range(0, len(keys), ADMITTED_AT_ONCE):
            event = Store(keys=keys[start : start + ADMITTED_AT_ONCE])
            self._writer.queue(self._hierarchy.planner.store_later(event))
            await checkpoint()

    def flush(self) -> None:
        """Queue chunks that only memory holds, warmest first. For shutdown, after the last commit.

        As on eviction, those that no tier admits are dropped: what was used once is seldom worth a write.
        """
        hierarchy, memory = self._hierarchy, self._memory
        coldest = hierarchy.catalog.victims(memory.index, scope=EvictionScope.ANY)
        plan = hierarchy.planner.evict(Evict(keys=coldest[::-1], tier=memory.index))
        for transfer in plan:
            if not transfer.admitted:
                hierarchy.counts["not_admitted"] += len(transfer.keys)
        self._writer.queue(plan, bounded=False)
