"""Held: keep the catalog up to date with what the media hold, lose and let expire by themselves."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import anyio
from anyio.lowlevel import checkpoint

from kvtier.backends.base import StoredObject
from kvtier.catalog.catalog import State
from kvtier.catalog.eviction import RemovalReason
from kvtier.catalog.partial_matches import block_tags_of
from kvtier.concurrency.breaker import Backoff
from kvtier.events import Observer
from kvtier.memory.header import ChunkHeader, StoredHeader, object_bytes
from kvtier.memory.keys import ChunkKey, split_keys
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.write import Writer
from kvtier.tiers.level import MAX_TRACKED_CHUNKS
from kvtier.tiers.tier import Tier
from kvtier.units import format_size

logger = logging.getLogger("kvtier")

SLICE_ROWS = 8192
"""Rows of the catalog, or chunks, to process before yielding to the event loop."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 60.0, 3600.0
"""Back-off between scans of what a medium could not list."""
EXPIRY_SECONDS = 1.0
"""Maximum delay between the expiry of a chunk and its removal from the catalog."""


class HeldStage:
    """Finds the chunks in media that can list them."""

    def __init__(self, hierarchy: Hierarchy, writer: Writer) -> None:
        self._hierarchy = hierarchy
        self._writer = writer
        # Two scans of a tier at once would both add what neither has found in the catalog.
        self._loading: defaultdict[int, anyio.Lock] = defaultdict(anyio.Lock)

    async def load(self, tier: Tier) -> list[ChunkKey]:
        """Add the chunks of a tier to the catalog, least recently used first. Return those added."""
        async with self._loading[tier.index]:
            return await self._load(tier)

    async def _load(self, tier: Tier) -> list[ChunkKey]:
        catalog, index = self._hierarchy.catalog, tier.index
        held: list[HeldChunk] = []
        async for batch in tier.scan():
            held += [HeldChunk.of(stored) for stored in batch]
        found: list[ChunkKey] = []
        for number, chunk in enumerate(parents_first(held), 1):
            if number % SLICE_ROWS == 0:
                await checkpoint()
            if catalog.state(chunk.key, index) is not State.ABSENT:  # Stored since an earlier scan.
                continue
            header = chunk.header
            length = object_bytes(header.payload_bytes)
            catalog.add(chunk.key, index, length, State.READY, header.parent, header.namespace)
            catalog.resize(chunk.key, index, chunk.length)
            catalog.partial_matches.set(chunk.key, header.parent, chunk.block_tags)
            found.append(chunk.key)
        if found:
            length = sum(map(catalog.length, found))
            logger.info("tier %s: found %d existing chunks (%s)", tier.name, len(found), format_size(length))
        await self._writer.make_room(index, 0)
        return found

    async def forget_lost(self, tier: Tier) -> None:
        """Whenever its medium was replaced, remove all chunks of a tier, and add those of the new medium."""
        while True:
            await tier.replaced.wait()
            tier.replaced = anyio.Event()
            catalog, lost = self._hierarchy.catalog, 0
            for rows in catalog.slices(SLICE_ROWS):
                ready = split_keys(catalog.ready_keys(tier.index, rows))
                # They are not deleted: the new medium may hold the same ones.
                self._hierarchy.changed(tier.index, removed=ready)
                catalog.remove_all(ready, tier.index, RemovalReason.LOST)
                lost += len(ready)
                await checkpoint()
            logger.warning("tier %s: %d chunks are lost", tier.name, lost)
            await self._find(tier)

    async def find_unseen(self, tier: Tier) -> None:
        """Whenever a tier holds what is not in the catalog, scan it again until all has been listed."""
        while True:
            await tier.incomplete.wait()
            tier.incomplete = anyio.Event()
            backoff = Backoff(RETRY_SECONDS, MAX_RETRY_SECONDS)
            while tier.unseen is not None:
                await anyio.sleep(backoff.next())
                await self._find(tier)
                if tier.unseen is None:
                    logger.info("tier %s: all chunks are listed", tier.name)

    async def _find(self, tier: Tier) -> None:
        """Add what a tier holds to the catalog, and notify the observers."""
        found = await self.load(tier)
        self._hierarchy.changed(tier.index, stored=[key for key in found if key in self._hierarchy.catalog])


class HeldChunk(NamedTuple):
    """A chunk that a tier held when it was opened."""

    last_used: float
    key: ChunkKey
    length: int
    """Bytes of the object in the medium."""
    header: ChunkHeader
    """Without block hashes, of which :attr:`block_tags` suffice."""
    block_tags: bytes

    @classmethod
    def of(cls, stored: StoredObject) -> HeldChunk:
        """Parse the header of a stored object."""
        header = StoredHeader.parse(stored.head).chunk
        block_tags = block_tags_of(header.block_hashes)
        return cls(stored.last_used, stored.key, stored.length, header._replace(block_hashes=b""), block_tags)


def parents_first(held: list[HeldChunk]) -> Iterator[HeldChunk]:
    """Yield the least recently used first, but parents before children, so that eviction can order them."""
    waiting = {chunk.key: chunk for chunk in held}
    for oldest in sorted(held):
        chain = []
        key = oldest.key
        while key in waiting:
            chain.append(waiting.pop(key))
            key = chain[-1].header.parent
        yield from reversed(chain)


class TtlExpiry(Observer):
    """Removes chunks of tiers with a TTL from the catalog when they expire.

    Without this, the tiers above would drop an expired chunk on eviction instead of writing it again.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._ttl = {tier.index: ttl for tier in hierarchy.lower if (ttl := _ttl(tier)) is not None}
        self._due: dict[int, deque[tuple[float, ChunkKey]]] = {tier: deque() for tier in self._ttl}
        if self._ttl:
            hierarchy.observers.append(self)

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """Record when the stored chunks expire."""
        if tier in self._due:
            until = time.monotonic() + self._ttl[tier]
            self._due[tier].extend((until, key) for key in stored)

    async def run(self) -> None:
        """Remove expired chunks while the cache is open."""
        pause = min([EXPIRY_SECONDS, *(ttl / 4 for ttl in self._ttl.values())])
        while self._ttl:
            await anyio.sleep(pause)
            for tier in self._due:
                self._expire(tier)

    def _expire(self, tier: int) -> None:
        catalog, due, now = self._hierarchy.catalog, self._due[tier], time.monotonic()
        removed = []
        while due and (due[0][0] <= now or len(due) > MAX_TRACKED_CHUNKS):
            _, key = due.popleft()
            if catalog.state(key, tier) is State.READY:
                removed.append(key)
                catalog.remove(key, tier, RemovalReason.EXPIRED)
        self._hierarchy.changed(tier, removed=removed)


def _ttl(tier: Tier) -> float | None:
    return None if tier.capabilities.ttl is None else tier.capabilities.ttl.ttl
