"""The rows of the catalog: which chunk has which, and the columns that describe it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.catalog.namespaces import Namespaces
from kvtier.catalog.table import NO_ROW, TableColumns, make_table
from kvtier.memory.keys import KEY_BYTES, ChunkKey

ROWS_A_BLOCK = 4096
"""Rows to add to all columns at once."""


class Rows:
    """Gives rows to chunks, and reuses those of chunks that are gone."""

    def __init__(self, columns: TableColumns) -> None:
        self.table = make_table(columns)
        self.find = self.table.find
        """Return the row of a chunk, or :data:`NO_ROW`."""
        self.namespaces = Namespaces()
        self.size = 0
        """Rows that have been used; the columns may be longer."""
        self._columns = columns
        self._parents = columns.shared.parents
        self._vacant: list[int] = []

    def __len__(self) -> int:
        """Return the number of chunks."""
        return self.size - len(self._vacant)

    def new_chain(
        self, keys: Sequence[ChunkKey], lengths: Sequence[int], parent: int, namespace: bytes
    ) -> list[int]:
        """Create the rows of consecutive chunks that have none. ``parent``: the row before the first.

        Raises ``ValueError``, and creates none, if one has a row or occurs twice.
        """
        reused = min(len(keys), len(self._vacant))
        left = len(self._vacant) - reused
        rows, stop = self._vacant[left:][::-1], self.size + len(keys) - reused
        rows += range(self.size, stop)
        while stop > len(self._parents):
            self._grow()
        space = self.namespaces.number(namespace)
        self.table.fill(keys, rows, lengths, parent, space, self.namespaces.generation(space))
        del self._vacant[left:]
        self.size = stop
        return rows

    def describe(self, row: int, length: int, parent: int, namespace: bytes) -> None:
        """Describe the chunk in a row."""
        space = self.namespaces.number(namespace)
        self._parents[row], self._columns.shared.lengths[row] = parent, length
        self._columns.spaces[row] = space
        self._columns.generations[row] = self.namespaces.generation(space)

    def release(self, rows: Sequence[int], tier: int) -> None:
        """Make the rows of chunks that have left a tier vacant, and those of their parents, unless needed."""
        self._vacant += self.table.release(rows, tier)

    def free_parents(self, rows: Sequence[int]) -> None:
        """Make those of the rows vacant that nothing needs any more."""
        self._vacant += self.table.free_parents(rows)

    def begin_generation(self, keys: Iterable[ChunkKey]) -> None:
        """Begin a new generation of the namespaces of these chunks, for these chunks only."""
        begun: dict[int, int] = {}
        for key in keys:
            row = self.find(key)
            if row == NO_ROW:
                continue
            space = self._columns.spaces[row]
            if space not in begun:
                begun[space] = self.namespaces.begin_generation(space)
            self._columns.generations[row] = begun[space]

    def _grow(self) -> None:
        """Add vacant rows to all columns."""
        columns = self._columns
        columns.shared.keys += bytes(ROWS_A_BLOCK * KEY_BYTES)
        columns.ready += bytes(ROWS_A_BLOCK)
        columns.pending += bytes(ROWS_A_BLOCK)
        lengths = {id(of_tier): of_tier for of_tier in (columns.shared.lengths, *columns.lengths)}
        for numbers in (
            columns.shared.parents,
            columns.spaces,
            columns.generations,
            *lengths.values(),
            *columns.children,
        ):
            numbers.frombytes(bytes(ROWS_A_BLOCK * numbers.itemsize))
