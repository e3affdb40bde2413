"""Chunks that continue the same prefix, by the tokens that they begin with.

A prompt that leaves a stored chunk in its middle has equal leading blocks with it. One byte of the hash of
each block is kept here, its *mark*. Marks suffice to find the chunk that shares most blocks: whoever uses it
compares the whole hashes, which are in its header.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.memory.keys import BLOCK_HASH_BYTES, MAX_BLOCK_HASHES, ChunkKey

_NONE, _SEVERAL = -1, -2
_ROWS = 4096
"""Rows to add to the columns at once."""

Parent = int | bytes
"""The row of the chunk before a chunk. Without one the key, which is the root of a prompt, and the first mark
of the chunk: a root may have millions of children, of which only these can begin alike."""


def marks_of(hashes: bytes) -> bytes:
    """Return the marks of blocks, given their joined hashes."""
    return hashes[::BLOCK_HASH_BYTES]


class PromptMarks(NamedTuple):
    """The marks of all whole blocks of a prompt."""

    root: ChunkKey
    """The key before the first chunk."""
    marks: bytes
    per_chunk: int
    """The number of marks of a whole chunk."""

    def after(self, keys: Sequence[ChunkKey]) -> tuple[ChunkKey, bytes]:
        """Return the key of the last of the leading chunks ``keys``, and the marks of the chunk after it."""
        start = len(keys) * self.per_chunk
        return keys[-1] if keys else self.root, self.marks[start : start + self.per_chunk]


class Similar(NamedTuple):
    """A chunk that begins like another one."""

    key: ChunkKey
    equal: int
    """How many of its leading marks are equal. As many blocks are likely to be, and never more."""
    blocks: int
    """How many marks it has: one for each whole block, or for each few of them."""


class Siblings:
    """The children of each chunk, sorted by their marks.

    Flat columns of 21 bytes per chunk, which take no memory without marks. Only a chunk with several children
    has an array of them. Finding one takes time proportional to the logarithm of their number.
    """

    def __init__(self, parents: Sequence[int]) -> None:
        """``parents``: the catalog's column. The parent of a row must not change between add and remove."""
        self._parents = parents
        self._marks = bytearray()
        self._counts = bytearray()
        """The number of marks of each row; 0 for rows that are not here."""
        self._only = array("i")
        """The only child of each row, or :data:`_NONE`, or :data:`_SEVERAL`."""
        self._several: dict[Parent, array[int]] = {}
        """The children of each root, and of each row that has several."""
        self._roots: dict[int, bytes] = {}
        """The parents of rows whose parent has no row."""

    def __bool__(self) -> bool:
        """Whether any chunk was ever added."""
        return bool(self._counts)

    def add(self, row: int, parent: ChunkKey, marks: bytes) -> None:
        """Add a chunk, after its parent if it has any, or replace its marks."""
        self.remove(row)
        if not 0 < len(marks) <= MAX_BLOCK_HASHES:
            return
        above = self._parents[row]
        self._grow(max(row, above))
        at = row * MAX_BLOCK_HASHES
        self._marks[at : at + len(marks)] = marks
        self._counts[row] = len(marks)
        if above < 0:
            self._roots[row] = parent + marks[:1]
        self._insert(above if above >= 0 else self._roots[row], row)

    def remove(self, row: int) -> None:
        """Remove a chunk; ignored if it is not here. Call it before its parent changes."""
        if not self.has(row):
            return
        above = self._parents[row]
        self._take_out(above if above >= 0 else self._roots.pop(row), row)
        self._counts[row] = 0

    def remove_all(self, rows: Sequence[int]) -> None:
        """Remove chunks, as :meth:`remove`."""
        counts, known = self._counts, len(self._counts)
        for row in rows:
            if row < known and counts[row]:
                self.remove(row)

    def has(self, row: int) -> bool:
        """Return whether a chunk is here."""
        return row < len(self._counts) and self._counts[row] > 0

    def count(self, row: int) -> int:
        """Return how many marks a chunk has; 0 if it is not here."""
        return self._counts[row] if self.has(row) else 0

    def best(self, parent: int | ChunkKey, marks: bytes) -> tuple[int, int]:
        """Return the child that shares most leading marks, and their number, which is 0 if there is none."""
        children = self._children(parent if isinstance(parent, int) else parent + marks[:1])
        at = bisect_left(children, marks, key=self._marks_of)
        near = children[max(0, at - 1) : at + 1]
        shared = [_equal(self._marks_of(row), marks) for row in near]
        most = max(shared, default=0)
        return (near[shared.index(most)], most) if most else (_NONE, 0)

    def superseded(self, row: int, *, equal: bool) -> list[int]:
        """Return the siblings that a chunk begins with; with ``equal``, also those with the same marks."""
        siblings, marks = self._of(row), self._marks_of(row)
        at = bisect_left(siblings, marks, key=self._marks_of)
        found = [other for other in siblings[max(0, at - 1) : at] if marks.startswith(self._marks_of(other))]
        while equal and at < len(siblings) and self._marks_of(siblings[at]) == marks:
            found += [siblings[at]] * (siblings[at] != row)
            at += 1
        return found

    def is_superseded(self, row: int) -> bool:
        """Return whether a longer sibling begins with all blocks of a chunk."""
        siblings, marks = self._of(row), self._marks_of(row)
        at = bisect_left(siblings, marks + b"\0", key=self._marks_of)
        return at < len(siblings) and self._marks_of(siblings[at]).startswith(marks)

    def _of(self, row: int) -> Sequence[int]:
        if not self.has(row):
            return ()
        above = self._parents[row]
        return self._children(above if above >= 0 else self._roots[row])

    def _children(self, parent: Parent) -> Sequence[int]:
        if isinstance(parent, int):
            only = self._only[parent] if parent < len(self._only) else _NONE
            if only != _SEVERAL:
                return (only,) if only >= 0 else ()
        return self._several.get(parent, ())

    def _insert(self, parent: Parent, row: int) -> None:
        if isinstance(parent, int):
            only = self._only[parent]
            self._only[parent] = row if only == _NONE else _SEVERAL
            if only == _NONE:
                return
            if only != _SEVERAL:
                self._several[parent] = array("i", [only])
        children = self._several.setdefault(parent, array("i"))
        children.insert(bisect_left(children, self._marks_of(row), key=self._marks_of), row)

    def _take_out(self, parent: Parent, row: int) -> None:
        if isinstance(parent, int) and self._only[parent] == row:
            self._only[parent] = _NONE
            return
        children = self._several[parent]
        at = bisect_left(children, self._marks_of(row), key=self._marks_of)
        del children[children.index(row, at)]
        if isinstance(parent, int):
            if len(children) == 1:
                self._only[parent] = children[0]
                del self._several[parent]
        elif not children:
            del self._several[parent]

    def _marks_of(self, row: int) -> bytes:
        at = row * MAX_BLOCK_HASHES
        return bytes(self._marks[at : at + self._counts[row]])

    def _grow(self, row: int) -> None:
        missing = -(-(row + 1 - len(self._counts)) // _ROWS) * _ROWS
        if missing > 0:
            self._counts += bytes(missing)
            self._marks += bytes(missing * MAX_BLOCK_HASHES)
            self._only += array("i", [_NONE]) * missing


def _equal(marks: bytes, others: bytes) -> int:
    for at, (mark, other) in enumerate(zip(marks, others, strict=False)):
        if mark != other:
            return at
    return min(len(marks), len(others))
