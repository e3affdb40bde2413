"""Index of the chunks in each tier, with their state and pins.

Designed for ten million chunks as a structure of arrays: dictionaries, which the garbage collector skips, map
keys to *rows*, and everything else is in flat arrays indexed by row. One object per chunk would cost seconds
in every full collection. Synchronous and not thread-safe; each call takes time proportional to its
arguments. See ``benchmarks/catalog.py`` for measurements.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import compress, pairwise
from struct import Struct

from kvtier.catalog.beginnings import Beginnings
from kvtier.catalog.children import ChildCounts
from kvtier.catalog.eviction import NO_PARENT, ChunkColumns, MakePolicy, RemovalReason
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.pins import ChunkPins
from kvtier.catalog.prefix import FASTEST, MAX_TIERS, held_prefix
from kvtier.catalog.rows import Rows
from kvtier.catalog.selection import select_victims
from kvtier.catalog.tenants import Reach
from kvtier.memory.keys import KEY_BYTES, ChunkKey

ALL_TIERS = (1 << MAX_TIERS) - 1

_KEY = Struct(f"{KEY_BYTES}s")


class State(IntEnum):
    """A chunk's state in one tier."""

    ABSENT = 0
    PENDING = 1
    """In flight into the tier: its memory is allocated, its bytes must not be read."""
    READY = 2


class Catalog:
    """The chunks of one host's tiers, numbered from the fastest. Each tier has its own eviction policy.

    A chunk that is in no tier keeps its row while a chunk in some tier names it as its parent. So the row of
    a parent is never that of another chunk, and a parent that comes back is the parent again.
    """

    def __init__(
        self,
        policies: Sequence[MakePolicy],
        encoded: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``encoded``: the tiers whose chunks may be shorter than in the others. ``clock``: in seconds."""
        if not 0 < len(policies) <= MAX_TIERS:
            raise ValueError(f"{len(policies)} tiers, must be 1 to {MAX_TIERS}")
        self._clock = clock
        self.columns = ChunkColumns()
        self._of_tier = [self.columns] * len(policies)
        for tier in encoded:
            self._of_tier[tier] = self.columns.with_own_lengths()
        self.policies = [make(columns) for make, columns in zip(policies, self._of_tier, strict=True)]
        """The eviction policy of each tier. Only the catalog changes their state."""
        self._ready = bytearray()
        self._pending = bytearray()
        self._children = [ChildCounts() for _ in policies]
        masks = (self._ready, self._pending, *(children.counts for children in self._children))
        own_lengths = [columns.lengths for columns in self._of_tier if columns is not self.columns]
        self._index = Rows(self.columns, masks, own_lengths)
        self._rows, self._parents = self._index.by_key, self.columns.parents
        self._lengths, self._hints = self.columns.lengths, self.columns.hints
        self._generations, self.namespaces = self._index.generations, self._index.namespaces
        self._parents_only = 0
        """Number of rows of chunks that are in no tier, but the parent of one that is."""
        self.pins = ChunkPins()
        self.beginnings = Beginnings(self.columns, self._index, self._ready, self._pending, self.pins)
        self._used = [0] * len(policies)
        self._count = [0] * len(policies)

    def __len__(self) -> int:
        return len(self._index) - self._parents_only

    def __contains__(self, key: ChunkKey) -> bool:
        row = self._rows[key[0]].get(key)
        return row is not None and bool(self._ready[row] | self._pending[row])

    def add(
        self,
        key: ChunkKey,
        tier: int,
        length: int,
        state: State,
        parent: ChunkKey | None = None,
        namespace: bytes = b"",
        hints: ChunkHints | None = None,
    ) -> int:
        """Add a chunk object to a tier. Return its row. Raises ``ValueError`` if it is already there.

        If another tier holds the chunk, ``length`` and ``namespace`` keep their values and ``parent`` may be
        omitted. ``parent`` is the preceding chunk of the prefix; it need not be in the catalog. ``length`` is
        the size in bytes before encoding; see :meth:`resize`.
        """
        row = self._rows[key[0]].get(key)
        parent_row = NO_PARENT if parent is None else self._rows[parent[0]].get(parent, NO_PARENT)
        bit, left = 1 << tier, NO_PARENT
        if row is None:
            row = self._index.new(key, length, parent_row, namespace)
        elif (self._ready[row] | self._pending[row]) & bit:
            raise ValueError(f"chunk {key.hex()[:16]} is already in tier {tier}")
        else:
            left = self._reuse(row, length, parent_row if parent is not None else None, namespace)
        now = self._clock()
        if hints is not None:
            self._hints.set((row,), hints, now)
        (self._ready if state is State.READY else self._pending)[row] |= bit
        self._used[tier] += self._lengths[row]
        if self._of_tier[tier] is not self.columns:
            self._of_tier[tier].lengths[row] = self._lengths[row]
        self._count[tier] += 1
        parent_row = self._parents[row]
        if parent_row >= 0:
            self._children[tier].add(parent_row)
        if left >= 0:
            self._free_parent(left)
        self.policies[tier].added([row], now)
        return row

    def add_chain(
        self,
        keys: Sequence[ChunkKey],
        tier: int,
        lengths: Sequence[int],
        state: State,
        parent: ChunkKey | None = None,
        namespace: bytes = b"",
        hints: ChunkHints | None = None,
    ) -> list[int]:
        """Add consecutive chunks of one prompt, in a third of the time of :meth:`add` for each.

        Return their rows. ``parent`` is the chunk before the first. Raises ``ValueError``, and adds nothing,
        if one of them is already in the tier or occurs twice in ``keys``.
        """
        known = [self._rows[key[0]].get(key) for key in keys]
        bit = 1 << tier
        for key, row in zip(keys, known, strict=True):
            if row is not None and (self._ready[row] | self._pending[row]) & bit:
                raise ValueError(f"chunk {key.hex()[:16]} is already in tier {tier}")
        if len(set(keys)) < len(keys):
            raise ValueError("a chunk occurs twice")
        before = NO_PARENT if parent is None else self._rows[parent[0]].get(parent, NO_PARENT)
        left = []
        if known.count(None) == len(known):
            rows = self._index.new_chain(keys, lengths, before, namespace)
        else:
            rows = []
            for key, length, row in zip(keys, lengths, known, strict=True):
                if row is None:
                    row = self._index.new(key, length, before, namespace)
                else:
                    left.append(self._reuse(row, length, before, namespace))
                rows.append(row)
                before = row
        if hints is not None:
            self.set_hints(rows, hints)
        self._enter(rows, tier, self._ready if state is State.READY else self._pending)
        for row in left:
            if row >= 0:
                self._free_parent(row)
        self.policies[tier].added(rows, self._clock())
        return rows

    def add_copies(self, keys: Sequence[ChunkKey], tier: int) -> list[int]:
        """Add chunks that other tiers hold as PENDING, with the same length and parent. Return their rows.

        Raises ``ValueError``, and adds nothing, if one of them is in no tier or already in this one.
        """
        rows, bit = [self._rows[key[0]].get(key, NO_PARENT) for key in keys], 1 << tier
        for key, row in zip(keys, rows, strict=True):
            held = 0 if row < 0 else self._ready[row] | self._pending[row]
            if not held or held & bit:
                where = f"already in tier {tier}" if held else "in no tier"
                raise ValueError(f"chunk {key.hex()[:16]} is {where}")
        if len(set(rows)) < len(rows):
            raise ValueError("a chunk occurs twice")
        self._enter(rows, tier, self._pending)
        now, parents = self._clock(), self._parents
        starts = [at for at, row in enumerate(rows) if not at or parents[row] != rows[at - 1]]
        for start, stop in pairwise([*starts, len(rows)]):
            self.policies[tier].added(rows[start:stop], now)
        return rows

    def _enter(self, rows: Sequence[int], tier: int, masks: bytearray) -> None:
        """Count chunks in a tier, and set its bit in their ``masks``."""
        bit, held, parents = 1 << tier, self._lengths, self._parents
        for row in rows:
            masks[row] |= bit
        if self._of_tier[tier] is not self.columns:
            for row in rows:
                self._of_tier[tier].lengths[row] = held[row]
        self._used[tier] += sum([held[row] for row in rows])
        self._count[tier] += len(rows)
        self._children[tier].add_all([above for row in rows if (above := parents[row]) >= 0])

    def _reuse(self, row: int, length: int, parent: int | None, namespace: bytes) -> int:
        """Prepare a known row for one more tier. ``parent``: the row of the parent; ``None`` if not given.

        Return the row of the former parent if it has lost this child, to be passed to :meth:`_free_parent`.
        """
        held, before = self._ready[row] | self._pending[row], self._parents[row]
        if not held:
            self._parents_only -= 1
            self._index.fill(row, length, NO_PARENT if parent is None else parent, namespace)
            return NO_PARENT
        if parent is None or parent == before:
            return NO_PARENT
        self.beginnings.remove(row)
        self._parents[row] = parent
        for tier in range(len(self.policies)):
            if held >> tier & 1 and parent >= 0:
                self._children[tier].add(parent)
            if held >> tier & 1 and before >= 0:
                self._children[tier].remove(before)
        return before

    def set_ready(self, key: ChunkKey, tier: int) -> int:
        """Mark a PENDING chunk as READY. Return its row. Raises ``KeyError`` if it is not PENDING."""
        row, bit = self._rows[key[0]][key], 1 << tier
        if not self._pending[row] & bit:
            raise KeyError(f"chunk {key.hex()[:16]} is not pending in tier {tier}")
        self._pending[row] ^= bit
        self._ready[row] |= bit
        return row

    def remove(self, key: ChunkKey, tier: int, reason: RemovalReason = RemovalReason.EVICTED) -> None:
        """Remove a chunk from a tier, and its row with the last tier. Raises ``KeyError`` if not there."""
        ready, pending, bit = self._ready, self._pending, 1 << tier
        row = self._rows[key[0]][key]
        if not (ready[row] | pending[row]) & bit:
            raise KeyError(f"chunk {key.hex()[:16]} is not in tier {tier}")
        ready[row] &= ~bit
        pending[row] &= ~bit
        self._used[tier] -= self._of_tier[tier].lengths[row]
        self._count[tier] -= 1
        self.policies[tier].removed([row], reason)
        if (parent := self._parents[row]) >= 0:
            self._children[tier].remove(parent)
        may_free_parent = parent >= 0 and self._parents_only > 0
        if not ready[row] | pending[row]:
            self._leave([(key, row)])
        if may_free_parent:
            self._free_parent(parent)

    def remove_all(
        self, keys: Sequence[ChunkKey], tier: int, reason: RemovalReason = RemovalReason.EVICTED
    ) -> None:
        """Remove chunks from a tier, in half the time of :meth:`remove` for each.

        Raises ``KeyError``, and removes nothing, if one is not there.
        """
        if len(keys) == 1:
            self.remove(keys[0], tier, reason)
            return
        bit = 1 << tier
        ready, pending, parents = self._ready, self._pending, self._parents
        lengths = self._of_tier[tier].lengths
        rows = [self._rows[key[0]][key] for key in keys]
        for key, row in zip(keys, rows, strict=True):
            if not (ready[row] | pending[row]) & bit:
                raise KeyError(f"chunk {key.hex()[:16]} is not in tier {tier}")
        if len(set(rows)) < len(rows):
            raise KeyError("a chunk occurs twice")
        for row in rows:
            ready[row] &= ~bit
            pending[row] &= ~bit
        self._used[tier] -= sum([lengths[row] for row in rows])
        self._count[tier] -= len(rows)
        self.policies[tier].removed(rows, reason)
        above = [parent for row in rows if (parent := parents[row]) >= 0]
        self._children[tier].remove_all(above)
        may_free_parents = self._parents_only > 0
        gone = [(key, row) for key, row in zip(keys, rows, strict=True) if not ready[row] | pending[row]]
        self._leave(gone)
        if may_free_parents:  # Chunks that leave here are freed by _leave, if they have no children left.
            for parent in above:
                self._free_parent(parent)

    def _leave(self, chunks: Sequence[tuple[ChunkKey, int]]) -> None:
        """Free the rows of chunks that are in no tier any more, unless chunks name them as parents."""
        self.pins.remove([key for key, _ in chunks] if self.pins else ())
        self.beginnings.remove_all([row for _, row in chunks])
        for _, row in chunks if len(self._hints) else ():
            self._hints.reset(row)
        kept = {row for _, row in chunks if self._is_parent(row)}
        for row in kept:
            self._parents[row] = NO_PARENT
        self._parents_only += len(kept)
        self._index.free([chunk for chunk in chunks if chunk[1] not in kept])

    def _is_parent(self, row: int) -> bool:
        """Whether a chunk in some tier names this one as its parent."""
        for children in self._children:  # noqa: SIM110 - any() takes twice as long
            if children.counts[row]:
                return True
        return False

    def _free_parent(self, row: int) -> None:
        """Free the row of a chunk that is in no tier, and not the parent of one that is."""
        if self._ready[row] | self._pending[row] or self._is_parent(row):
            return
        key = self.columns.key(row)
        if self._rows[key[0]].get(key) == row:  # Otherwise its row was freed together with its last child's.
            self._index.free([(key, row)])
            self._parents_only -= 1

    def row(self, key: ChunkKey) -> int | None:
        """Return the row of a chunk, which is its own until it is removed from its last tier."""
        return self._rows[key[0]].get(key)

    def generation(self, key: ChunkKey) -> int:
        """Return the generation of a chunk, which changes when it is cleared; -1 if it is in no tier."""
        row = self._rows[key[0]].get(key)
        return -1 if row is None or not self._ready[row] | self._pending[row] else self._generations[row]

    def generations(self, rows: Sequence[int]) -> list[int]:
        """Return the generations of the chunks in these rows."""
        return [self._generations[row] for row in rows]

    def begin_generation(self, keys: Iterable[ChunkKey]) -> None:
        """Begin a new generation for chunks that are about to be cleared."""
        self._index.begin_generation(keys)

    def state(self, key: ChunkKey, tier: int) -> State:
        """Return a chunk's state in one tier."""
        row = self._rows[key[0]].get(key)
        if row is None:
            return State.ABSENT
        if self._ready[row] >> tier & 1:
            return State.READY
        return State.PENDING if self._pending[row] >> tier & 1 else State.ABSENT

    def length(self, key: ChunkKey) -> int:
        """Return the size of the chunk object in bytes. Raises ``KeyError`` if the chunk is unknown."""
        return self._lengths[self._rows[key[0]][key]]

    def parent(self, key: ChunkKey) -> ChunkKey | None:
        """Return the chunk before a chunk, if both are in the catalog."""
        row = self._rows[key[0]].get(key)
        parent = NO_PARENT if row is None else self._parents[row]
        return None if parent < 0 else self.columns.key(parent)

    def children(self, key: ChunkKey) -> int:
        """Return how many objects continue a chunk, in the tier that holds most of them."""
        row = self._rows[key[0]].get(key)
        return 0 if row is None else max(children.of(row) for children in self._children)

    def stored_length(self, key: ChunkKey, tier: int, default: int) -> int:
        """Return the size of a chunk object as a tier stores it, or ``default`` if it is not there."""
        row = self._rows[key[0]].get(key)
        if row is None or not (self._ready[row] | self._pending[row]) >> tier & 1:
            return default
        return self._of_tier[tier].lengths[row]

    def resize(self, key: ChunkKey, tier: int, length: int) -> None:
        """Record how long an encoded chunk object is in a tier. Ignored if it is not there."""
        before = self.stored_length(key, tier, length)
        if length != before:
            row = self._rows[key[0]][key]
            self._of_tier[tier].lengths[row] = length
            self._used[tier] += length - before
            self.policies[tier].resized(row, length - before)

    def tiers(self, key: ChunkKey) -> list[int]:
        """Return the tiers in which a chunk is READY, fastest first."""
        row = self._rows[key[0]].get(key)
        ready = 0 if row is None else self._ready[row]
        return [tier for tier in range(len(self.policies)) if ready >> tier & 1]

    def places(self, keys: Iterable[ChunkKey]) -> Iterator[tuple[int, int]]:
        """Yield for each chunk the bit masks of tiers in which it is READY and PENDING. Evaluated lazily."""
        rows, ready, pending = self._rows, self._ready, self._pending
        for key in keys:
            row = rows[key[0]].get(key)
            yield (0, 0) if row is None else (ready[row], pending[row])

    def fastest(self, key: ChunkKey) -> int:
        """Return the fastest tier in which a chunk is READY, or -1."""
        row = self._rows[key[0]].get(key)
        return -1 if row is None else FASTEST[self._ready[row]]

    def prefix(self, keys: Sequence[ChunkKey], among: int = ALL_TIERS) -> list[int]:
        """Return the fastest tier of each leading chunk, up to the first that is READY in no tier.

        ``among`` is a bit mask of the tiers to consider.
        """
        return list(self.prefix_rows(keys, among)[1])

    def prefix_rows(self, keys: Sequence[ChunkKey], among: int = ALL_TIERS) -> tuple[list[int], bytes]:
        """Return the rows of the chunks of :meth:`prefix`, and their fastest tiers."""
        return held_prefix(keys, self._rows, self.columns.keys, self._ready, among)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Record the use of a prefix."""
        self.touch_rows([row for key in keys if (row := self._rows[key[0]].get(key)) is not None])

    def touch_rows(self, rows: Sequence[int]) -> None:
        """Record the use of a prefix, given its rows."""
        for policy in self.policies:
            policy.used(rows, self._clock())

    def set_hints(self, rows: Sequence[int], hints: ChunkHints) -> None:
        """Replace the hints of chunks, given their rows."""
        self._hints.set(rows, hints, self._clock())

    def pin(self, keys: Sequence[ChunkKey], until: float | None) -> None:
        """Protect chunks from eviction until a ``time.monotonic()`` time, or permanently with ``None``.

        Of two pins on one chunk the longer one counts. Chunks in no tier are ignored.
        """
        self.pins.add((key for key in keys if key in self), until)

    def used(self, tier: int) -> int:
        """Return the bytes of chunk objects in a tier, READY or PENDING."""
        return self._used[tier]

    def count(self, tier: int) -> int:
        """Return the number of chunks in a tier, READY or PENDING."""
        return self._count[tier]

    def victims(
        self,
        tier: int,
        needed_bytes: int = sys.maxsize,
        is_leased: Callable[[int], bool] | None = None,
        limit: int | None = None,
        reach: Reach = Reach.ALL,
    ) -> list[ChunkKey]:
        """Return chunks to evict from a tier, in order, with at least ``needed_bytes`` in total if possible.

        They are READY, not pinned, and not ``is_leased`` (given a row). Of two chunks of a prompt, the later
        one comes first. Examines at most ``limit`` chunks that are READY and not pinned, of tenants within
        ``reach``.
        """
        rows = select_victims(
            self.policies[tier],
            self._of_tier[tier],
            self._children[tier],
            self._ready,
            1 << tier,
            self._is_pinned() if self.pins else None,
            is_leased,
            needed_bytes,
            limit,
            reach,
        )
        return self.columns.keys_of(rows)

    def _is_pinned(self) -> Callable[[int], bool]:
        now = self._clock()
        return lambda row: self.pins.holds(self.columns.key(row), now)

    @property
    def rows(self) -> range:
        """All rows, including vacant ones. Use :meth:`slices` for long scans."""
        return range(self._index.size)

    def slices(self, rows: int) -> Iterator[range]:
        """Yield the current rows in ranges of ``rows``.

        The result of a scan is valid only until the event loop runs other tasks: a chunk added later may get
        a row that was already visited, or one after the last.
        """
        size = self._index.size
        return (range(start, min(start + rows, size)) for start in range(0, size, rows))

    def keys(self, tier: int, namespace: bytes | None = None, *, rows: range | None = None) -> list[ChunkKey]:
        """Return the chunks of a tier, READY or PENDING, optionally of one namespace and some rows only.

        Takes about 0.1 s per million rows.
        """
        rows = self.rows if rows is None else rows
        space = None if namespace is None else self.namespaces.find(namespace)
        ready, pending = self._ready[rows.start : rows.stop], self._pending[rows.start : rows.stop]
        spaces = self._index.spaces
        return self.columns.keys_of(
            row
            for row, ready_mask, pending_mask in zip(rows, ready, pending, strict=True)
            if (ready_mask | pending_mask) >> tier & 1 and (space is None or spaces[row] == space)
        )

    def ready_keys(self, tier: int, rows: range) -> bytes:
        """Return the joined keys of the chunks in ``rows`` that are READY in a tier. About 0.1 µs per row."""
        selected = [mask >> tier & 1 for mask in self._ready[rows.start : rows.stop]]
        keys = _KEY.iter_unpack(self.columns.keys[rows.start * KEY_BYTES : rows.stop * KEY_BYTES])
        return b"".join(key for (key,) in compress(keys, selected))
