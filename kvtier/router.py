"""From an event and the catalog to a list of transfers. Pure: it moves nothing and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.catalog import Catalog, State
from kvtier.events import Evict, Move, Prefetch, Store
from kvtier.keys import ChunkKey

FIRST = 0
"""The tier that is the arena. What an engine reads or writes passes through it."""


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
        """Runs of consecutive chunks with one source each, in prefix order, up to the first held nowhere."""
        plan: list[Transfer] = []
        run: list[ChunkKey] = []
        for key in event.keys:
            if self._catalog.state(key, FIRST) is not State.ABSENT:
                continue
            source = self._readable(key)
            if source is None:
                break
            if not plan or plan[-1].source != source:
                run = []
                plan.append(Transfer(source, FIRST, run))
            run.append(key)
        return plan

    def evict(self, event: Evict) -> list[Transfer]:
        """Drop what a lower tier holds or none wants; demote the rest to the first that takes it."""
        heir = self._heir(event.tier)
        drop: list[ChunkKey] = []
        demote: list[ChunkKey] = []
        for key in event.keys:
            kept_below = any(tier > event.tier for tier in self._catalog.tiers(key))
            (drop if kept_below or heir is None else demote).append(key)
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

    def _readable(self, key: ChunkKey) -> int | None:
        for tier in self._catalog.tiers(key):
            if self._tiers[tier].available:
                return tier
        return None

    def _heir(self, tier: int) -> int | None:
        for below in range(tier + 1, len(self._tiers)):
            candidate = self._tiers[below]
            if candidate.write != "never" and candidate.available:
                return below
        return None
