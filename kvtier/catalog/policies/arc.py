"""ARC eviction policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.catalog.eviction import ChunkColumns, PolicySettings, RemovalReason
from kvtier.catalog.policies.ghosts import Ghosts, hashes_of
from kvtier.catalog.policies.rings import RingPolicy

RECENT, FREQUENT = 0, 1
"""The rings of chunks that were not used since they were stored, and of those that were: T1 and T2."""


class ArcPolicy(RingPolicy):
    """Adapts the room for chunks that are not used yet: 9 bytes per chunk, and a ghost of at most 40 bytes.

    Megiddo and Modha, *ARC: a self-tuning, low overhead replacement cache* (FAST 2003). A ghost that comes
    back moves the target for the ring from which it was evicted too early. The paper makes room for a chunk
    after this; here, room is made before it is known which chunk comes. All sizes are in chunks, and the
    capacity is what the tier held when the last evictions began.
    """

    def __init__(self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns) -> None:
        super().__init__(settings, capacity_bytes, chunks, rings=2)
        self._ghosts = (Ghosts(), Ghosts())
        """By the ring from which they were evicted: B1 and B2."""
        self._target = 0.0
        """How many chunks may stay in ``RECENT``."""

    def added(self, rows: Sequence[int], now: float) -> None:
        """Chunks that come back are frequent, others are recent."""
        recent_ghosts, frequent_ghosts = self._ghosts
        rings = self._rings
        capacity = max(self._full, len(rings) + len(rows))
        self._evicting = False
        recent: list[int] = list(rows)
        frequent: list[int] = []
        if recent_ghosts or frequent_ghosts:
            recent = []
            for row, hashed in zip(rows, hashes_of(self._chunks, rows), strict=True):
                sizes = len(recent_ghosts), len(frequent_ghosts)
                if recent_ghosts.discard(hashed):
                    self._target = min(self._target + max(1.0, sizes[1] / sizes[0]), capacity)
                    frequent.append(row)
                elif frequent_ghosts.discard(hashed):
                    self._target = max(self._target - max(1.0, sizes[0] / sizes[1]), 0.0)
                    frequent.append(row)
                else:
                    recent.append(row)
        rings.insert(recent, RECENT)
        rings.insert(frequent, FREQUENT)
        recent_ghosts.trim(capacity - rings.counts[RECENT])
        frequent_ghosts.trim(capacity - len(recent_ghosts))

    def used(self, rows: Sequence[int], now: float) -> None:
        """Make a prefix the warmest of the frequent chunks."""
        self._rings.use(rows, FREQUENT)

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        """Remember which chunks are evicted from which ring."""
        if reason is RemovalReason.EVICTED:
            self._begin_eviction()
            held = self._rings.held(rows)
            for row, hashed in zip(held, hashes_of(self._chunks, held), strict=True):
                self._ghosts[self._rings.ring_of[row]].add(hashed, self._full)
        self._rings.remove(rows)

    def _order(self) -> Iterator[int]:
        left = list(self._rings.counts)
        coldest = self._rings.rows(RECENT), self._rings.rows(FREQUENT)
        while left[RECENT] or left[FREQUENT]:
            ring = RECENT if left[RECENT] > self._target or not left[FREQUENT] else FREQUENT
            left[ring] -= 1
            yield next(coldest[ring])
