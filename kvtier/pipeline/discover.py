"""Discover: ask the shared pools for what no tier is known to hold, and enter the answers in the catalog."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle

from kvtier.catalog import State
from kvtier.keys import ChunkKey
from kvtier.pipeline.base import Hierarchy
from kvtier.tier import Tier


@dataclass(frozen=True, slots=True)
class Expected:
    """What the chunks of a prompt are, wherever they are: enough to fetch one that only a pool holds."""

    namespace: bytes
    lengths: Sequence[int]
    """Bytes of each chunk object, in the order of the keys."""


Ask = Callable[[Sequence[ChunkKey]], Awaitable[Sequence[int]]]
"""Asks which of some chunks are held, be they a prefix or not: their positions."""


class DiscoverStage:
    """Knows which pools to ask, and asks them."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy

    def pools(self, namespace: bytes) -> list[Tier]:
        """The shared pools that may hold what is not known here, fastest first."""
        if not self._hierarchy.distrusted.isdisjoint((namespace, None)):
            return []
        return [tier for tier in self._hierarchy.tiers if tier.shared and tier.available]

    async def ask(self, keys: Sequence[ChunkKey], expected: Expected) -> int:
        """Ask one pool after another for the rest of a prompt; how many leading chunks are known then.

        One round trip to each pool, and further ones only where several hold parts of the prompt.
        """
        catalog = self._hierarchy.catalog
        known = len(catalog.prefix(keys))
        pools = self.pools(expected.namespace)
        refusals = 0
        for tier in cycle(pools):
            if known == len(keys) or refusals == len(pools):
                break
            await self._ask_one(tier, keys, expected, known)
            before, known = known, len(catalog.prefix(keys))
            refusals = 0 if known > before else refusals + 1
        return known

    async def _ask_one(self, tier: Tier, keys: Sequence[ChunkKey], expected: Expected, start: int) -> None:
        hierarchy = self._hierarchy
        clearings = hierarchy.clearings
        held = await tier.held_prefix(keys[start:])
        hierarchy.counts["pool_asked"] += len(keys) - start
        if clearings != hierarchy.clearings:
            return  # What was cleared meanwhile may be among the answers.
        found = self._enter(tier, keys, expected, range(start, start + held))
        hierarchy.counts["pool_found"] += len(found)

    @asynccontextmanager
    async def known_for_now(
        self, tier: Tier, keys: Sequence[ChunkKey], expected: Expected, ask: Ask
    ) -> AsyncIterator[list[ChunkKey]]:
        """Those of ``keys`` that a pool holds by what ``ask`` is told, which is believed within the block."""
        clearings = self._hierarchy.clearings
        positions = await ask(keys)
        if clearings != self._hierarchy.clearings:
            positions = ()
        entered = self._enter(tier, keys, expected, positions)
        try:
            yield [keys[position] for position in positions]
        finally:
            catalog = self._hierarchy.catalog
            known = [key for key in entered if catalog.state(key, tier.index) is State.READY]
            for key in known:
                catalog.remove(key, tier.index)
            self._hierarchy.changed(tier.index, removed=known)

    def _enter(
        self, tier: Tier, keys: Sequence[ChunkKey], expected: Expected, positions: Iterable[int]
    ) -> list[ChunkKey]:
        """Have the catalog know that a pool holds these; those of which it did not."""
        catalog = self._hierarchy.catalog
        found = []
        for index in positions:
            key = keys[index]
            if catalog.state(key, tier.index) is State.ABSENT:
                parent = keys[index - 1] if index else None
                length = expected.lengths[index]
                catalog.add(key, tier.index, length, State.READY, parent, expected.namespace)
                found.append(key)
        self._hierarchy.changed(tier.index, stored=found)
        return found
