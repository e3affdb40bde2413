"""From an event and the catalog to a list of transfers. Pure: it moves nothing and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.catalog import Catalog, State
from kvtier.events import Evict, Move, Prefetch, Store
from kvtier.keys import ChunkKey

FIRST = 0
"""The tier that is the arena. What an engine reads or writes passes through it."""
CLEARLY_CHEAPER = 2 / 3
"""Of another's cost: what is not cheaper by so much is not worth leaving the order of the settings for."""


class Destination(Protocol):
    """What the router must know of a tier."""

    @property
    def write(self) -> str:
        """When it wants chunks from the tiers above: ``through``, ``on_evict`` or ``never``."""
        ...

    @property
    def available(self) -> bool:
        """Whether it answers at present."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether what is there may be relied on, so that the tiers above need not keep it."""
        ...

    def cost(self, length: int) -> float | None:
        """Seconds that reading ``length`` bytes from it should take; ``None`` where nobody knows."""
        ...


@dataclass(frozen=True, slots=True)
class Transfer:
    """Move ``keys`` from one tier to another; ``target`` is ``None`` to drop them from ``source``."""

    source: int
    target: int | None
    keys: Sequence[ChunkKey]


class Router:
    """Plans for one hierarchy of tiers."""

    def __init__(self, catalog: Catalog, tiers: Sequence[Destination]) -> None:
        self._catalog = catalog
        self._tiers = tiers

    def store(self, event: Store) -> list[Transfer]:
        """New chunks go to every lower tier that wants them at once and does not have them yet."""
        plan = []
        for target, tier in enumerate(self._tiers):
            if target == FIRST or tier.write != "through" or not tier.available:
                continue
            keys = [key for key in event.keys if self._catalog.state(key, target) is State.ABSENT]
            if keys:
                plan.append(Transfer(FIRST, target, keys))
        return plan

    def prefetch(self, event: Prefetch) -> list[Transfer]:
        """Runs of consecutive chunks with one source each, in prefix order, up to the first held nowhere.

        Each comes from the cheapest tier that holds it, where that is worth a run of its own.
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
        """The cheapest tier that holds each chunk, of those with a bit in its mask; ``None`` for none."""
        sources = self._sources(keys)
        places = zip(self._catalog.places(keys), among, strict=True)
        holders = [ready & mask & sources.available for (ready, _), mask in places]
        return [sources.cheapest(mask) if mask else None for mask in holders]

    def evict(self, event: Evict) -> list[Transfer]:
        """Drop what a lower tier keeps or none wants; demote the rest to the first that takes it."""
        heir = self._heir(event.tier)
        keepers = sum(1 << below for below in self._below(event.tier) if self._tiers[below].keeps)
        drop: list[ChunkKey] = []
        demote: list[ChunkKey] = []
        for key, (ready, _) in zip(event.keys, self._catalog.places(event.keys), strict=True):
            (drop if ready & keepers or heir is None else demote).append(key)
        plan = []
        if drop:
            plan.append(Transfer(event.tier, None, drop))
        if demote:
            plan.append(Transfer(event.tier, heir, demote))
        return plan

    def move(self, event: Move) -> list[Transfer]:
        """What the source holds; what the target holds already is not sent again."""
        keys = [
            key
            for key in event.keys
            if self._catalog.state(key, event.source) is State.READY
            and self._catalog.state(key, event.target) is State.ABSENT
        ]
        return [Transfer(event.source, event.target, keys)] if keys else []

    def _heir(self, tier: int) -> int | None:
        for below in self._below(tier):
            candidate = self._tiers[below]
            if candidate.write != "never" and candidate.available:
                return below
        return None

    def _below(self, tier: int) -> range:
        return range(tier + 1, len(self._tiers))

    def _sources(self, keys: Sequence[ChunkKey]) -> _Sources:
        def expected_bytes() -> int:
            return len(keys) * next((self._catalog.length(key) for key in keys if key in self._catalog), 0)

        return _Sources(self._tiers, expected_bytes)


class _Sources:
    """The tiers that can be read from, and which of them one plan prefers; both are found out only once."""

    def __init__(self, tiers: Sequence[Destination], expected_bytes: Callable[[], int]) -> None:
        self._tiers = tiers
        self._expected_bytes = expected_bytes
        self._costs: dict[int, float | None] = {}
        self._ranking: list[int] = []
        self.available = sum(1 << at for at, tier in enumerate(tiers) if at > FIRST and tier.available)
        """A bit for each tier that can be read from."""

    def cheapest(self, holders: int, last: int | None = None) -> int:
        """Which of the tiers with a bit in ``holders`` to read a chunk from, after one from tier ``last``."""
        if not holders & holders - 1:
            return holders.bit_length() - 1
        if not self._ranking:
            self._rank()
        best = next(tier for tier in self._ranking if holders >> tier & 1)
        if last is not None and holders >> last & 1 and self._alike(best, last):
            return last
        return best

    def _rank(self) -> None:
        """In the order of the settings, but for those that are clearly cheaper than one before them."""
        length = self._expected_bytes()
        left = [tier for tier in range(len(self._tiers)) if self.available >> tier & 1]
        self._costs = {tier: self._tiers[tier].cost(length) for tier in left}
        while left:
            best = left[0]
            for tier in left:
                if self._clearly_cheaper(tier, best):
                    best = tier
            left.remove(best)
            self._ranking.append(best)

    def _clearly_cheaper(self, one: int, other: int) -> bool:
        cost, other_cost = self._costs[one], self._costs[other]
        return cost is not None and other_cost is not None and cost < CLEARLY_CHEAPER * other_cost

    def _alike(self, one: int, other: int) -> bool:
        """Whether both costs are known, and neither is worth another run."""
        known = self._costs[one] is not None and self._costs[other] is not None
        return known and not self._clearly_cheaper(one, other)
