"""LRU eviction policy."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from kvtier import native
from kvtier.catalog.eviction import NO_PARENT, ChunkColumns, EvictionPolicy, PolicySettings, RemovalReason

_ABSENT = -1
_ENDS = 0
"""Place 0 of the ring is the sentinel for both ends. The chunk in row *n* has place *n* + 1."""


class LruPolicy(EvictionPolicy):
    """A doubly linked ring in two flat arrays, from the coldest to the warmest chunk: 8 bytes per chunk.

    A new chunk is linked just colder than its parent, and a used prefix is touched from its end to its root.
    So a leaf is colder than its parent.
    """

    def __init__(self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns) -> None:
        super().__init__(settings, capacity_bytes, chunks)
        self._parents = chunks.parents
        self._warmer = array("i", [_ENDS])
        self._colder = array("i", [_ENDS])

    def added(self, rows: Sequence[int], now: float) -> None:
        """Link chunks just colder than their parents, or as the warmest if the parent is not in the tier."""
        if not rows:
            return
        highest = max(rows) + 1
        if highest >= len(self._warmer):
            unlinked = array("i", [_ABSENT]) * (highest + 1 - len(self._warmer))
            self._warmer += unlinked
            self._colder += unlinked
        parent = self._parents[rows[0]]
        if native.available():
            native.core.lru_link_chain(self._warmer, self._colder, rows, parent)
            return
        for row in rows:
            self._link(row + 1, parent + 1 if parent != NO_PARENT and self._holds(parent + 1) else _ENDS)
            parent = row

    def used(self, rows: Sequence[int], now: float) -> None:
        """Make a prefix the warmest, its root last."""
        if native.available():
            native.core.lru_touch(self._warmer, self._colder, rows)
            return
        warmer, colder = self._warmer, self._colder
        places = len(warmer)
        # _unlink and _link inlined: this runs for every chunk of every lookup.
        for row in reversed(rows):
            place = row + 1
            if place < places and warmer[place] != _ABSENT:
                above, below = warmer[place], colder[place]
                warmer[below], colder[above] = above, below
                warmest = colder[_ENDS]
                warmer[place], colder[place] = _ENDS, warmest
                warmer[warmest] = colder[_ENDS] = place

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        """Unlink chunks."""
        if native.available():
            native.core.lru_unlink(self._warmer, self._colder, rows)
            return
        for place in (row + 1 for row in rows):
            if self._holds(place):
                self._unlink(place)
                self._warmer[place] = self._colder[place] = _ABSENT

    def victims(self) -> Iterator[int]:
        """Yield the coldest chunk first."""
        return native.core.LruOrder(self._warmer) if native.available() else self._order()

    def _order(self) -> Iterator[int]:
        warmer = self._warmer
        place = warmer[_ENDS]
        while place != _ENDS:
            yield place - 1
            place = warmer[place]

    def _holds(self, place: int) -> bool:
        return place < len(self._warmer) and self._warmer[place] != _ABSENT

    def _link(self, place: int, warmer: int) -> None:
        colder = self._colder[warmer]
        self._warmer[place], self._colder[place] = warmer, colder
        self._warmer[colder] = self._colder[warmer] = place

    def _unlink(self, place: int) -> None:
        warmer, colder = self._warmer[place], self._colder[place]
        self._warmer[colder] = warmer
        self._colder[warmer] = colder
