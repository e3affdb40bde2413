"""Forget: remove chunks from the catalog once their TTL in a pool has expired."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import anyio

from kvtier.catalog.catalog import State
from kvtier.catalog.eviction import RemovalReason
from kvtier.events import Observer
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.base import Hierarchy
from kvtier.tiers.level import MAX_TRACKED_CHUNKS
from kvtier.tiers.tier import Tier

PAUSE_SECONDS = 1.0
"""Maximum delay between the expiry of a chunk and its removal from the catalog."""


class ForgetStage(Observer):
    """Removes chunks of tiers with a TTL from the catalog when they expire.

    Without this, the tiers above would drop an expired chunk on eviction instead of writing it again.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._ttl = {tier.index: ttl for tier in hierarchy.lower if (ttl := _ttl(tier)) is not None}
        self._due: dict[int, deque[tuple[float, ChunkKey]]] = {tier: deque() for tier in self._ttl}
        if self._ttl:
            hierarchy.observers.append(self)

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """Record when the stored chunks expire."""
        if tier in self._due:
            until = time.monotonic() + self._ttl[tier]
            self._due[tier].extend((until, key) for key in stored)

    async def run(self) -> None:
        """Remove expired chunks while the cache is open."""
        pause = min([PAUSE_SECONDS, *(ttl / 4 for ttl in self._ttl.values())])
        while self._ttl:
            await anyio.sleep(pause)
            for tier in self._due:
                self._forget(tier)

    def _forget(self, tier: int) -> None:
        catalog, due, now = self._hierarchy.catalog, self._due[tier], time.monotonic()
        removed = []
        while due and (due[0][0] <= now or len(due) > MAX_TRACKED_CHUNKS):
            _, key = due.popleft()
            if catalog.state(key, tier) is State.READY:
                removed.append(key)
                catalog.remove(key, tier, RemovalReason.EXPIRED)
        self._hierarchy.changed(tier, removed=removed)


def _ttl(tier: Tier) -> float | None:
    return None if tier.capabilities.ttl is None else tier.capabilities.ttl.ttl
