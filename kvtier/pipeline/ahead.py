"""Prefetch ahead: bring prompts up from lower tiers shortly before they come back.

A prompt whose answer has ended with a tool call comes back when the tool is done. If memory had no room for
it meanwhile, it is read from below once it is about to, and only in place of what memory's eviction policy
expects later. See :meth:`EvictionPolicy.returning`.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from kvtier.events import Prefetch
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Leases
from kvtier.pipeline.allocate import Allocator
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.read import Reader

CHECK_SECONDS = 0.5
"""How often to look for prompts that are about to come back."""
MAX_PROMPTS = 16
"""To bring up after one look, one after the other. The others come with their requests."""


class PrefetchAhead:
    """Brings up what is about to be asked for."""

    def __init__(self, hierarchy: Hierarchy, allocator: Allocator, reader: Reader) -> None:
        self._hierarchy = hierarchy
        self._allocator = allocator
        self._reader = reader

    async def run(self) -> None:
        """Look for such prompts until it is cancelled."""
        while True:
            await anyio.sleep(CHECK_SECONDS)
            for prompt in self._hierarchy.catalog.returning(MAX_PROMPTS):
                await self._bring(prompt)

    async def _bring(self, keys: Sequence[ChunkKey]) -> None:
        """Read the chunks of a prompt that memory lacks, as far as it prefers them to others."""
        hierarchy = self._hierarchy
        prompt = hierarchy.catalog.liftable(keys)
        if prompt is None or not hierarchy.memory.declines:  # Otherwise everything would be worth its room.
            return
        event = Prefetch(keys=prompt.keys, among=hierarchy.usable_of(keys))
        readable = sum(len(transfer.keys) for transfer in hierarchy.planner.prefetch(event))
        if readable < len(prompt.keys):  # Room would be made for what is on its way, or cannot be read now.
            return
        leases, _ = self._allocator.allocate_for(prompt)
        # The reader allocates this room again: nothing else runs in between.
        Leases.of(leases).release_all()
        hierarchy.counts["ahead"] += len(leases)
        await self._reader.promote(prompt.keys[: len(leases)])
