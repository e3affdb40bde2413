"""Clear: take chunks out of the tiers for good, whoever may still be reading them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import anyio.lowlevel

from kvtier.catalog import State
from kvtier.events import Evict
from kvtier.keys import ChunkKey
from kvtier.pipeline.base import Hierarchy
from kvtier.pipeline.evict import EvictStage
from kvtier.router import FIRST, Transfer

ROWS_A_STEP = 2048
"""Of the catalog, that are gone through before the loop may do something else."""


class Cleared(NamedTuple):
    """What went: a chunk that several tiers held is one chunk, and its bytes are those of all of them."""

    keys: list[ChunkKey]
    chunks: int
    bytes: int


class ClearStage:
    """Clears tiers, in steps that do not block the loop however much they hold."""

    def __init__(self, hierarchy: Hierarchy, evicting: EvictStage) -> None:
        self._hierarchy = hierarchy
        self._evicting = evicting

    async def clear(self, keys: Sequence[ChunkKey], tiers: Iterable[int]) -> Cleared:
        """Remove these chunks from these tiers. :attr:`Cleared.keys` are in no order."""
        catalog = self._hierarchy.catalog
        gone: set[ChunkKey] = set()
        freed = 0
        for tier in tiers:
            there = [key for key in keys if catalog.state(key, tier) is not State.ABSENT]
            ready = [key for key in there if catalog.state(key, tier) is State.READY]
            freed += sum(catalog.length(key) for key in ready)
            gone.update(ready)
            # What was lifted or asked for up to now must not come back after this.
            self._hierarchy.clearings += 1
            self._hierarchy.unwanted[tier].update(set(there).difference(ready))
            if tier == FIRST:
                self._hierarchy.drop(ready)
            else:
                await self._evicting.delete(Evict(keys=ready, tier=tier), Transfer(tier, None, ready))
        return Cleared(list(gone), len(gone), freed)

    async def clear_all(self, namespace: bytes | None, tiers: Sequence[int]) -> Cleared:
        """Remove every chunk, or every one of a namespace; the answer names none of them.

        What is stored meanwhile may stay.
        """
        catalog = self._hierarchy.catalog
        chunks = freed = 0
        for rows in catalog.slices(ROWS_A_STEP):
            held = {key for tier in tiers for key in catalog.keys(tier, namespace, rows=rows)}
            if held:
                cleared = await self.clear(list(held), tiers)
                chunks += cleared.chunks
                freed += cleared.bytes
            await anyio.lowlevel.checkpoint()
        return Cleared([], chunks, freed)
