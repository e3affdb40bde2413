"""LRU eviction policy that evicts a leaf before its parent."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from kvtier import native
from kvtier.catalog.eviction import EvictionPolicy

_ABSENT = -1
_ENDS = 0
"""Place 0 of the ring is the sentinel for both ends. The chunk in row *n* has place *n* + 1."""


class LruPolicy(EvictionPolicy):
    """A doubly linked ring in two flat arrays, from the coldest to the warmest chunk: 8 bytes per chunk.

    A new chunk is linked just colder than its parent, and a used prefix is touched from its end to its root.
    So a leaf is always colder than its parent, without child counters.
    """

    def __init__(self) -> None:
        self._warmer = array("i", [_ENDS])
        self._colder = array("i", [_ENDS])

    def added(self, row: int, parent: int) -> None:
        """Link a chunk just colder than its parent, or as the warmest if the parent is not in the tier."""
        place = row + 1
        self._grow(place)
        self._link(place, parent + 1 if self._holds(parent + 1) else _ENDS)

    def added_chain(self, rows: Sequence[int], parent: int) -> None:
        """Link consecutive chunks, about 30 times as fast with the native core."""
        if not native.available():
            super().added_chain(rows, parent)
        elif rows:
            self._grow(max(rows) + 1)
            native.core.lru_link_chain(self._warmer, self._colder, rows, parent)

    def used(self, rows: Sequence[int]) -> None:
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

    def removed(self, row: int) -> None:
        """Unlink a chunk."""
        place = row + 1
        if self._holds(place):
            self._unlink(place)
            self._warmer[place] = self._colder[place] = _ABSENT

    def removed_all(self, rows: Sequence[int]) -> None:
        """Unlink chunks."""
        if native.available():
            native.core.lru_unlink(self._warmer, self._colder, rows)
        else:
            super().removed_all(rows)

    def victims(self) -> Iterator[int]:
        """Yield rows from the coldest."""
        place = self._warmer[_ENDS]
        while place != _ENDS:
            yield place - 1
            place = self._warmer[place]

    def _grow(self, place: int) -> None:
        missing = place + 1 - len(self._warmer)
        if missing > 0:
            unlinked = array("i", [_ABSENT]) * missing
            self._warmer += unlinked
            self._colder += unlinked

    def _holds(self, place: int) -> bool:
        return 0 < place < len(self._warmer) and self._warmer[place] != _ABSENT

    def _link(self, place: int, warmer: int) -> None:
        colder = self._colder[warmer]
        self._warmer[place], self._colder[place] = warmer, colder
        self._warmer[colder] = self._colder[warmer] = place

    def _unlink(self, place: int) -> None:
        warmer, colder = self._warmer[place], self._colder[place]
        self._warmer[colder] = warmer
        self._colder[warmer] = colder
