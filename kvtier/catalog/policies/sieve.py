"""SIEVE eviction policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.catalog.eviction import ChunkColumns, EvictionPolicy, PolicySettings, RemovalReason
from kvtier.catalog.policies.rings import MAX_PASSED, NO_ROW, Rings, cover

_RING = 0


class SievePolicy(EvictionPolicy):
    """A queue in which a hand moves from old to new, and passes by chunks that were used: 10 bytes per chunk.

    Zhang et al., *SIEVE is simpler than LRU* (NSDI 2024). A use only sets a byte. The hand passes by chunks
    that may not leave as well, so that the next search does not start with them again.
    """

    def __init__(self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns) -> None:
        super().__init__(settings, capacity_bytes, chunks)
        self._rings = Rings(1)
        self._was_used = bytearray()
        self._hand = NO_ROW
        """The row that is examined next; :data:`NO_ROW` for the oldest."""

    def added(self, rows: Sequence[int], now: float) -> None:
        """Append chunks."""
        self._rings.insert(rows, _RING)
        cover(max(rows, default=-1), self._was_used)
        for row in rows:
            self._was_used[row] = 0

    def used(self, rows: Sequence[int], now: float) -> None:
        """Mark chunks. Those of other tiers are unmarked when they are added to this one."""
        was_used, known = self._was_used, len(self._was_used)
        if max(rows, default=-1) >= known:
            rows = [row for row in rows if row < known]
        for row in rows:
            was_used[row] = 1

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        """Remove chunks. If the hand is at one, it moves on to the next newer one."""
        leaving = set(rows)
        while self._hand in leaving:
            self._hand = self._rings.warmer(self._hand) if self._rings.held([self._hand]) else NO_ROW
        self._rings.remove(rows)

    def victims(self) -> Iterator[int]:
        """Yield the chunks that were not used since the hand has passed by, from old to new."""
        rings, was_used = self._rings, self._was_used
        offered: set[int] = set()
        left, passed = len(rings), 0
        while left:
            row = rings.coldest(_RING) if self._hand == NO_ROW else self._hand
            if was_used[row] and passed < MAX_PASSED:
                was_used[row] = 0
                passed += 1
            elif row not in offered:
                offered.add(row)
                left, passed = left - 1, 0
                self._hand = row
                yield row
            self._hand = rings.warmer(row)
