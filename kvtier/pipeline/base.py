"""State shared by all pipeline stages: tiers, catalog, arena and observers."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from anyio.abc import TaskGroup

from kvtier.backends.base import Outcome
from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import RemovalReason
from kvtier.events import Event, Observer, Report
from kvtier.logs import RateLimitedLogs
from kvtier.memory.header import parent_and_block_tags
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease
from kvtier.tiers.encoder import Layouts
from kvtier.tiers.host_memory import HostMemory
from kvtier.tiers.level import ChunkBytes, Level
from kvtier.tiers.router import Router, Transfer
from kvtier.tiers.tier import Tier

logger = logging.getLogger("kvtier")


@dataclass
class Hierarchy:
    """Host memory and the tiers below it, and the operations that involve several of them."""

    memory: HostMemory
    lower: Sequence[Tier]
    """The tiers below host memory, fastest first."""
    catalog: Catalog
    router: Router
    tasks: TaskGroup
    observers: list[Observer]
    layouts: Layouts
    """The layouts of the models in use, for codecs."""
    counts: Counter[str] = field(default_factory=Counter)
    """Outcomes since the start, for the status report."""

    def __post_init__(self) -> None:
        self.tiers: Sequence[Level] = [self.memory, *self.lower]
        self._warn = RateLimitedLogs(logger)
        self.memory.sealer.on_corrupt = self.discard_corrupt

    def tier(self, index: int) -> Tier:
        """Return a tier below host memory."""
        return self.lower[index - 1]

    def warn(self, kind: str, message: str, *args: object) -> None:
        """Log an unexpected miss, at most once a minute per kind, with the number of suppressed ones."""
        self._warn(kind, message, *args)

    def adopt(self, chunks: Sequence[ChunkBytes]) -> None:
        """Make complete chunks READY in memory, which takes over the leases. Drop those cleared meanwhile."""
        stored = []
        for key, lease, generation in chunks:
            if self.catalog.generation(key) != generation:
                self.abort([key], self.memory.index)
                lease.release()
                continue
            if not self.catalog.partial_matches.has(key):
                self.catalog.partial_matches.set(key, *parent_and_block_tags(lease.view))
            self.memory.adopt(key, lease)
            stored.append(key)
        self.changed(self.memory.index, stored=stored)

    def drop(self, keys: Sequence[ChunkKey], reason: RemovalReason = RemovalReason.EVICTED) -> None:
        """Remove READY chunks from memory, which is freed with the last lease."""
        self.memory.drop(keys, reason)
        self.changed(self.memory.index, removed=keys)

    def discard_corrupt(self, key: ChunkKey, chunk: memoryview) -> None:
        """Drop a chunk whose header is corrupt, if ``chunk`` is the copy in memory."""
        if self.memory.holds_at(key, chunk):
            self.drop([key], RemovalReason.LOST)

    def settle_put(self, tier: int, chunks: Sequence[ChunkBytes], outcomes: Sequence[Outcome]) -> None:
        """Update the catalog with the outcomes for chunks that were PENDING in a lower tier."""
        stored = []
        for (key, _, generation), outcome in zip(chunks, outcomes, strict=True):
            self.counts[f"put_{outcome.value}"] += 1
            if outcome is not Outcome.OK:
                self.abort([key], tier)
            elif self.catalog.generation(key) != generation:
                self.tasks.start_soon(self.tier(tier).delete, [key], RemovalReason.CLEARED)
            else:
                self.catalog.set_ready(key, tier)
                stored.append(key)
        self.changed(tier, stored=stored)

    def abort(self, keys: Sequence[ChunkKey], tier: int) -> None:
        """Remove PENDING chunks that did not arrive."""
        self.catalog.remove_all(keys, tier, RemovalReason.ABORTED)

    def changed(
        self, tier: int, *, stored: Sequence[ChunkKey] = (), removed: Sequence[ChunkKey] = ()
    ) -> None:
        """Notify the observers of chunks that a tier has gained or lost."""
        if stored or removed:
            for observer in self.observers:
                observer.changed(tier, stored, removed)

    def length(self, key: ChunkKey) -> int:
        """Return the size of a chunk object; 0 if no tier holds it any more."""
        return self.catalog.length(key) if key in self.catalog else 0

    def name(self, tier: int | None) -> str | None:
        """Return the tier's name in the settings."""
        return None if tier is None else self.tiers[tier].name

    def begin_write(
        self, target: int, chunks: Sequence[ChunkBytes]
    ) -> tuple[dict[ChunkKey, Outcome], list[ChunkBytes]]:
        """Make chunks PENDING in a lower tier, and return those to pass to :meth:`write`. Evicts nothing.

        Takes over the leases, and also returns the outcomes. A chunk that is already READY or PENDING there
        is OK without another write. A chunk that has been cleared since it was leased, and perhaps stored
        again by a model with other weights, is a MISS.
        """
        result = {chunk.key: Outcome.OK for chunk in chunks}
        absent: dict[ChunkKey, ChunkBytes] = {}
        full = incoming = 0
        for chunk in chunks:
            if chunk.key in absent or self.catalog.state(chunk.key, target) is not State.ABSENT:
                chunk.lease.release()
            elif self.catalog.generation(chunk.key) != chunk.generation:
                chunk.lease.release()
                result[chunk.key] = Outcome.MISS
                self.counts["put_miss"] += 1
            elif not self.tiers[target].fits(incoming + chunk.lease.length):
                chunk.lease.release()
                result[chunk.key] = Outcome.FULL
                self.counts["put_full"] += 1
                full += 1
            else:
                incoming += chunk.lease.length
                absent[chunk.key] = chunk
        self.catalog.add_copies(list(absent), target)
        if full:
            name, message = self.name(target), "tier %s: no room for %d of %d chunks; they are dropped"
            self.warn(f"full {name}", message, name, full, len(chunks))
        return result, list(absent.values())

    async def write(self, event: Event, target: int, chunks: Sequence[ChunkBytes]) -> Sequence[Outcome]:
        """Write a batch of chunks that are PENDING in a lower tier. Takes over the leases."""
        keys = [chunk.key for chunk in chunks]
        with self.reporting(event, Transfer(self.memory.index, target, keys)) as outcomes:
            settle = partial(self.settle_put, target)
            outcomes += await self.tier(target).put(chunks, settle, event.priority)
        return outcomes

    async def leased(
        self, event: Event, source: int, keys: Sequence[ChunkKey], allocate: Callable[[int], Lease | None]
    ) -> list[ChunkBytes]:
        """Return leases on chunks of any tier, to be written to another one.

        Chunks of a lower tier are copied into the arena, outside the catalog. Omits chunks that fail, and
        keys that the tier does not hold: they may have been removed meanwhile.
        """
        if source == self.memory.index:
            return self.memory.lease_ready(keys)
        held = [key for key in keys if self.catalog.state(key, source) is State.READY]
        room = ((key, allocate(self.catalog.length(key))) for key in held)
        chunks = [
            ChunkBytes(key, lease, self.catalog.generation(key)) for key, lease in room if lease is not None
        ]
        mine = [chunk._replace(lease=chunk.lease.share()) for chunk in chunks]
        transfer = Transfer(source, self.memory.index, [chunk.key for chunk in chunks])
        outcomes: Sequence[Outcome] = [Outcome.FAILED] * len(mine)
        try:
            with self.reporting(event, transfer) as reported:
                outcomes = await self.tier(source).get(
                    chunks, partial(self._remove_misses, source), event.priority
                )
                reported += outcomes
        finally:
            for chunk, outcome in zip(mine, outcomes, strict=True):
                if outcome is not Outcome.OK:
                    chunk.lease.release()
        return [chunk for chunk, outcome in zip(mine, outcomes, strict=True) if outcome is Outcome.OK]

    def _remove_misses(self, source: int, chunks: Sequence[ChunkBytes], outcomes: Sequence[Outcome]) -> None:
        """Remove from the catalog the chunks that a tier turned out not to hold."""
        missing = [
            key
            for (key, *_), outcome in zip(chunks, outcomes, strict=True)
            if outcome is Outcome.MISS and source in self.catalog.tiers(key)
        ]
        self.catalog.remove_all(missing, source, RemovalReason.LOST)
        self.changed(source, removed=missing)

    @contextmanager
    def reporting(self, event: Event, transfer: Transfer) -> Iterator[list[Outcome]]:
        """Time a transfer, and report it with the outcomes that the caller appends to the list."""
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
