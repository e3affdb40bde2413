"""Partial matches: chunks whose first blocks are those of a prompt, but not all.

For each block of a chunk, the first byte of its hash is kept here, its *tag*. Tags suffice to find the chunk
that shares most leading blocks. The reader compares the whole hashes, which are in the chunk's header.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.catalog.eviction import ChunkColumns
from kvtier.catalog.table import NO_ROW, Rows
from kvtier.memory.keys import BLOCK_HASH_BYTES, MAX_BLOCK_HASHES, ChunkKey

_NONE, _SEVERAL = -1, -2
_ROWS = 4096
"""Rows to add to the columns at once."""

Parent = int | bytes
"""The row of the chunk before a chunk. Without one: the key of the root, and the chunk's first tag. A root
may have millions of children, of which only those with the same first tag can begin alike."""


def block_tags_of(hashes: bytes) -> bytes:
    """Return one tag for each block, given the joined hashes of the blocks."""
    return hashes[::BLOCK_HASH_BYTES]


class PromptTags(NamedTuple):
    """The tags of all whole blocks of a prompt."""

    root: ChunkKey
    """The key before the first chunk."""
    block_tags: bytes
    per_chunk: int
    """The number of tags of a whole chunk."""

    def after(self, keys: Sequence[ChunkKey]) -> tuple[ChunkKey, bytes]:
        """Return the key of the last of the leading chunks ``keys``, and the tags of the chunk after it."""
        start = len(keys) * self.per_chunk
        return keys[-1] if keys else self.root, self.block_tags[start : start + self.per_chunk]


class PartialMatch(NamedTuple):
    """A chunk that begins like a prompt."""

    key: ChunkKey
    equal: int
    """How many of its leading tags are equal: an upper bound of the equal blocks, usually their number."""
    blocks: int
    """How many tags it has: one for each whole block, or for several (``ChunkLayout.granularity``)."""
    equal_later: int = 0
    """How many tags behind the first that differs are equal again."""


class BranchIndex:
    """The children of each chunk, sorted by their tags.

    Flat columns of 21 bytes per chunk, which take no memory without tags. Only a chunk with several children
    has an array of them. Finding one takes time proportional to the logarithm of their number.
    """

    def __init__(self, parents: Sequence[int]) -> None:
        """``parents``: the catalog's column. The parent of a row must not change between add and remove."""
        self._parents = parents
        self._block_tags = bytearray()
        self._counts = bytearray()
        """The number of tags of each row; 0 for rows that are not here."""
        self._only = array("i")
        """The only child of each row, or :data:`_NONE`, or :data:`_SEVERAL`."""
        self._several: dict[Parent, array[int]] = {}
        """The children of each root, and of each row that has several."""
        self._roots: dict[int, bytes] = {}
        """The parents of rows whose parent has no row."""

    def __bool__(self) -> bool:
        """Whether any chunk was ever added."""
        return bool(self._counts)

    def add(self, row: int, parent: ChunkKey, block_tags: bytes) -> None:
        """Add a chunk, after its parent if it has any, or replace its block_tags."""
        self.remove(row)
        if not 0 < len(block_tags) <= MAX_BLOCK_HASHES:
            return
        above = self._parents[row]
        self._grow(max(row, above))
        at = row * MAX_BLOCK_HASHES
        self._block_tags[at : at + len(block_tags)] = block_tags
        self._counts[row] = len(block_tags)
        if above < 0:
            self._roots[row] = parent + block_tags[:1]
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
        """Return how many tags a chunk has; 0 if it is not here."""
        return self._counts[row] if self.has(row) else 0

    def best(self, parent: int | ChunkKey, block_tags: bytes) -> tuple[int, int]:
        """Return the child that shares most leading tags, and their number; 0 if no child shares any."""
        children = self._children(parent if isinstance(parent, int) else parent + block_tags[:1])
        at = bisect_left(children, block_tags, key=self._block_tags_of)
        near = children[max(0, at - 1) : at + 1]
        shared = [_equal(self._block_tags_of(row), block_tags) for row in near]
        most = max(shared, default=0)
        return (near[shared.index(most)], most) if most else (_NONE, 0)

    def superseded(self, row: int, *, equal: bool) -> list[int]:
        """Return the siblings that a chunk begins with; with ``equal``, also those with the same tags."""
        siblings, block_tags = self._of(row), self._block_tags_of(row)
        at = bisect_left(siblings, block_tags, key=self._block_tags_of)
        found = [
            other
            for other in siblings[max(0, at - 1) : at]
            if block_tags.startswith(self._block_tags_of(other))
        ]
        while equal and at < len(siblings) and self._block_tags_of(siblings[at]) == block_tags:
            found += [siblings[at]] * (siblings[at] != row)
            at += 1
        return found

    def is_superseded(self, row: int) -> bool:
        """Return whether a longer sibling begins with all blocks of a chunk."""
        siblings, block_tags = self._of(row), self._block_tags_of(row)
        at = bisect_left(siblings, block_tags + b"\0", key=self._block_tags_of)
        return at < len(siblings) and self._block_tags_of(siblings[at]).startswith(block_tags)

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
        children.insert(bisect_left(children, self._block_tags_of(row), key=self._block_tags_of), row)

    def _take_out(self, parent: Parent, row: int) -> None:
        if isinstance(parent, int) and self._only[parent] == row:
            self._only[parent] = _NONE
            return
        children = self._several[parent]
        at = bisect_left(children, self._block_tags_of(row), key=self._block_tags_of)
        del children[children.index(row, at)]
        if isinstance(parent, int):
            if len(children) == 1:
                self._only[parent] = children[0]
                del self._several[parent]
        elif not children:
            del self._several[parent]

    def _block_tags_of(self, row: int) -> bytes:
        at = row * MAX_BLOCK_HASHES
        return bytes(self._block_tags[at : at + self._counts[row]])

    def _grow(self, row: int) -> None:
        missing = -(-(row + 1 - len(self._counts)) // _ROWS) * _ROWS
        if missing > 0:
            self._counts += bytes(missing)
            self._block_tags += bytes(missing * MAX_BLOCK_HASHES)
            self._only += array("i", [_NONE]) * missing


class PartialMatchIndex(BranchIndex):
    """Finds chunks by key that begin like a prompt, or that another one makes useless, in any tier."""

    def __init__(
        self, columns: ChunkColumns, rows: Rows, ready: Sequence[int], pending: Sequence[int]
    ) -> None:
        """``ready`` and ``pending``: the catalog's masks of tiers."""
        super().__init__(columns.parents)
        self._columns = columns
        self._find = rows.find
        self._ready, self._pending = ready, pending

    def set(self, key: ChunkKey, parent: ChunkKey, block_tags: bytes) -> None:
        """Record the tags of a chunk; ignored if it is in no tier."""
        row = self._find(key)
        if row != NO_ROW and self._ready[row] | self._pending[row]:
            self.add(row, parent, block_tags)

    def knows(self, key: ChunkKey) -> bool:
        """Return whether the tags of a chunk are known."""
        row = self._find(key)
        return row != NO_ROW and self.has(row)

    def like(self, parent: ChunkKey, block_tags: bytes) -> PartialMatch | None:
        """Return the chunk after ``parent`` that shares most leading tags, if any does."""
        above = self._find(parent)
        row, shared = self.best(parent if above == NO_ROW else above, block_tags)
        if not shared:
            return None
        behind = zip(self._block_tags_of(row)[shared + 1 :], block_tags[shared + 1 :], strict=False)
        again = sum(own == other for own, other in behind)
        return PartialMatch(self._columns.key(row), shared, self.count(row), again)

    def superseded_by(self, key: ChunkKey, *, whole: bool) -> list[ChunkKey]:
        """Return the shorter chunks that a chunk makes useless.

        A chunk that is not ``whole`` also supersedes others of the same blocks, and itself if a longer one
        begins with its blocks.
        """
        row = self._find(key)
        if row == NO_ROW:
            return []
        is_useless = not whole and self.is_superseded(row)
        return self._columns.keys_of([row] if is_useless else self.superseded(row, equal=not whole))


def _equal(block_tags: bytes, others: bytes) -> int:
    for at, (tag, other) in enumerate(zip(block_tags, others, strict=False)):
        if tag != other:
            return at
    return min(len(block_tags), len(others))
