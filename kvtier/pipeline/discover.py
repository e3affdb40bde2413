"""Discover: ask the shared pools for what no tier is known to hold, and enter the answers in the catalog."""

from __future__ import annotations

from collections.abc import Sequence
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
        found = []
        for index in range(start, start + held):
            key = keys[index]
            if hierarchy.catalog.state(key, tier.index) is State.ABSENT:
                parent = keys[index - 1] if index else None
                length = expected.lengths[index]
                hierarchy.catalog.add(key, tier.index, length, State.READY, parent, expected.namespace)
                found.append(key)
        hierarchy.counts["pool_found"] += len(found)
        hierarchy.changed(tier.index, stored=found)
