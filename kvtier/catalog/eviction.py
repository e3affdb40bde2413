"""Interface of eviction policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence


class EvictionPolicy(ABC):
    """Eviction order of the chunks of one tier. Provided through the hook ``kvtier_eviction_policies``.

    A chunk is identified by its *row*, its small dense index in the catalog, which is reused after the chunk
    is removed. A policy keeps its state in flat arrays indexed by row, to support ten million chunks. All
    calls come from the event loop and must not block.
    """

    @abstractmethod
    def added(self, row: int, parent: int) -> None:
        """Called when a chunk is added to the tier. ``parent`` is the row of its parent, or -1 if unknown.

        If the parent was removed from all tiers, its row may be vacant or reused. Chains may therefore be
        wrong, even circular; only the eviction order may depend on them.
        """

    @abstractmethod
    def used(self, rows: Sequence[int]) -> None:
        """Called when a prefix is used, with its rows from the root. Rows not in this tier are ignored."""

    @abstractmethod
    def removed(self, row: int) -> None:
        """Called when a chunk is removed from the tier."""

    def added_chain(self, rows: Sequence[int], parent: int) -> None:
        """Called when consecutive chunks of one prompt are added. Calls :meth:`added` for each by default."""
        for row in rows:
            self.added(row, parent)
            parent = row

    def removed_all(self, rows: Sequence[int]) -> None:
        """Called when several chunks are removed. Calls :meth:`removed` for each by default."""
        for row in rows:
            self.removed(row)

    @abstractmethod
    def victims(self) -> Iterator[int]:
        """Yield rows in eviction order. The caller may stop at any time, and changes nothing meanwhile."""
