"""Clear: remove chunks from tiers permanently, even while they are being read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

    async def clear(self, keys: Sequence[ChunkKey], tiers: Iterable[int]) -> Cleared:
        """Remove ``keys`` from ``tiers``. The order of :attr:`Cleared.keys` is undefined."""
        catalog = self._hierarchy.catalog
        removed: set[ChunkKey] = set()
        freed = 0
        for tier in tiers:
            present = [key for key in keys if catalog.state(key, tier) is not State.ABSENT]
            ready = [key for key in present if catalog.state(key, tier) is State.READY]
            freed += sum(catalog.length(key) for key in ready)
            removed.update(ready)
            # Copies and lookups that are in flight must not bring these chunks back.
            catalog.begin_generation(present)
            await self._evicting.remove(ready, tier, RemovalReason.CLEARED)
        return Cleared(list(removed), len(removed), freed)

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
