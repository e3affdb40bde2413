"""The number of children of each chunk in one tier, in one byte per row."""

from __future__ import annotations

from collections.abc import Sequence

MANY = 255
"""A count that says that the number is in a dictionary: use :meth:`ChildCounts.of`."""


class ChildCounts:
    """Counts by row. The owner extends :attr:`counts` when rows are added."""

    def __init__(self) -> None:
        self.counts = bytearray()
        """The number of children of each row, up to 254; 255 for more."""
        self._many: dict[int, int] = {}

    def of(self, row: int) -> int:
        """Return the number of children of a row."""
        count = self.counts[row]
        return count if count < MANY else self._many[row]

    def add(self, row: int) -> None:
        """Count one more child of a row."""
        count = self.counts[row]
        if count < MANY - 1:
            self.counts[row] = count + 1
        else:
            self._many[row] = self._many.get(row, count) + 1
            self.counts[row] = MANY

    def add_all(self, rows: Sequence[int]) -> None:
        """Count one more child of each row."""
        counts = self.counts
        for row in rows:
            if counts[row] < MANY - 1:
                counts[row] += 1
            else:
                self.add(row)

    def remove(self, row: int) -> None:
        """Decrement the number of children of a row."""
        if self.counts[row] < MANY:
            self.counts[row] -= 1
            return
        left = self._many[row] = self._many[row] - 1
        if left < MANY:
            del self._many[row]
            self.counts[row] = left

    def remove_all(self, rows: Sequence[int]) -> None:
        """Decrement the number of children of each row, once for each mention."""
        counts = self.counts
        for row in rows:
            if counts[row] < MANY:
                counts[row] -= 1
            else:
                self.remove(row)
