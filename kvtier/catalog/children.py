"""The number of children of each chunk in one tier, in one byte per row."""

from __future__ import annotations

from collections.abc import Sequence

_MANY = 255
"""The number of children is in a dictionary."""


class ChildCounts:
    """Counts by row. The owner extends :attr:`counts` when rows are added."""

    def __init__(self) -> None:
        self.counts = bytearray()
        """The number of children of each row, up to 254; 255 for more."""
        self._many: dict[int, int] = {}

    def of(self, row: int) -> int:
        """Return the number of children of a row."""
        count = self.counts[row]
        return count if count < _MANY else self._many[row]

    def add(self, row: int) -> None:
        """Count one more child of a row."""
        count = self.counts[row]
        if count < _MANY - 1:
            self.counts[row] = count + 1
        else:
            self._many[row] = self._many.get(row, count) + 1
            self.counts[row] = _MANY

    def add_all(self, rows: Sequence[int]) -> None:
        """Count one more child of each row."""
        counts = self.counts
        for row in rows:
            if counts[row] < _MANY - 1:
                counts[row] += 1
            else:
                self.add(row)

    def remove(self, row: int) -> int:
        """Count one child less of a row. Return how many are left."""
        count = self.counts[row]
        if count < _MANY:
            self.counts[row] = count - 1
            return count - 1
        left = self._many[row] - 1
        if left < _MANY:
            del self._many[row]
            self.counts[row] = left
        else:
            self._many[row] = left
        return left
