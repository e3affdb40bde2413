"""Move: transfer chunks between tiers. The source drops them only once the target has them.

Gather: copy the chunks of one prompt into one tier, from all tiers and hosts that hold them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import groupby

import anyio

from kvtier.backends.base import Outcome
from kvtier.catalog.catalog import State
from kvtier.catalog.eviction import RemovalReason
from kvtier.concurrency.breaker import Backoff
from kvtier.events import Move
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease
from kvtier.pipeline.allocate import Allocator
from kvtier.pipeline.clear import ClearStage
from kvtier.pipeline.discover import Ask, DiscoverStage
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.query import Expected
from kvtier.pipeline.read import Reader
from kvtier.pipeline.write import Writer
from kvtier.settings import LocalTierSettings
from kvtier.tiers.batches import BATCH_BYTES
from kvtier.tiers.level import Level
from kvtier.tiers.tier import Tier

TIMEOUT_SECONDS = 2.0
"""Maximum time without a new chunk. Covers freeing memory and the response time of a peer."""
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.02, 0.25
STEP_BYTES = 16 * BATCH_BYTES
"""Bytes of chunks to look for, and to copy, before the next ones: several batches."""


@dataclass(frozen=True, slots=True)
class ChunkProvider:
    """A shared pool or a peer to fetch missing chunks from."""

    tier: Tier
    ask: Ask
    name: str
    """The name in messages."""


class MoveStage:
    """Executes moves between tiers of this host."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        allocator: Allocator,
        reader: Reader,
        writer: Writer,
        discovering: DiscoverStage,
        clearing: ClearStage,
    ) -> None:
        self.hierarchy = hierarchy
        self.allocator = allocator
        self.reader = reader
        self.writer = writer
        self.discovering = discovering
        self._clearing = clearing

    async def execute(self, event: Move) -> int:
        """Execute a move, and return how many of its chunks the target holds afterwards.

        The source keeps the chunks if this host cannot rely on what the target holds.
        """
        catalog = self.hierarchy.catalog
        for transfer in self.hierarchy.planner.move(event):
            if event.target == self.hierarchy.memory.index:
                await self.reader.promote(transfer.keys)
            else:
                await self.writer.copy(event, event.source, event.target, transfer.keys)
        held = [key for key in event.keys if catalog.state(key, event.target) is State.READY]
        if not event.copy and self.hierarchy.tiers[event.target].is_durable:
            moved = [key for key in held if catalog.state(key, event.source) is State.READY]
            await self._clearing.remove(moved, event.source, RemovalReason.MOVED)
        return len(held)


class Gathering:
    """Copies one prompt into one tier, batch by batch, from the first chunk on.

    Stops at the first chunk that is not found or finds no room, because later chunks are useless without it.
    Therefore later chunks never evict earlier ones. Starts with :meth:`run`.
    """

    def __init__(self, stage: MoveStage, keys: Sequence[ChunkKey], expected: Expected, target: int) -> None:
        self._stage = stage
        self._hierarchy = stage.hierarchy
        self._memory = stage.hierarchy.memory
        self._keys = keys
        self._expected = expected
        self._target = stage.hierarchy.tiers[target]
        self._promotes = target == self._memory.index
        self._step_bytes = min(STEP_BYTES, self._memory.arena.capacity // 4)
        self._kept: list[Lease] = []
        self._last_error = self._missing = ""
        self.reason: str | None = None
        """Why the gathering is incomplete, after :meth:`run` has returned."""
        self.transferred_bytes = 0
        """Bytes of chunks that were added to the target."""

    def held(self) -> list[ChunkKey]:
        """Return the chunks that the target holds now."""
        places = self._hierarchy.catalog.places(self._keys)
        bit = 1 << self._target.index
        return [key for key, (ready, _) in zip(self._keys, places, strict=True) if ready & bit]

    def is_incomplete(self) -> bool:
        """Return whether at least one chunk is not in any tier of this host."""
        return any(not self._is_here(key) for key in self._keys)

    async def run(self, provider: ChunkProvider | None = None) -> None:
        """Copy the missing chunks. Safe to cancel; chunks in flight may then still arrive.

        Raises what ``provider.ask`` raises.
        """
        if provider is None:
            self._missing = "no other tier of this instance holds the rest"
        elif not self._hierarchy.catalog.namespaces.is_reset(self._expected.namespace):
            self._missing = f"neither this instance nor {provider.name} holds the rest"
        else:
            provider = None
            self._missing = "this model was reset here, so chunks of other hosts are not trusted"
        try:
            await self._run(self._fitting_keys(), provider)
        finally:
            for lease in self._kept:
                lease.release()
            self._kept.clear()

    async def _run(self, keys: Sequence[ChunkKey], provider: ChunkProvider | None) -> None:
        at = self._keep_from(keys, 0)
        backoff, until = Backoff(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS), time.monotonic() + TIMEOUT_SECONDS
        while at < len(keys):
            self._last_error = ""
            batch = range(at, self._end_of_batch(at, len(keys)))
            absent = [index for index in batch if self._state(keys[index]) is not State.READY]
            may_retry = await self._bring(batch, provider)
            arrived = [index for index in absent if self._state(keys[index]) is State.READY]
            self.transferred_bytes += sum(self._expected.lengths[index] for index in arrived)
            before, at = at, self._keep_from(keys, at)
            if at > before:
                backoff.reset()
                until = time.monotonic() + TIMEOUT_SECONDS
            elif may_retry and time.monotonic() < until:
                await anyio.sleep(backoff.next())
            else:
                self.reason = self._last_error or f"tier {self._target.name} did not receive the rest in time"
                return

    def _fitting_keys(self) -> Sequence[ChunkKey]:
        """Return the leading chunks that fit into the target. More would not stay, or evict the first."""
        settings = self._target.settings
        if not isinstance(settings, LocalTierSettings):
            return self._keys  # A pool manages its own capacity.
        room = settings.capacity * settings.high_watermark
        for count, length in enumerate(self._expected.lengths):
            room -= length
            if room < 0:
                self.reason = _no_room(self._target)
                return self._keys[:count]
        return self._keys

    def _keep_from(self, keys: Sequence[ChunkKey], at: int) -> int:
        """Return the index of the first chunk from ``at`` on that is missing. Leases those before it."""
        while at < len(keys) and self._state(keys[at]) is State.READY:
            lease = self._memory.lease(keys[at]) if self._promotes else None
            if lease is not None:
                self._kept.append(lease)
            at += 1
        return at

    def _end_of_batch(self, start: int, stop: int) -> int:
        room = self._step_bytes
        for index in range(start, stop):
            room -= self._expected.lengths[index]
            if room < 0 and index > start:
                return index
        return stop

    async def _bring(self, batch: range, provider: ChunkProvider | None) -> bool:
        """Try once to copy a batch. Return whether a retry can help."""
        async with self._provided(batch, provider):
            absent, complete = self._readable(batch)
            if absent and self._promotes:
                await self._promote(absent)
            elif absent:
                await self._write(absent)
        if absent or complete:
            return True
        self._last_error = self._last_error or self._missing
        return provider is not None

    @asynccontextmanager
    async def _provided(self, batch: range, provider: ChunkProvider | None) -> AsyncIterator[None]:
        """Add chunks of a batch that only the provider holds to the catalog, within the block."""
        unknown = [index for index in batch if not self._is_here(self._keys[index])]
        if provider is None or not unknown:
            yield
            return
        expected = Expected(self._expected.namespace, [self._expected.lengths[index] for index in unknown])
        keys = [self._keys[index] for index in unknown]
        async with self._stage.discovering.temporarily_known(provider.tier, keys, expected, provider.ask):
            yield

    def _readable(self, batch: range) -> tuple[list[ChunkKey], bool]:
        """Return the leading missing chunks of a batch that are readable, and whether these are all."""
        absent: list[ChunkKey] = []
        for index in batch:
            key = self._keys[index]
            if self._state(key) is not State.ABSENT:
                continue  # Held, or in flight.
            tiers = [self._hierarchy.tiers[tier] for tier in self._hierarchy.catalog.tiers(key)]
            if not any(tier.available for tier in tiers):
                if tiers:
                    self._last_error = f"tier {tiers[0].name} is currently unavailable"
                return absent, False
            absent.append(key)
        return absent, True

    async def _promote(self, keys: Sequence[ChunkKey]) -> None:
        failed_before = self._hierarchy.counts["prefetch_no_room"]
        await self._stage.reader.promote(keys)
        if self._hierarchy.counts["prefetch_no_room"] > failed_before:
            self._last_error = _no_room(self._target)

    async def _write(self, keys: Sequence[ChunkKey]) -> None:
        event = Move(keys=keys, source=self._memory.index, target=self._target.index, copy=True)
        for source, part in self._by_source(keys):
            outcomes = await self._stage.writer.copy(event, source, self._target.index, part, self._allocate)
            if Outcome.FULL in outcomes:
                self._last_error = _no_room(self._target)
            elif Outcome.FAILED in outcomes:
                self._last_error = f"tier {self._target.name} failed to write"

    def _by_source(self, keys: Sequence[ChunkKey]) -> Iterator[tuple[int, list[ChunkKey]]]:
        """Yield runs of chunks with the same source: memory if it holds them, else the cheapest tier."""
        memory = self._memory
        below = self._hierarchy.planner.sources(keys, [~(1 << self._target.index)] * len(keys))
        sources = [
            memory.index if memory.state(key) is State.READY else source
            for key, source in zip(keys, below, strict=True)
        ]
        for source, run in groupby(zip(sources, keys, strict=True), key=lambda pair: pair[0]):
            if source is not None:
                yield source, [key for _, key in run]

    def _allocate(self, length: int) -> Lease | None:
        lease = self._stage.allocator.allocate(length)
        if lease is None:
            self._last_error = _no_room(self._memory)
        return lease

    def _state(self, key: ChunkKey) -> State:
        return self._hierarchy.catalog.state(key, self._target.index)

    def _is_here(self, key: ChunkKey) -> bool:
        """Return whether the chunk is in a tier, or in flight to the target."""
        return bool(self._hierarchy.catalog.tiers(key)) or self._state(key) is not State.ABSENT


def _no_room(tier: Level) -> str:
    return f"tier {tier.name} has no room for the rest"
