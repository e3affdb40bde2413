"""Clear: remove chunks from tiers permanently, even while they are being read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import anyio.lowlevel

from kvtier.catalog.catalog import State
from kvtier.catalog.eviction import RemovalReason
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.base import Hierarchy
from kvtier.pipeline.evict import EvictStage

ROWS_PER_STEP = 2048
"""Catalog rows to process before yielding to the event loop."""


class Cleared(NamedTuple):
    """What was removed. A chunk in several tiers counts once, but its bytes count for each tier."""

    keys: list[ChunkKey]
    chunks: int
    bytes: int


class ClearStage:
    """Clears tiers in steps, to avoid blocking the event loop."""

    def __init__(self, hierarchy: Hierarchy, evicting: EvictStage) -> None:
        self._hierarchy = hierarchy
        self._evicting = evicting

    async def clear(self, keys: Sequence[ChunkKey], tiers: Sequence[int]) -> Cleared:
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
            await self._evicting.remove(ready, tier, RemovalReason.CLEARED)
        return Cleared(list(removed), len(removed), freed)

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
