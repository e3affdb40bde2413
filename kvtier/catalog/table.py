"""The catalog's rows: which chunk has which, what describes it, and batch operations on many of them.

The batch operations are in the native core, and here for builds without it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TypeAlias

from kvtier import native
from kvtier.catalog.eviction import NO_PARENT, ChunkColumns
from kvtier.memory.keys import KEY_BYTES, ChunkKey

MAX_TIERS = 8
"""One bit per tier in a byte."""
FASTEST = [(mask & -mask).bit_length() - 1 for mask in range(1 << MAX_TIERS)]
"""The lowest tier number in a bit mask of tiers; -1 for an empty mask."""
NO_ROW = -1
"""In place of a row: the chunk has none."""
_NO_TIER = 255
ROWS_A_BLOCK = 4096
"""Rows to add to all columns at once."""
_BITS = (1 << 32) - 1


class TableColumns:
    """The columns that a table reads and writes. Their owner extends them all together."""

    def __init__(self, columns: ChunkColumns, lengths: Sequence[array[int]]) -> None:
        """``lengths``: those in each tier, which may be the columns' own."""
        self.shared = columns
        self.ready, self.pending = bytearray(), bytearray()
        """The bit mask of the tiers in which each chunk is READY or PENDING."""
        self.spaces, self.generations = array("I"), array("I")
        """The number of each chunk's namespace, and its generation: see :class:`Namespaces`."""
        self.lengths = lengths
        self.children = [array("I") for _ in lengths]
        """By tier: how many chunks there name each chunk as their parent."""


class PythonTable:
    """Which chunk has which row, and operations on many chunks that change several columns.

    Synchronous and not thread-safe. Each call takes time proportional to its arguments: in the native core
    10 to 200 ns per chunk, of which cache misses of the processor are most.
    """

    def __init__(self, columns: TableColumns) -> None:
        self.parents_only = 0
        """Number of rows of chunks that are in no tier, but the parent of one that is."""
        # 256, by the key's first byte: the growth of one with ten million entries blocks for half a second.
        self._rows: list[dict[bytes, int]] = [{} for _ in range(256)]
        self._columns = columns
        self._keys, self._parents = columns.shared.keys, columns.shared.parents
        self._ready, self._pending = columns.ready, columns.pending

    def find(self, key: ChunkKey) -> int:
        """Return the row of a chunk, or :data:`NO_ROW`."""
        return self._rows[key[0]].get(key, NO_ROW) if key else NO_ROW

    def find_all(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Return the rows of chunks, :data:`NO_ROW` for those that have none."""
        return [self.find(key) for key in keys]

    def prefix(self, keys: Sequence[ChunkKey], among: int) -> tuple[list[int], bytes]:
        """Return the rows of the leading chunks that are READY in some tier, and the fastest one of each.

        ``among``: a bit mask of the tiers to consider.
        """
        rows: list[int] = []
        for key in keys:
            row = self.find(key)
            if row == NO_ROW:
                break
            rows.append(row)
        tiers = bytes([self._ready[row] for row in rows]).translate(_fastest_of(among))
        held = tiers.find(_NO_TIER)
        return (rows, tiers) if held < 0 else (rows[:held], tiers[:held])

    def absent(self, keys: Sequence[ChunkKey], tier: int) -> list[int]:
        """Return the positions of the chunks that are not READY in a tier."""
        ready = self._ready
        rows = enumerate(self.find_all(keys))
        return [at for at, row in rows if row == NO_ROW or not ready[row] >> tier & 1]

    def fill(
        self,
        keys: Sequence[ChunkKey],
        rows: Sequence[int],
        lengths: Sequence[int],
        parent: int,
        space: int,
        generation: int,
    ) -> None:
        """Describe consecutive chunks in vacant rows. ``parent``: the row before the first.

        Raises ``ValueError``, and gives no row to any, if one of them has one or occurs twice.
        """
        if any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"a key must have {KEY_BYTES} bytes")
        if len(set(keys)) < len(keys) or any(self.find(key) != NO_ROW for key in keys):
            raise ValueError("a chunk occurs twice")
        columns = self._columns
        for key, row, length in zip(keys, rows, lengths, strict=True):
            self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
            self._parents[row], columns.shared.lengths[row] = parent, length
            columns.spaces[row], columns.generations[row] = space, generation
            self._rows[key[0]][key] = parent = row

    def enter(self, rows: Sequence[int], tier: int, ready: bool) -> int:
        """Set the tier's bit of chunks that are not there. Return the sum of their lengths."""
        masks = self._ready if ready else self._pending
        lengths, own, children = self._columns.shared.lengths, *self._of(tier)
        used = 0
        for row in rows:
            masks[row] |= 1 << tier
            own[row] = lengths[row]
            used += lengths[row]
            if (parent := self._parents[row]) >= 0:
                children[parent] += 1
        return used

    def leave(self, keys: Sequence[ChunkKey], tier: int) -> tuple[list[int], int]:
        """Clear the tier's bit of chunks. Return their rows, and the sum of their lengths.

        Raises ``KeyError`` with the key, and changes nothing, if one is not there or occurs twice. Call
        :meth:`release` next.
        """
        rows, seen, ready, pending = self.find_all(keys), set[int](), self._ready, self._pending
        for key, row in zip(keys, rows, strict=True):
            if row == NO_ROW or row in seen or not (ready[row] | pending[row]) >> tier & 1:
                raise KeyError(key)
            seen.add(row)
        for row in rows:
            ready[row] &= ~(1 << tier)
            pending[row] &= ~(1 << tier)
        lengths, _ = self._of(tier)
        return rows, sum(lengths[row] for row in rows)

    def release(self, rows: Sequence[int], tier: int) -> list[int]:
        """Give up the rows of chunks that have left a tier, and of their parents, if nothing needs them.

        A row is needed while its chunk is in some tier, or the parent of one that is. Return those that are
        vacant now.
        """
        above = [parent for row in rows if (parent := self._parents[row]) >= 0]
        _, children = self._of(tier)
        for parent in above:
            children[parent] -= 1
        may_free_parents = self.parents_only > 0
        freed = []
        for row in rows:
            if self._ready[row] | self._pending[row]:
                continue
            if self._is_parent(row):
                self._parents[row] = NO_PARENT
                self.parents_only += 1
            elif self._erase(row):
                freed.append(row)
        # Chunks that have just left are freed above, if they have no children left.
        return freed + self.free_parents(above) if may_free_parents else freed

    def free_parents(self, rows: Sequence[int]) -> list[int]:
        """Give up those of the rows that nothing needs any more, and return them."""
        freed = []
        for row in rows:
            if self._ready[row] | self._pending[row] or self._is_parent(row):
                continue
            if self._erase(row):  # Otherwise the row was freed together with its last child's.
                freed.append(row)
                self.parents_only -= 1
        return freed

    def _erase(self, row: int) -> bool:
        key = self._columns.shared.key(row)
        if self.find(key) != row:
            return False
        del self._rows[key[0]][key]
        return True

    def _is_parent(self, row: int) -> bool:
        return any(children[row] for children in self._columns.children)

    def _of(self, tier: int) -> tuple[array[int], array[int]]:
        return self._columns.lengths[tier], self._columns.children[tier]


ChunkTable: TypeAlias = "PythonTable | native.core.ChunkTable"


def make_table(columns: TableColumns) -> ChunkTable:
    """Return an empty table, native if possible."""
    if not native.available():
        return PythonTable(columns)
    shared = columns.shared
    return native.core.ChunkTable(
        shared.keys,
        shared.parents,
        columns.ready,
        columns.pending,
        columns.spaces,
        columns.generations,
        shared.lengths,
        columns.lengths,
        columns.children,
    )


@cache
def _fastest_of(among: int) -> bytes:
    """Return the lowest tier number of each bit mask of tiers, among those of another bit mask."""
    return bytes(FASTEST[mask & among] % 256 for mask in range(1 << MAX_TIERS))


class Rows:
    """Gives rows to chunks, and reuses those of removed chunks."""

    def __init__(self, columns: TableColumns, now: Callable[[], int]) -> None:
        """``now``: the second to note for new chunks."""
        self._now = now
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
        since, now = self._columns.shared.since, self._now()
        for row in rows:
            since[row] = now
        del self._vacant[left:]
        self.size = stop
        return rows

    def describe(self, row: int, length: int, parent: int, namespace: bytes) -> None:
        """Describe the chunk in a row."""
        space = self.namespaces.number(namespace)
        self._parents[row], self._columns.shared.lengths[row] = parent, length
        self._columns.spaces[row], self._columns.shared.since[row] = space, self._now()
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
            columns.shared.since,
            columns.spaces,
            columns.generations,
            *lengths.values(),
            *columns.children,
        ):
            numbers.frombytes(bytes(ROWS_A_BLOCK * numbers.itemsize))


class Namespaces:
    """The namespaces of chunks by number, and the generation of each. Numbers are dense, and never reused.

    Clearing chunks begins a new generation of their namespace. Each chunk has the generation in which it was
    stored or last cleared. A copy, read or query is outdated if this has changed since it began.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {b"": 0}
        self._generations = [0]
        self._common = 0
        """Number of generations that all namespaces have begun together."""
        self._reset: set[bytes] = set()
        self._all_reset = False

    def number(self, namespace: bytes) -> int:
        """Return the number of a namespace, which is added if it is new."""
        number = self._numbers.get(namespace)
        if number is None:
            number = self._numbers[namespace] = len(self._generations)
            self._generations.append(0)
        return number

    def known(self) -> list[bytes]:
        """Return all namespaces of chunks that are, or have been, in any tier."""
        return list(self._numbers)

    def find(self, namespace: bytes) -> int:
        """Return the number of a namespace, or -1 if it is unknown."""
        return self._numbers.get(namespace, -1)

    def generation(self, number: int) -> int:
        """Return the current generation of a namespace."""
        return self._generations[number] + self._common & _BITS

    def generation_of(self, namespace: bytes) -> int:
        """Return the current generation of a namespace, which may be unknown."""
        number = self._numbers.get(namespace)
        return self._common & _BITS if number is None else self.generation(number)

    def begin_generation(self, number: int) -> int:
        """Begin a new generation of a namespace, and return it."""
        self._generations[number] += 1
        return self.generation(number)

    def reset(self, namespace: bytes | None) -> None:
        """Record that a namespace, or every one, is cleared for good, because the weights have changed."""
        if namespace is None:
            self._common += 1
            self._all_reset = True
        else:
            self._reset.add(namespace)
            self.begin_generation(self.number(namespace))

    def is_reset(self, namespace: bytes) -> bool:
        """Whether chunks of a namespace that other hosts have stored must not be used."""
        return self._all_reset or namespace in self._reset
