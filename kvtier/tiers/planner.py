"""Plan the transfers of an event from the catalog. Pure: does not move data or change state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

from kvtier.catalog.catalog import Catalog, State
from kvtier.events import Evict, Move, Prefetch, Store
from kvtier.memory.keys import ChunkKey
from kvtier.tiers.admission import FIRST_USE, Admission
from kvtier.tiers.level import Level

FIRST = 0
"""The tier that is the arena. All engine reads and writes pass through it."""
CLEARLY_CHEAPER = 2 / 3
"""A tier is preferred over one earlier in the settings only if it costs less than this fraction."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Move ``keys`` from one tier to another; ``target`` is ``None`` to drop them from ``source``."""

    source: int
    target: int | None
    keys: Sequence[ChunkKey]
    admitted: bool = True
    """``False`` to drop chunks that would be written to a lower tier, if one admitted them."""


class TransferPlanner:
    """Plans which chunks move between the tiers of one cache."""

    def __init__(
        self, catalog: Catalog, tiers: Sequence[Level], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock``: that of the catalog."""
        self._catalog = catalog
        self._tiers = tiers
        self.admission = Admission(catalog, tiers, clock)
        """Which chunks lower tiers admit. Callers report every store and use."""

    def store(self, event: Store) -> list[Transfer]:
        """Write new chunks to every lower write-through tier that admits them and does not have them."""
        return self._write_through(event, range(FIRST + 1, len(self._tiers)))

    def store_later(self, event: Store) -> list[Transfer]:
        """Write chunks to the write-through tiers that may not have admitted them when they were new."""
        below = range(FIRST + 1, len(self._tiers))
        return self._write_through(event, (at for at in below if self._tiers[at].admit != FIRST_USE))

    def _write_through(self, event: Store, targets: Iterable[int]) -> list[Transfer]:
        plan = []
        for target in targets:
            tier = self._tiers[target]
            if tier.write != "through" or not tier.available:
                continue
            admitted = zip(event.keys, self.admission.admitted(target, event.keys), strict=True)
            absent = [
                key for key, take in admitted if take and self._catalog.state(key, target) is State.ABSENT
            ]
            if absent:
                plan.append(Transfer(FIRST, target, absent))
        return plan

    def prefetch(self, event: Prefetch) -> list[Transfer]:
        """Return runs of consecutive chunks from one source each, in prefix order, up to the first miss.

        Each chunk is read from the cheapest tier that holds it, if that is worth a separate run.
        """
        plan: list[Transfer] = []
        run: list[ChunkKey] = []
        sources = self._sources(event.keys)
        readable = sources.available & event.among
        holders = 0
        for key, (ready, pending) in zip(event.keys, self._catalog.places(event.keys), strict=True):
            if (ready | pending) >> FIRST & 1:
                continue
            if not ready & readable:
                break
            if ready & readable != holders:
                holders = ready & readable
                source = sources.cheapest(holders, plan[-1].source if plan else None)
                if not plan or plan[-1].source != source:
                    run = []
                    plan.append(Transfer(source, FIRST, run))
            run.append(key)
        return plan

    def sources(self, keys: Sequence[ChunkKey], among: Sequence[int]) -> list[int | None]:
        """Return the cheapest tier that holds each chunk, among the tiers in its bit mask, or ``None``."""
        sources = self._sources(keys)
        places = zip(self._catalog.places(keys), among, strict=True)
        holders = [ready & mask & sources.available for (ready, _), mask in places]
        return [sources.cheapest(mask) if mask else None for mask in holders]

    def evict(self, event: Evict) -> list[Transfer]:
        """Drop chunks that a lower tier retains, or that no tier accepts; demote the others.

        Each to the first tier that admits it.
        """
        targets = [below for below in self._below(event.tier) if self._accepts(below)]
        if not targets:
            return [Transfer(event.tier, None, event.keys)] if event.keys else []
        keepers = sum(1 << below for below in self._below(event.tier) if self._tiers[below].is_durable)
        drop: list[ChunkKey] = []
        left: list[ChunkKey] = []
        for key, (ready, _) in zip(event.keys, self._catalog.places(event.keys), strict=True):
            (drop if ready & keepers else left).append(key)
        plan = []
        if drop:
            plan.append(Transfer(event.tier, None, drop))
        for target in targets:
            admitted = self.admission.admitted(target, left)
            if demote := list(compress(left, admitted)):
                plan.append(Transfer(event.tier, target, demote))
                left = [key for key, take in zip(left, admitted, strict=True) if not take]
        if left:
            plan.append(Transfer(event.tier, None, left, admitted=False))
        return plan

    def move(self, event: Move) -> list[Transfer]:
        """Transfer the chunks that the source holds and the target does not."""
        keys = [
            key
            for key in event.keys
            if self._catalog.state(key, event.source) is State.READY
            and self._catalog.state(key, event.target) is State.ABSENT
        ]
        return [Transfer(event.source, event.target, keys)] if keys else []

    def _accepts(self, tier: int) -> bool:
        return self._tiers[tier].write != "never" and self._tiers[tier].available

    def _below(self, tier: int) -> range:
        return range(tier + 1, len(self._tiers))

    def _sources(self, keys: Sequence[ChunkKey]) -> _Sources:
        def expected_bytes() -> int:
            return len(keys) * next((self._catalog.length(key) for key in keys if key in self._catalog), 0)

        return _Sources(self._tiers, expected_bytes)


class _Sources:
    """The readable tiers and their ranking by cost, computed once per plan."""

    def __init__(self, tiers: Sequence[Level], expected_bytes: Callable[[], int]) -> None:
        self._tiers = tiers
        self._expected_bytes = expected_bytes
        self._costs: dict[int, float | None] = {}
        self._ranking: list[int] = []
        self.available = sum(1 << at for at, tier in enumerate(tiers) if at > FIRST and tier.available)
        """Bit mask of the readable tiers."""

    def cheapest(self, holders: int, last: int | None = None) -> int:
        """Return the tier of the bit mask ``holders`` to read from, after a chunk from tier ``last``."""
        if not holders & holders - 1:
            return holders.bit_length() - 1
        if not self._ranking:
            self._rank()
        best = next(tier for tier in self._ranking if holders >> tier & 1)
        if last is not None and holders >> last & 1 and self._similar(best, last):
            return last
        return best

    def _rank(self) -> None:
        """Rank tiers in the order of the settings, except for those clearly cheaper than an earlier one."""
        length = self._expected_bytes()
        remaining = [tier for tier in range(len(self._tiers)) if self.available >> tier & 1]
        self._costs = {tier: self._tiers[tier].cost(length) for tier in remaining}
        while remaining:
            best = remaining[0]
            for tier in remaining:
                if self._clearly_cheaper(tier, best):
                    best = tier
            remaining.remove(best)
            self._ranking.append(best)

    def _clearly_cheaper(self, tier: int, other: int) -> bool:
        cost, other_cost = self._costs[tier], self._costs[other]
        return cost is not None and other_cost is not None and cost < CLEARLY_CHEAPER * other_cost

    def _similar(self, tier: int, other: int) -> bool:
        """Whether both costs are known, and ``tier`` is not clearly cheaper than ``other``."""
        known = self._costs[tier] is not None and self._costs[other] is not None
        return known and not self._clearly_cheaper(tier, other)
