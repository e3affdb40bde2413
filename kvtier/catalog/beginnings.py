"""What chunks begin with, by key: finds one that begins like a prompt, or that another makes useless."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvtier.catalog.eviction import ChunkColumns
from kvtier.catalog.pins import ChunkPins
from kvtier.catalog.rows import Rows
from kvtier.catalog.siblings import Siblings, Similar
from kvtier.catalog.table import NO_ROW
from kvtier.memory.keys import ChunkKey


class Beginnings:
    """The marks (:mod:`kvtier.catalog.siblings`) of the chunks in some tier."""

    def __init__(
        self, columns: ChunkColumns, rows: Rows, ready: Sequence[int], pending: Sequence[int], pins: ChunkPins
    ) -> None:
        """``ready`` and ``pending``: the catalog's masks of tiers."""
        self._columns = columns
        self._rows = rows
        self._ready, self._pending = ready, pending
        self._pins = pins
        self._siblings = Siblings(columns.parents)

    def __bool__(self) -> bool:
        """Whether any marks were ever recorded."""
        return bool(self._siblings)

    def set(self, key: ChunkKey, parent: ChunkKey, marks: bytes) -> None:
        """Record what a chunk begins with; ignored if it is in no tier."""
        row = self._rows.find(key)
        if row != NO_ROW and self._ready[row] | self._pending[row]:
            self._siblings.add(row, parent, marks)

    def remove(self, row: int) -> None:
        """Forget a row; ignored if it is not known. Call it before its parent changes."""
        self._siblings.remove(row)

    def remove_all(self, rows: Sequence[int]) -> None:
        """Forget rows, as :meth:`remove`."""
        self._siblings.remove_all(rows)

    def has(self, key: ChunkKey) -> bool:
        """Return whether it is known what a chunk begins with."""
        row = self._rows.find(key)
        return row != NO_ROW and self._siblings.has(row)

    def like(self, parent: ChunkKey, marks: bytes) -> Similar | None:
        """Return the chunk after ``parent`` that shares most leading marks, if any does."""
        above = self._rows.find(parent)
        row, shared = self._siblings.best(parent if above == NO_ROW else above, marks)
        return Similar(self._columns.key(row), shared, self._siblings.count(row)) if shared else None

    def superseded(self, key: ChunkKey, *, whole: bool) -> list[ChunkKey]:
        """Return the shorter chunks that a chunk makes useless, unless they are pinned.

        A chunk that is not ``whole`` also supersedes others of the same blocks, and itself if a longer one
        begins with its blocks.
        """
        row = self._rows.find(key)
        if row == NO_ROW:
            return []
        if not whole and self._siblings.is_superseded(row):
            rows = [row]
        else:
            rows = self._siblings.superseded(row, equal=not whole)
        now = time.monotonic()
        return [found for found in self._columns.keys_of(rows) if not self._pins.holds(found, now)]
