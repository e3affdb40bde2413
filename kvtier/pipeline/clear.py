"""Clear: remove chunks from tiers permanently, even while they are being read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import anyio.lowlevel

from kvtier.catalog.catalog import State
from kvtier.catalog.eviction import RemovalReason
from kvtier.events import Evict
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.write import Writer
from kvtier.tiers.planner import Transfer

ROWS_PER_STEP = 2048
"""Catalog rows to process before yielding to the event loop."""


class Cleared(NamedTuple):
    """What was removed. A chunk in several tiers counts once, but its bytes count for each tier."""

    keys: list[ChunkKey]
    chunks: int
    bytes: int


class ClearStage:
    """Clears tiers in steps, to avoid blocking the event loop."""

    def __init__(self, hierarchy: Hierarchy, writer: Writer) -> None:
        self._hierarchy = hierarchy
        self._writer = writer
        hierarchy.memory.sealer.on_corrupt = self._drop_corrupt

    async def clear(
        self,
        keys: Sequence[ChunkKey],
        tiers: Sequence[int],
        reason: RemovalReason = RemovalReason.CLEARED,
    ) -> Cleared:
        """Remove ``keys`` from ``tiers``. The order of :attr:`Cleared.keys` is undefined."""
        catalog = self._hierarchy.catalog
        others = ~sum(1 << tier for tier in tiers)
        removed: set[ChunkKey] = set()
        freed = 0
        for tier in tiers:
            present = [key for key in keys if catalog.state(key, tier) is not State.ABSENT]
            ready = [key for key in present if catalog.state(key, tier) is State.READY]
            freed += sum(catalog.length(key) for key in ready)
            removed.update(ready)
            catalog.begin_generation(self._leaving(present, tier, others))
            await self.remove(ready, tier, reason)
        return Cleared(list(removed), len(removed), freed)

    def uncover(self, keys: Sequence[ChunkKey], tier: int) -> None:
        """Remove what a tier holds from those above it: from memory at once, from others by a task.

        If it holds less than memory, nothing is removed. If it is only written to on eviction, that begins.
        """
        catalog, memory = self._hierarchy.catalog, self._hierarchy.memory.index
        covering = [key for key in keys if catalog.state(key, memory) is State.READY]
        absent = [key for key in covering if catalog.state(key, tier) is State.ABSENT]
        if absent and self._hierarchy.tier(tier).write == "on_evict":
            evict, transfer = Evict(keys=absent, tier=memory), Transfer(memory, tier, absent)
            self._hierarchy.tasks.start_soon(self._writer.demote, evict, transfer)
        if all(catalog.state(key, tier) is State.READY for key in covering):
            self._drop(covering, RemovalReason.CLEARED)
            held = [key for key in keys if catalog.state(key, tier) is State.READY]
            self._hierarchy.tasks.start_soon(self.clear, held, range(memory + 1, tier))

    def _leaving(self, keys: Sequence[ChunkKey], tier: int, others: int) -> list[ChunkKey]:
        """Return the chunks that copies and queries in flight must not bring back.

        These are chunks that no tier of the bit mask ``others`` has, and chunks in flight into ``tier``.
        """
        if self._hierarchy.tiers[tier].shared:
            return list(keys)
        places = zip(keys, self._hierarchy.catalog.places(keys), strict=True)
        return [
            key for key, (ready, pending) in places if pending >> tier & 1 or not (ready | pending) & others
        ]

    async def clear_all(self, namespace: bytes | None, tiers: Sequence[int]) -> Cleared:
        """Remove all chunks, or those of one namespace. Leaves :attr:`Cleared.keys` empty.

        Chunks that are stored meanwhile may survive.
        """
        catalog = self._hierarchy.catalog
        chunks = freed = 0
        for rows in catalog.slices(ROWS_PER_STEP):
            held = {key for tier in tiers for key in catalog.keys(tier, namespace, rows=rows)}
            if held:
                cleared = await self.clear(list(held), tiers)
                chunks += cleared.chunks
                freed += cleared.bytes
            await anyio.lowlevel.checkpoint()
        return Cleared([], chunks, freed)

    async def remove(self, keys: Sequence[ChunkKey], tier: int, reason: RemovalReason) -> None:
        """Remove READY chunks from one tier for another reason than eviction."""
        if tier == self._hierarchy.memory.index:
            self._drop(keys, reason)
        else:
            await self._writer.delete(Evict(keys=keys, tier=tier), Transfer(tier, None, keys), reason)

    def _drop(self, keys: Sequence[ChunkKey], reason: RemovalReason) -> None:
        memory = self._hierarchy.memory
        memory.drop(keys, reason)
        self._hierarchy.changed(memory.index, removed=keys)

    def _drop_corrupt(self, key: ChunkKey, chunk: memoryview) -> None:
        """Drop a chunk whose header is corrupt, if ``chunk`` is the copy in memory."""
        if self._hierarchy.memory.holds_at(key, chunk):
            self._drop([key], RemovalReason.LOST)
