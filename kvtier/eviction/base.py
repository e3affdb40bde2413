"""The contract of eviction policies: which chunk goes first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence


class EvictionPolicy(ABC):
    """Orders the chunks of one tier. Named by the hook ``kvtier_eviction_policies``.

    A chunk is named by its *row*: the small dense integer under which the catalog keeps it, given to
    another chunk after its removal. So a policy can hold its state in flat arrays, and must, to serve ten
    million chunks. All calls come from the event loop and must not block.
    """

    @abstractmethod
    def added(self, row: int, parent: int) -> None:
        """A chunk came into the tier; ``parent`` is the row of the chunk before it, or -1 if unknown.

        Where that chunk has left every tier its row may be vacant, or another chunk's: chains may be wrong,
        even circular, and no more than the order of eviction may depend on them.
        """

    @abstractmethod
    def used(self, rows: Sequence[int]) -> None:
        """A prefix was asked for: its rows from the root on. Those not in this tier are passed over."""

    @abstractmethod
    def removed(self, row: int) -> None:
        """A chunk left the tier."""

    def added_chain(self, rows: Sequence[int], parent: int) -> None:
        """Consecutive chunks of one prompt came into the tier: as :meth:`added` of each, which this calls."""
        for row in rows:
            self.added(row, parent)
            parent = row

    def removed_all(self, rows: Sequence[int]) -> None:
        """Many chunks left the tier: as :meth:`removed` of each, which this calls."""
        for row in rows:
            self.removed(row)

    @abstractmethod
    def victims(self) -> Iterator[int]:
        """Rows in the order in which they should go. The caller may stop at any time;
        it changes nothing before.
        """
