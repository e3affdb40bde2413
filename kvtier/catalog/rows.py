"""The rows of the catalog: which chunk has which, and the columns that describe it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from kvtier.catalog.eviction import ChunkColumns
from kvtier.catalog.namespaces import Namespaces
from kvtier.memory.keys import KEY_BYTES, ChunkKey

ROWS_A_BLOCK = 4096
"""Rows to add to all columns at once."""


class Rows:
    """Maps keys to rows, and reuses those of chunks that are gone.

    256 dictionaries by the key's first byte, because the growth of a single one with ten million entries
    blocks for half a second.
    """

    def __init__(
        self, columns: ChunkColumns, masks: Sequence[bytearray], lengths: Sequence[array[int]]
    ) -> None:
        """``masks`` and ``lengths``: further columns, to grow together with these."""
        self.by_key: list[dict[ChunkKey, int]] = [{} for _ in range(256)]
        """The row of each key, by the first byte of the key. Read-only for others."""
        self.spaces = array("I")
        """The number of each chunk's namespace."""
        self.generations = array("I")
        """The generation of each chunk: see :class:`Namespaces`."""
        self.namespaces = Namespaces()
        self.size = 0
        """Rows that have been used; the columns except the keys may be longer."""
        self._columns = columns
        self._keys, self._parents, self._lengths = columns.keys, columns.parents, columns.lengths
        self._vacant: list[int] = []
        self._masks = masks
        self._numbers = (self._parents, self._lengths, self.spaces, self.generations, *lengths)

    def __len__(self) -> int:
        """Return the number of chunks."""
        return self.size - len(self._vacant)

    def find(self, key: ChunkKey) -> int | None:
        """Return the row of a chunk, if it has one."""
        return self.by_key[key[0]].get(key)

    def new(self, key: ChunkKey, length: int, parent: int, namespace: bytes) -> int:
        """Create the row of a chunk that has none. ``parent`` is a row."""
        if self._vacant:
            row = self._vacant.pop()
            self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
        else:
            row = self.size
            if row == len(self._parents):
                self._grow()
            self.size = row + 1
            self._keys += key
        space = self.namespaces.number(namespace)
        self._fill(row, length, parent, space, self.namespaces.generation(space))
        self.by_key[key[0]][key] = row
        return row

    def new_chain(
        self, keys: Sequence[ChunkKey], lengths: Sequence[int], parent: int, namespace: bytes
    ) -> list[int]:
        """Create the rows of consecutive chunks that have none. ``parent``: the row before the first."""
        reused = min(len(keys), len(self._vacant))
        rows = self._vacant[-reused:][::-1] if reused else []
        del self._vacant[len(self._vacant) - reused :]
        first, stop = self.size, self.size + len(keys) - reused
        while stop > len(self._parents):
            self._grow()
        self.size = stop
        rows += range(first, stop)
        parents = [parent, *rows[:-1]]
        space = self.namespaces.number(namespace)
        generation = self.namespaces.generation(space)
        columns, numbers = self._keys, (self._parents, self._lengths, self.spaces, self.generations)
        all_parents, all_lengths, spaces, generations = numbers
        for row, key, length, before in zip(rows[:reused], keys, lengths, parents, strict=False):
            columns[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
            all_parents[row], all_lengths[row] = before, length
            spaces[row], generations[row] = space, generation
        if stop > first:
            self._keys += b"".join(keys[reused:])
            self._parents[first:stop] = array("i", parents[reused:])
            self._lengths[first:stop] = array("Q", lengths[reused:])
            self.spaces[first:stop] = array("I", [space]) * (stop - first)
            self.generations[first:stop] = array("I", [generation]) * (stop - first)
        by_key = self.by_key
        for key, row in zip(keys, rows, strict=True):
            by_key[key[0]][key] = row
        return rows

    def fill(self, row: int, length: int, parent: int, namespace: bytes) -> None:
        """Describe the chunk in a row."""
        space = self.namespaces.number(namespace)
        self._fill(row, length, parent, space, self.namespaces.generation(space))

    def _fill(self, row: int, length: int, parent: int, space: int, generation: int) -> None:
        self._parents[row] = parent
        self._lengths[row] = length
        self.spaces[row] = space
        self.generations[row] = generation

    def free(self, chunks: Iterable[tuple[ChunkKey, int]]) -> None:
        """Give up the rows of chunks, for other ones."""
        by_key, vacant = self.by_key, self._vacant
        for key, row in chunks:
            del by_key[key[0]][key]
            vacant.append(row)

    def begin_generation(self, keys: Iterable[ChunkKey]) -> None:
        """Begin a new generation of the namespaces of these chunks, for these chunks only."""
        begun: dict[int, int] = {}
        for key in keys:
            row = self.find(key)
            if row is None:
                continue
            space = self.spaces[row]
            if space not in begun:
                begun[space] = self.namespaces.begin_generation(space)
            self.generations[row] = begun[space]

    def _grow(self) -> None:
        """Add vacant rows to all columns except the keys."""
        for numbers in self._numbers:
            numbers.frombytes(bytes(ROWS_A_BLOCK * numbers.itemsize))
        for mask in self._masks:
            mask += bytes(ROWS_A_BLOCK)
