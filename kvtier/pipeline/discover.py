"""Discover: query the shared pools for chunks that are not in the catalog, and add what they hold."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import cycle

from kvtier.catalog.catalog import State
from kvtier.catalog.eviction import RemovalReason
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.query import Expected
from kvtier.tiers.host_memory import chains_of
from kvtier.tiers.tier import Tier

Ask = Callable[[Sequence[ChunkKey]], Awaitable[Sequence[int]]]
"""Queries which chunks are held, and returns their indices. They need not be a prefix."""


class DiscoverStage:
    """Queries the shared pools."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy

    def pools(self, namespace: bytes) -> list[Tier]:
        """Return the shared pools to query for chunks that are not in the catalog, fastest first."""
        if self._hierarchy.catalog.namespaces.is_reset(namespace):
            return []
        usable = self._hierarchy.usable(namespace)
        pools = (tier for tier in self._hierarchy.lower if tier.shared and tier.available)
        return [tier for tier in pools if usable >> tier.index & 1]

    async def ask(self, keys: Sequence[ChunkKey], expected: Expected) -> int:
        """Query the pools in turn for the rest of a prompt. Return the number of leading chunks then known.

        Takes one round trip per pool, and more only if several pools hold parts of the prompt.
        """
        catalog = self._hierarchy.catalog
        known = len(catalog.prefix(keys))
        pools = self.pools(expected.namespace)
        misses = 0
        for tier in cycle(pools):
            if known == len(keys) or misses == len(pools):
                break
            await self._ask_one(tier, keys, expected, known)
            before, known = known, len(catalog.prefix(keys))
            misses = 0 if known > before else misses + 1
        return known

    async def _ask_one(self, tier: Tier, keys: Sequence[ChunkKey], expected: Expected, start: int) -> None:
        hierarchy = self._hierarchy
        generation = hierarchy.catalog.namespaces.generation_of(expected.namespace)
        began = time.monotonic()
        held = await tier.held_prefix(keys[start:])
        hierarchy.queried(tier, len(keys) - start, held, began)
        hierarchy.counts["pool_queried"] += len(keys) - start
        if generation != hierarchy.catalog.namespaces.generation_of(expected.namespace):
            return  # The reply may include chunks that were cleared meanwhile.
        found = self._add(tier, keys, expected, range(start, start + held))
        hierarchy.counts["pool_found"] += len(found)

    async def ask_each(self, keys: Sequence[ChunkKey], expected: Expected) -> None:
        """Query all pools for single objects, which need not be a prefix. One round trip per pool."""
        hierarchy = self._hierarchy
        for tier in self.pools(expected.namespace):
            generation = hierarchy.catalog.namespaces.generation_of(expected.namespace)
            began = time.monotonic()
            held = await tier.held(keys)
            hierarchy.queried(tier, len(keys), sum(held), began)
            if generation != hierarchy.catalog.namespaces.generation_of(expected.namespace):
                return
            self._add(tier, keys, expected, [index for index, is_held in enumerate(held) if is_held])

    @asynccontextmanager
    async def temporarily_known(
        self, tier: Tier, keys: Sequence[ChunkKey], expected: Expected, ask: Ask
    ) -> AsyncIterator[list[ChunkKey]]:
        """Yield those of ``keys`` that a pool holds according to ``ask``. In the catalog within the block."""
        namespaces = self._hierarchy.catalog.namespaces
        generation = namespaces.generation_of(expected.namespace)
        indices = await ask(keys)
        if generation != namespaces.generation_of(expected.namespace):
            indices = ()
        added = self._add(tier, keys, expected, indices)
        try:
            yield [keys[index] for index in indices]
        finally:
            catalog = self._hierarchy.catalog
            known = [key for key in added if catalog.state(key, tier.index) is State.READY]
            catalog.remove_all(known, tier.index, RemovalReason.EXPIRED)
            self._hierarchy.changed(tier.index, removed=known)

    def _add(
        self, tier: Tier, keys: Sequence[ChunkKey], expected: Expected, indices: Iterable[int]
    ) -> list[ChunkKey]:
        """Add chunks that a pool holds to the catalog. Return those that it did not contain yet."""
        catalog = self._hierarchy.catalog
        absent = [index for index in indices if catalog.state(keys[index], tier.index) is State.ABSENT]
        all_parents = [None, *keys] if expected.parents is None else expected.parents
        found, parents = [keys[index] for index in absent], [all_parents[index] for index in absent]
        lengths = [expected.lengths[index] for index in absent]
        for start, stop in chains_of(found, parents):
            place = (State.READY, parents[start], expected.namespace)
            catalog.add_chain(found[start:stop], tier.index, lengths[start:stop], *place)
        self._hierarchy.changed(tier.index, stored=found)
        return found
