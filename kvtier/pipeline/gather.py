"""Gather: bring the chunks of a prompt into one tier, from wherever they are."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import groupby

import anyio

from kvtier.backends.base import Outcome
from kvtier.catalog import State
from kvtier.events import Move
from kvtier.keys import ChunkKey
from kvtier.pipeline.base import Hierarchy
from kvtier.pipeline.discover import Ask, DiscoverStage, Expected
from kvtier.pipeline.evict import BATCH_BYTES, EvictStage
from kvtier.pipeline.move import MoveStage
from kvtier.router import FIRST
from kvtier.settings import LocalTierSettings
from kvtier.slices import Lease
from kvtier.tier import Tier

PATIENCE_SECONDS = 2.0
"""How long no further chunk may arrive: memory has to be freed, a peer to find the time to answer."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 0.25


@dataclass(frozen=True, slots=True)
class Lender:
    """A shared pool, or a peer, that is asked for what this host does not have."""

    tier: Tier
    ask: Ask
    name: str
    """In messages."""


class GatherStage:
    """Begins gatherings."""

    def __init__(
        self, hierarchy: Hierarchy, evicting: EvictStage, moving: MoveStage, discovering: DiscoverStage
    ) -> None:
        self.hierarchy = hierarchy
        self.evicting = evicting
        self.moving = moving
        self.discovering = discovering

    def begin(self, keys: Sequence[ChunkKey], expected: Expected, target: int) -> Gathering:
        """Of chunks of one prompt in prefix order. Nothing happens before :meth:`Gathering.run`."""
        return Gathering(self, keys, expected, target)


class Gathering:
    """One prompt on its way into one tier: batch after batch, from the first chunk on.

    It ends with the first chunk that is nowhere, or finds no room: what comes after is of no use without it.
    So nothing that was brought before has to go for what comes later.
    """

    def __init__(self, stage: GatherStage, keys: Sequence[ChunkKey], expected: Expected, target: int) -> None:
        self._stage = stage
        self._hierarchy = stage.hierarchy
        self._keys = keys
        self._expected = expected
        self._target = stage.hierarchy.tiers[target]
        self._batch_bytes = min(BATCH_BYTES, stage.hierarchy.memory.arena.capacity // 4)
        self._kept: list[Lease] = []
        self._trouble = self._missing = ""
        self.reason: str | None = None
        """Why not all of it is there, once :meth:`run` has ended."""
        self.transferred_bytes = 0
        """Of the chunks that were not there before."""

    def held(self) -> list[ChunkKey]:
        """Those of its chunks that the target holds now."""
        places = self._hierarchy.catalog.places(self._keys)
        bit = 1 << self._target.index
        return [key for key, (ready, _) in zip(self._keys, places, strict=True) if ready & bit]

    def lacking(self) -> bool:
        """Whether some chunk is in no tier of this host that can be read."""
        return any(not self._is_here(key) for key in self._keys)

    async def run(self, lender: Lender | None = None) -> None:
        """Bring what is elsewhere; may be cancelled at any time. What is under way then may still arrive.

        Raises what the lender's ``ask`` raises.
        """
        if lender is None:
            self._missing = "the rest is in no other tier of this instance"
        elif self._hierarchy.distrusted.isdisjoint((self._expected.namespace, None)):
            self._missing = f"the rest is neither here nor at {lender.name}"
        else:
            lender = None
            self._missing = "this model was reset here, so what other hosts hold of it is not trusted"
        try:
            await self._run(self._that_fit(), lender)
        finally:
            for lease in self._kept:
                lease.release()
            self._kept.clear()

    async def _run(self, keys: Sequence[ChunkKey], lender: Lender | None) -> None:
        at = self._keep_from(keys, 0)
        pause, until = FIRST_PAUSE_SECONDS, time.monotonic() + PATIENCE_SECONDS
        while at < len(keys):
            self._trouble = ""
            batch = range(at, self._end_of_batch(at, len(keys)))
            absent = [index for index in batch if self._state(keys[index]) is not State.READY]
            hopeful = await self._bring(batch, lender)
            arrived = [index for index in absent if self._state(keys[index]) is State.READY]
            self.transferred_bytes += sum(self._expected.lengths[index] for index in arrived)
            before, at = at, self._keep_from(keys, at)
            if at > before:
                pause, until = FIRST_PAUSE_SECONDS, time.monotonic() + PATIENCE_SECONDS
            elif hopeful and time.monotonic() < until:
                await anyio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            else:
                self.reason = self._trouble or f"tier {self._target.name} does not get the rest in time"
                return

    def _that_fit(self) -> Sequence[ChunkKey]:
        """Leading chunks that the target has room for at all: more would push out the first of them."""
        settings = self._target.settings
        if self._target.index == FIRST or not isinstance(settings, LocalTierSettings):
            return self._keys  # In memory those that have arrived are leased; a pool sees to itself.
        room = settings.capacity * settings.high_watermark
        for count, length in enumerate(self._expected.lengths):
            room -= length
            if room < 0:
                self.reason = _no_room(self._target)
                return self._keys[:count]
        return self._keys

    def _keep_from(self, keys: Sequence[ChunkKey], at: int) -> int:
        """The first chunk from ``at`` on that is not there. Those before it are not evicted from memory."""
        while at < len(keys) and self._state(keys[at]) is State.READY:
            lease = self._hierarchy.share(keys[at]) if self._target.index == FIRST else None
            if lease is not None:
                self._kept.append(lease)
            at += 1
        return at

    def _end_of_batch(self, start: int, stop: int) -> int:
        room = self._batch_bytes
        for index in range(start, stop):
            room -= self._expected.lengths[index]
            if room < 0 and index > start:
                return index
        return stop

    async def _bring(self, batch: range, lender: Lender | None) -> bool:
        """Try once to bring a batch; whether it is worth another try."""
        async with self._lent(batch, lender):
            absent, complete = self._readable(batch)
            if absent and self._target.index == FIRST:
                await self._raise(absent)
            elif absent:
                await self._write(absent)
        if absent or complete:
            return True
        self._trouble = self._trouble or self._missing
        return lender is not None

    @asynccontextmanager
    async def _lent(self, batch: range, lender: Lender | None) -> AsyncIterator[None]:
        """Know within the block what of a batch the lender has and this host has not."""
        unknown = [index for index in batch if not self._is_here(self._keys[index])]
        if lender is None or not unknown:
            yield
            return
        expected = Expected(self._expected.namespace, [self._expected.lengths[index] for index in unknown])
        keys = [self._keys[index] for index in unknown]
        async with self._stage.discovering.known_for_now(lender.tier, keys, expected, lender.ask):
            yield

    def _readable(self, batch: range) -> tuple[list[ChunkKey], bool]:
        """Leading chunks of a batch that can be brought now, and whether that are all that are not there."""
        absent: list[ChunkKey] = []
        for index in batch:
            key = self._keys[index]
            if self._state(key) is not State.ABSENT:
                continue  # There, or on its way.
            tiers = [self._hierarchy.tiers[tier] for tier in self._hierarchy.catalog.tiers(key)]
            if not any(tier.available for tier in tiers):
                if tiers:
                    self._trouble = f"tier {tiers[0].name} does not answer at present"
                return absent, False
            absent.append(key)
        return absent, True

    async def _raise(self, keys: Sequence[ChunkKey]) -> None:
        refused = self._hierarchy.counts["prefetch_no_room"]
        await self._stage.moving.raise_up(keys)
        if self._hierarchy.counts["prefetch_no_room"] > refused:
            self._trouble = _no_room(self._target)

    async def _write(self, keys: Sequence[ChunkKey]) -> None:
        event = Move(keys=keys, source=FIRST, target=self._target.index, copy=True)
        for source, part in self._by_source(keys):
            outcomes = await self._stage.moving.write(event, source, self._target.index, part, self._allocate)
            if Outcome.FULL in outcomes:
                self._trouble = _no_room(self._target)
            elif Outcome.FAILED in outcomes:
                self._trouble = f"tier {self._target.name} fails to write"

    def _by_source(self, keys: Sequence[ChunkKey]) -> Iterator[tuple[int, list[ChunkKey]]]:
        """Runs of chunks with one source each: memory where it has them, else the cheapest tier."""
        router, catalog = self._hierarchy.router, self._hierarchy.catalog
        below = router.sources(keys, [~(1 << self._target.index)] * len(keys))
        sources = [
            FIRST if catalog.state(key, FIRST) is State.READY else source
            for key, source in zip(keys, below, strict=True)
        ]
        for source, run in groupby(zip(sources, keys, strict=True), key=lambda pair: pair[0]):
            if source is not None:
                yield source, [key for _, key in run]

    def _allocate(self, length: int) -> Lease | None:
        lease = self._stage.evicting.allocate(length)
        if lease is None:
            self._trouble = _no_room(self._hierarchy.tiers[FIRST])
        return lease

    def _state(self, key: ChunkKey) -> State:
        return self._hierarchy.catalog.state(key, self._target.index)

    def _is_here(self, key: ChunkKey) -> bool:
        """Whether the chunk is in a tier, or on its way into the target."""
        return bool(self._hierarchy.catalog.tiers(key)) or self._state(key) is not State.ABSENT


def _no_room(tier: Tier) -> str:
    return f"tier {tier.name} has no room for the rest"
