"""The choice of chunks to evict: in the policy's order, but each chunk before its parent."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.catalog.children import ChildCounts
from kvtier.catalog.eviction import ChunkColumns, EvictionPolicy

IsLeased = Callable[[int], bool]
"""Returns whether the chunk in a row is in use."""


class Selection:
    """Chooses victims while a policy offers one row after another.

    A chunk is chosen once each of its children in the tier was chosen or must stay; if these come later in
    the policy's order, it is deferred until then. So a chunk that is in use does not keep its prefix in the
    tier, but a prefix that is not in use is evicted from its end.
    """

    def __init__(
        self,
        columns: ChunkColumns,
        children: ChildCounts,
        may_leave: Callable[[int], bool],
        is_leased: IsLeased | None,
        needed_bytes: int,
        limit: int | None,
    ) -> None:
        self._parents, self._lengths = columns.parents, columns.lengths
        self._children, self._counts = children, children.counts
        self._may_leave = may_leave
        self._is_leased = is_leased
        self._needed_bytes = needed_bytes
        self._left = -1 if limit is None else limit
        self._chosen: list[int] = []
        self._deferred: dict[int, None] = {}
        self._finished: dict[int, int] = {}
        """By row: how many of its children are chosen or must stay."""

    def of(self, policy: EvictionPolicy) -> list[int]:
        """Return the chosen rows, in order."""
        policy.victims(self._needed_bytes, self._must_stay)
        # In a corrupt, circular chain every chunk waits for another: it must not stay in the tier for ever.
        return self._chosen or list(self._deferred)[-1:]

    def _must_stay(self, row: int) -> bool:
        if self._needed_bytes <= 0 or not self._left:
            return False  # It is not chosen: this only ends the policy's search.
        if not self._may_leave(row):
            self._finish(row)
            return True
        self._left -= 1
        if self._is_leased is not None and self._is_leased(row):
            self._finish(row)
            return True
        if self._counts[row] and self._finished.get(row, 0) < self._children.of(row):
            self._deferred[row] = None
            return True
        self._chosen.append(row)
        self._needed_bytes -= self._lengths[row]
        self._finish(row)
        return False

    def _finish(self, row: int) -> None:
        """Record that a chunk is chosen or must stay. Choose its parent if that was only waiting for it."""
        while (row := self._parents[row]) >= 0:
            finished = self._finished[row] = self._finished.get(row, 0) + 1
            if row not in self._deferred or finished < self._children.of(row):
                return
            del self._deferred[row]
            self._chosen.append(row)
            self._needed_bytes -= self._lengths[row]
