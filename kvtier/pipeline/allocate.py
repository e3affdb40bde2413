"""Allocate: memory in the arena, at once, by dropping cold chunks that need no demotion.

Engines wait for it, so nothing here waits. What it cannot free, :mod:`kvtier.pipeline.evict` frees in the
background.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby

import anyio

from kvtier.catalog.eviction import IncomingPrompt
from kvtier.catalog.tenants import EvictionScope
from kvtier.events import Evict
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.tiers.level import may_decline

SCAN_LIMIT = 1024
"""Maximum victims to examine per attempt. Many may be leased, and these are skipped."""


class Allocator:
    """Allocates slices of the arena."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._memory = hierarchy.memory
        self._written_below = any(tier.settings.write != "never" for tier in hierarchy.lower)
        self.needed = anyio.Event()
        """Set when chunks have to be evicted in the background."""
        self.refused_bytes = 0
        """The largest allocation that has failed since the last eviction."""

    def allocate(self, length: int) -> Lease | None:
        """Allocate ``length`` bytes; ``None`` if all cold chunks are leased, pinned or not demoted yet."""
        return next(iter(self.allocate_all((length,))), None)

    def allocate_all(self, lengths: Sequence[int]) -> list[Lease]:
        """Allocate memory for each length as :meth:`allocate`, up to the first that does not fit."""
        leases = self._allocate_all(lengths)
        if len(leases) < len(lengths):
            self._refuse(lengths[len(leases)])
        return leases

    def allocate_for(self, prompt: IncomingPrompt) -> tuple[list[Lease], bool]:
        """Allocate memory for new chunks as :meth:`allocate_all`, but drop nothing that is worth more.

        Return the leases, and whether the last chunks have none for that reason.
        """
        leases = self._allocate_all(prompt.lengths, prompt)
        if len(leases) == len(prompt.lengths):
            return leases, False
        declined = bool(self._memory.victims(SCAN_LIMIT, 1, EvictionScope.ABOVE_SHARE))
        if not declined:
            self._refuse(prompt.lengths[len(leases)])
        return leases, declined

    def _refuse(self, length: int) -> None:
        """Make room in the background, since there was none for ``length`` bytes."""
        if length <= self._memory.arena.capacity:
            self.refused_bytes = max(self.refused_bytes, length)
        self.needed.set()

    def _allocate_all(self, lengths: Sequence[int], prompt: IncomingPrompt | None = None) -> list[Lease]:
        memory, leases = self._memory, list[Lease]()
        for length, run in groupby(lengths):
            wanted = len(leases) + len(list(run))
            leases += memory.arena.allocate_all(length, wanted - len(leases))
            if len(leases) < wanted:
                leases += self._allocate_by_dropping(length, wanted - len(leases), prompt)
            if len(leases) < wanted:
                break
        # These leases are not in the catalog yet, so they do not count as used.
        if leases and self._evicts_ahead(sum(lengths[: len(leases)])):
            self.needed.set()
        return leases

    def _evicts_ahead(self, incoming: int) -> bool:
        """Whether to evict in the background once ``incoming`` more bytes are stored.

        Not if the policy may decline: in free space, worse chunks would replace better ones.
        """
        tenants = self._memory.tenants is not None  # One may be above its maximum then.
        return tenants or (not may_decline(self._hierarchy.tiers) and self._memory.excess_bytes(incoming) > 0)

    def _allocate_by_dropping(self, length: int, count: int, prompt: IncomingPrompt | None) -> list[Lease]:
        """Drop chunks that need no demotion, and allocate ``length`` bytes up to ``count`` times instead.

        The second search is for chunks behind those that do need one, or whose memory lies together.
        """
        hierarchy, memory = self._hierarchy, self._memory
        leases: list[Lease] = []
        for needed in (count * length, sys.maxsize):
            victims = memory.victims(SCAN_LIMIT, needed, EvictionScope.ABOVE_SHARE, prompt)
            if not victims:
                break
            plans = hierarchy.planner.evict(Evict(keys=victims, tier=memory.index))
            droppable = (plan for plan in plans if plan.target is None)
            freed = 0
            for key, admitted in ((key, plan.admitted) for plan in droppable for key in plan.keys):
                freed += hierarchy.catalog.length(key)
                self.drop([key], admitted=admitted)
                if freed >= length and (lease := memory.arena.allocate(length)) is not None:
                    leases.append(lease)
                    freed -= length
                    if len(leases) == count:
                        return leases
        return leases

    def drop(self, keys: Sequence[ChunkKey], *, admitted: bool) -> None:
        """Evict READY chunks from memory, and count them. ``admitted``: see :class:`Transfer`."""
        hierarchy = self._hierarchy
        if admitted and self._written_below:
            places = hierarchy.catalog.places(keys)
            lost = sum(not (ready | pending) >> 1 for ready, pending in places)
            hierarchy.counts["evicted_unwritten"] += lost
        self._memory.drop(keys)
        hierarchy.changed(self._memory.index, removed=keys)
        hierarchy.counts["evicted"] += len(keys)
        hierarchy.counts["not_admitted"] += 0 if admitted else len(keys)
