"""What every stage of the pipeline works on: the tiers, the catalog, the arena, and who is told."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from anyio.abc import TaskGroup

from kvtier.arena import address_of
from kvtier.backends.base import Outcome, SupportsArena, SupportsLeases
from kvtier.backends.logs import RareWarning
from kvtier.backends.sealer import Sealer
from kvtier.catalog import Catalog, State
from kvtier.events import Event, Observer, Report
from kvtier.keys import ChunkKey
from kvtier.router import FIRST, Router, Transfer
from kvtier.slices import Lease, Leases
from kvtier.tier import ChunkBytes, Tier

logger = logging.getLogger("kvtier")


@dataclass
class Hierarchy:
    """The tiers of one host in order, and all that is decided about them synchronously."""

    tiers: Sequence[Tier]
    catalog: Catalog
    router: Router
    memory: SupportsArena
    """The backend of the first tier: its arena is what engines copy to and from."""
    tasks: TaskGroup
    observers: list[Observer]
    sealer: Sealer = field(default_factory=Sealer)
    """Gives the chunks of the arena their checksums, whoever wants them."""
    counts: Counter[str] = field(default_factory=Counter)
    """Outcomes since the start, for the status report."""
    clearings: int = 0
    """How often chunks were cleared: what was lifted before must not be written after."""
    distrusted: set[bytes | None] = field(default_factory=set)
    """Namespaces that were cleared, ``None`` for all: what others left of them in pools is not asked for."""
    unwanted: defaultdict[int, set[ChunkKey]] = field(default_factory=lambda: defaultdict(set))
    """By tier: chunks that were cleared while they were on their way in, to be dropped on arrival."""

    def __post_init__(self) -> None:
        memory = self.memory
        self._warnings: dict[str, RareWarning] = {}
        self.sealer.on_corrupt = self.discard_corrupt
        # Found out once: such a question takes as long as a third of the leases themselves.
        self._lease_all = memory.lease_all if isinstance(memory, SupportsLeases) else self._lease_each

    def warn(self, kind: str, message: str, *args: object) -> None:
        """Log an unexpected miss: each kind at most once a minute, with the number of the others."""
        if kind not in self._warnings:
            self._warnings[kind] = RareWarning(logger)
        self._warnings[kind](message, *args)

    def share(self, key: ChunkKey) -> Lease | None:
        """A lease on a chunk that is READY in the first tier."""
        if self.catalog.state(key, FIRST) is not State.READY:
            return None
        return self.memory.lease(key)

    def lease_all(self, keys: Sequence[ChunkKey]) -> Leases:
        """Leases on chunks that are READY in the first tier, up to the first that is not there after all."""
        return self._lease_all(keys)

    def _lease_each(self, keys: Sequence[ChunkKey]) -> Leases:
        leases = takewhile(lambda lease: lease is not None, map(self.memory.lease, keys))
        return Leases.of([lease for lease in leases if lease is not None])

    def shares(self, keys: Sequence[ChunkKey]) -> list[ChunkBytes]:
        """Leases on those of ``keys`` that are READY in the first tier."""
        leased = ((key, self.share(key)) for key in keys)
        return [ChunkBytes(key, lease) for key, lease in leased if lease is not None]

    def still_held(self, source: int, chunks: Sequence[ChunkBytes], clearings: int) -> list[ChunkBytes]:
        """Those chunks that ``source`` still holds as they are leased; the leases of the others are released.

        Between leasing a chunk and writing it down it may have been cleared, and even stored anew by a
        model whose weights have changed. Of the arena the slice tells; of other tiers, that nothing at
        all was cleared since ``clearings`` was read.
        """
        held = []
        for chunk in chunks:
            if source != FIRST:
                same = clearings == self.clearings
            else:
                lease = self.share(chunk.key)
                same = lease is not None and lease.offset == chunk.lease.offset
                if lease is not None:
                    lease.release()
            if same:
                held.append(chunk)
            else:
                chunk.lease.release()
        return held

    def adopt(self, chunks: Sequence[ChunkBytes]) -> None:
        """Chunks are complete in the arena: the first tier holds them, and their leases, from now on."""
        stored = []
        for key, lease in chunks:
            if key in self.unwanted[FIRST]:
                self.forget(key, FIRST)
                lease.release()
                continue
            self.memory.adopt(key, lease)
            self.catalog.set_ready(key, FIRST)
            stored.append(key)
        self.changed(FIRST, stored=stored)

    def drop(self, keys: Sequence[ChunkKey]) -> None:
        """Take READY chunks out of the first tier. Bytes are freed with their last lease."""
        for key in keys:
            self.catalog.remove(key, FIRST)
            self.memory.discard(key)
        self.changed(FIRST, removed=keys)

    def discard_corrupt(self, key: ChunkKey, chunk: memoryview) -> None:
        """Drop a chunk whose header is corrupt, if ``chunk`` is the copy that the first tier holds."""
        lease = self.share(key)
        if lease is None:
            return
        same = address_of(lease.view) == address_of(chunk)
        lease.release()
        if same:
            self.drop([key])

    def settle_put(self, keys: Sequence[ChunkKey], tier: int, outcomes: Sequence[Outcome]) -> None:
        """Enter into the catalog what became of chunks that were PENDING in a lower tier."""
        stored = []
        for key, outcome in zip(keys, outcomes, strict=True):
            self.counts[f"put_{outcome.value}"] += 1
            if outcome is not Outcome.OK:
                self.forget(key, tier)
            elif key in self.unwanted[tier]:
                self.unwanted[tier].discard(key)
                self.tasks.start_soon(self.tiers[tier].delete, [key])
            else:
                self.catalog.set_ready(key, tier)
                stored.append(key)
        self.changed(tier, stored=stored)

    def forget(self, key: ChunkKey, tier: int) -> None:
        """A chunk that was PENDING in a tier did not get there."""
        self.catalog.remove(key, tier)
        self.unwanted[tier].discard(key)

    def forget_all(self, keys: Sequence[ChunkKey], tier: int) -> None:
        """As :meth:`forget` of each."""
        self.catalog.remove_all(keys, tier)
        self.unwanted[tier].difference_update(keys)

    def changed(
        self, tier: int, *, stored: Sequence[ChunkKey] = (), removed: Sequence[ChunkKey] = ()
    ) -> None:
        """Tell the observers what came into a tier or left it."""
        if stored or removed:
            for observer in self.observers:
                observer.changed(tier, stored, removed)

    def name(self, tier: int | None) -> str | None:
        """The tier's name in the settings."""
        return None if tier is None else self.tiers[tier].name

    async def write(self, event: Event, target: int, chunks: Sequence[ChunkBytes]) -> Sequence[Outcome]:
        """Put leased chunk objects into a lower tier that has room; takes over the leases.

        What is there already, or on its way, is OK without another write. What is corrupt, or has left every
        tier since it was leased, is a MISS.
        """
        keys = [chunk.key for chunk in chunks]
        verdict = dict.fromkeys(keys, Outcome.OK)
        absent: list[ChunkBytes] = []
        full = 0
        for chunk in chunks:
            if self.catalog.state(chunk.key, target) is not State.ABSENT:
                chunk.lease.release()
            elif chunk.key not in self.catalog:
                chunk.lease.release()
                verdict[chunk.key] = Outcome.MISS
                self.counts["put_miss"] += 1
            elif not self.tiers[target].fits(chunk.lease.length):
                chunk.lease.release()
                verdict[chunk.key] = Outcome.FULL
                self.counts["put_full"] += 1
                full += 1
            else:
                self.catalog.add(chunk.key, target, chunk.lease.length, State.PENDING)
                absent.append(chunk)
        if full:
            name, message = self.name(target), "tier %s: no room for %d of %d chunks; they are dropped"
            self.warn(f"full {name}", message, name, full, len(chunks))
        sent = [chunk.key for chunk in absent]
        with self.reporting(event, Transfer(FIRST, target, sent)) as outcomes:
            settle = partial(self.settle_put, sent, target)
            outcomes += await self.tiers[target].put(absent, settle)
        verdict.update(zip(sent, outcomes, strict=True))
        return [verdict[key] for key in keys]

    async def lift(
        self, event: Event, source: int, keys: Sequence[ChunkKey], allocate: Callable[[int], Lease | None]
    ) -> list[ChunkBytes]:
        """Leases on copies of chunks of a lower tier, outside the catalog; fewer where something failed.

        Keys that the tier does not hold are left out: they may have gone since they were chosen.
        """
        held = [key for key in keys if self.catalog.state(key, source) is State.READY]
        room = ((key, allocate(self.catalog.length(key))) for key in held)
        chunks = [ChunkBytes(key, lease) for key, lease in room if lease is not None]
        mine = [ChunkBytes(chunk.key, chunk.lease.share()) for chunk in chunks]
        transfer = Transfer(source, FIRST, [chunk.key for chunk in chunks])
        outcomes: Sequence[Outcome] = [Outcome.FAILED] * len(mine)
        try:
            with self.reporting(event, transfer) as told:
                outcomes = await self.tiers[source].get(chunks, partial(self._forget_misses, transfer))
                told += outcomes
        finally:
            for chunk, outcome in zip(mine, outcomes, strict=True):
                if outcome is not Outcome.OK:
                    chunk.lease.release()
        return [chunk for chunk, outcome in zip(mine, outcomes, strict=True) if outcome is Outcome.OK]

    def _forget_misses(self, transfer: Transfer, outcomes: Sequence[Outcome]) -> None:
        """Take out of the catalog what a tier has turned out not to hold."""
        missing = [
            key
            for key, outcome in zip(transfer.keys, outcomes, strict=True)
            if outcome is Outcome.MISS and transfer.source in self.catalog.tiers(key)
        ]
        for key in missing:
            self.catalog.remove(key, transfer.source)
        self.changed(transfer.source, removed=missing)

    @contextmanager
    def reporting(self, event: Event, transfer: Transfer) -> Iterator[list[Outcome]]:
        """Time a transfer and report the outcomes that the caller puts into the list."""
        started = time.monotonic()
        outcomes: list[Outcome] = []
        yield outcomes
        report = Report(
            event=event,
            source=self.name(transfer.source),
            target=self.name(transfer.target),
            keys=transfer.keys,
            outcomes=outcomes,
            transferred_bytes=sum(
                self.catalog.length(key)
                for key, outcome in zip(transfer.keys, outcomes, strict=True)
                if outcome is Outcome.OK and key in self.catalog
            ),
            seconds=time.monotonic() - started,
        )
        for observer in self.observers:
            observer.observe(report)
