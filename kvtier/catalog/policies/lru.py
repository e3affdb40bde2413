"""LRU eviction policy."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from kvtier import native
from kvtier.catalog.eviction import NO_PARENT, ChunkColumns, EvictionPolicy, PolicySettings, RemovalReason

_ABSENT = -1
_ENDS = 0
"""Node 0 of the ring is the sentinel for both ends. The chunk in row *n* has node *n* + 1."""


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
        # Just colder than the parent: so the catalog never has to defer a chunk until its children leave.
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
        nodes = len(warmer)
        # _unlink and _link inlined: this runs for every chunk of every lookup.
        for row in reversed(rows):
            node = row + 1
            if node < nodes and warmer[node] != _ABSENT:
                above, below = warmer[node], colder[node]
                warmer[below], colder[above] = above, below
                warmest = colder[_ENDS]
                warmer[node], colder[node] = _ENDS, warmest
                warmer[warmest] = colder[_ENDS] = node

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        """Unlink chunks."""
        if native.available():
            native.core.lru_unlink(self._warmer, self._colder, rows)
            return
        for node in (row + 1 for row in rows):
            if self._holds(node):
                self._unlink(node)
                self._warmer[node] = self._colder[node] = _ABSENT

    def victims(self) -> Iterator[int]:
        """Yield the coldest chunk first."""
        return native.core.LruOrder(self._warmer) if native.available() else self._order()

    def _order(self) -> Iterator[int]:
        warmer = self._warmer
        node = warmer[_ENDS]
        while node != _ENDS:
            yield node - 1
            node = warmer[node]

    def _holds(self, node: int) -> bool:
        return node < len(self._warmer) and self._warmer[node] != _ABSENT

    def _link(self, node: int, warmer: int) -> None:
        colder = self._colder[warmer]
        self._warmer[node], self._colder[node] = warmer, colder
        self._warmer[colder] = self._colder[warmer] = node

    def _unlink(self, node: int) -> None:
        warmer, colder = self._warmer[node], self._colder[node]
        self._warmer[colder] = warmer
        self._colder[warmer] = colder
