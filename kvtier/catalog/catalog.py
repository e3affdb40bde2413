"""Index of the chunks in each tier, with their state and pins.

Designed for ten million chunks as a structure of arrays. One object per chunk would cost seconds in every
full garbage collection, a list of their keys 0.1 s, and a single dictionary 0.5 s when it is resized.
Instead, 256 dictionaries by the key's first byte, which the collector skips, map keys to *rows*, and
everything else is in flat arrays indexed by row. Synchronous and not thread-safe; each call takes time
proportional to its arguments. See ``benchmarks/catalog.py`` for measurements.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from itertools import compress
from operator import getitem, itemgetter
from struct import Struct

from kvtier.catalog.eviction import EvictionPolicy
from kvtier.memory.keys import KEY_BYTES, ChunkKey

MAX_TIERS = 8
"""One bit per tier in a byte."""
ALL_TIERS = (1 << MAX_TIERS) - 1

_KEY = Struct(f"{KEY_BYTES}s")
_FIRST_BYTE = itemgetter(0)
_NO_PARENT = -1
_FASTEST = [(mask & -mask).bit_length() - 1 for mask in range(1 << MAX_TIERS)]
"""The lowest tier number in a bit mask of tiers; -1 for an empty mask."""


class State(IntEnum):
    """A chunk's state in one tier."""

    ABSENT = 0
    PENDING = 1
    """In flight into the tier: its memory is allocated, its bytes must not be read."""
    READY = 2


class Catalog:
    """The chunks of one host's tiers, numbered from the fastest. Each tier has its own eviction policy."""

    def __init__(self, policies: Sequence[EvictionPolicy]) -> None:
        if not 0 < len(policies) <= MAX_TIERS:
            raise ValueError(f"{len(policies)} tiers, must be 1 to {MAX_TIERS}")
        self._policies = policies
        self._rows: list[dict[ChunkKey, int]] = [{} for _ in range(256)]
        self._keys = bytearray()
        self._parents = array("i")
        """The last known row of each chunk's parent. It may have been reused or be vacant: good enough for
        the eviction order, and takes 4 bytes instead of 32 for a key."""
        self._lengths = array("Q")
        self._ready = array("B")
        self._pending = array("B")
        self._spaces = array("I")
        self._space_numbers: dict[bytes, int] = {b"": 0}
        self._vacant: list[int] = []
        self._pins: dict[ChunkKey, float] = {}
        self._used = [0] * len(policies)
        self._count = [0] * len(policies)

    def __len__(self) -> int:
        return len(self._lengths) - len(self._vacant)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._rows[key[0]]

    def add(
        self,
        key: ChunkKey,
        tier: int,
        length: int,
        state: State,
        parent: ChunkKey | None = None,
        namespace: bytes = b"",
    ) -> None:
        """Add a chunk object of ``length`` bytes to a tier. Raises ``ValueError`` if it is already there.

        If another tier holds the chunk, ``length`` and ``namespace`` keep their values and ``parent`` may be
        omitted. ``parent`` is the preceding chunk of the prefix; it need not be in the catalog.
        """
        row = self._rows[key[0]].get(key)
        parent_row = _NO_PARENT if parent is None else self._rows[parent[0]].get(parent, _NO_PARENT)
        if row is None:
            row = self._new_row(key, length, parent_row, namespace)
        elif parent is None:
            parent_row = self._parents[row]
        else:
            self._parents[row] = parent_row
        bit = 1 << tier
        if (self._ready[row] | self._pending[row]) & bit:
            raise ValueError(f"chunk {key.hex()[:16]} is already in tier {tier}")
        (self._ready if state is State.READY else self._pending)[row] |= bit
        self._used[tier] += self._lengths[row]
        self._count[tier] += 1
        self._policies[tier].added(row, parent_row)

    def add_chain(
        self,
        keys: Sequence[ChunkKey],
        tier: int,
        lengths: Sequence[int],
        state: State,
        parent: ChunkKey | None = None,
        namespace: bytes = b"",
    ) -> None:
        """Add consecutive chunks of one prompt, in a third of the time of :meth:`add` for each.

        ``parent`` is the chunk before the first. Raises ``ValueError``, and adds nothing, if one of them is
        already in the tier or occurs twice in ``keys``.
        """
        known = [self._rows[key[0]].get(key) for key in keys]
        bit = 1 << tier
        for key, row in zip(keys, known, strict=True):
            if row is not None and (self._ready[row] | self._pending[row]) & bit:
                raise ValueError(f"chunk {key.hex()[:16]} is already in tier {tier}")
        if len(set(keys)) < len(keys):
            raise ValueError("a chunk occurs twice")
        parent_row = _NO_PARENT if parent is None else self._rows[parent[0]].get(parent, _NO_PARENT)
        if known.count(None) == len(known):
            rows = self._new_rows(keys, lengths, parent_row, namespace)
        else:
            rows, before = [], parent_row
            for key, length, row in zip(keys, lengths, known, strict=True):
                if row is None:
                    row = self._new_row(key, length, before, namespace)
                else:
                    self._parents[row] = before
                rows.append(row)
                before = row
        masks = self._ready if state is State.READY else self._pending
        for row in rows:
            masks[row] |= bit
        held = self._lengths
        self._used[tier] += sum([held[row] for row in rows])
        self._count[tier] += len(rows)
        self._policies[tier].added_chain(rows, parent_row)

    def _new_rows(
        self, keys: Sequence[ChunkKey], lengths: Sequence[int], parent: int, namespace: bytes
    ) -> list[int]:
        """Create rows for consecutive chunks that are in no tier; reuse vacant rows. ``parent`` is a row."""
        space = self._space_numbers.setdefault(namespace, len(self._space_numbers))
        reused = min(len(keys), len(self._vacant))
        rows = [self._vacant.pop() for _ in range(reused)]
        new = len(keys) - reused
        rows += range(len(self._lengths), len(self._lengths) + new)
        parents = [parent, *rows[:-1]]
        if new:
            self._keys += b"".join(keys[reused:])
            self._parents.extend(parents[reused:])
            self._lengths.extend(lengths[reused:])
            self._spaces.extend([space] * new)
            self._ready.frombytes(bytes(new))
            self._pending.frombytes(bytes(new))
        for index in range(reused):
            self._fill(rows[index], keys[index], lengths[index], parents[index], space)
        by_key = self._rows
        for key, row in zip(keys, rows, strict=True):
            by_key[key[0]][key] = row
        return rows

    def _new_row(self, key: ChunkKey, length: int, parent: int, namespace: bytes) -> int:
        space = self._space_numbers.setdefault(namespace, len(self._space_numbers))
        if self._vacant:
            row = self._vacant.pop()
            self._fill(row, key, length, parent, space)
        else:
            row = len(self._lengths)
            self._keys += key
            self._parents.append(parent)
            self._lengths.append(length)
            self._spaces.append(space)
            self._ready.append(0)
            self._pending.append(0)
        self._rows[key[0]][key] = row
        return row

    def _fill(self, row: int, key: ChunkKey, length: int, parent: int, space: int) -> None:
        """Reuse a vacant row."""
        self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
        self._parents[row] = parent
        self._lengths[row] = length
        self._spaces[row] = space

    def set_ready(self, key: ChunkKey, tier: int) -> int:
        """Mark a PENDING chunk as READY. Return its row. Raises ``KeyError`` if it is not PENDING."""
        row = self._rows[key[0]][key]
        bit = 1 << tier
        if not self._pending[row] & bit:
            raise KeyError(f"chunk {key.hex()[:16]} is not pending in tier {tier}")
        self._pending[row] ^= bit
        self._ready[row] |= bit
        return row

    def remove(self, key: ChunkKey, tier: int) -> None:
        """Remove a chunk from a tier, and its row with the last tier. Raises ``KeyError`` if not there."""
        row = self._rows[key[0]][key]
        bit = 1 << tier
        if not (self._ready[row] | self._pending[row]) & bit:
            raise KeyError(f"chunk {key.hex()[:16]} is not in tier {tier}")
        self._ready[row] &= ~bit
        self._pending[row] &= ~bit
        self._used[tier] -= self._lengths[row]
        self._count[tier] -= 1
        self._policies[tier].removed(row)
        if not self._ready[row] | self._pending[row]:
            del self._rows[key[0]][key]
            self._vacant.append(row)
            self._pins.pop(key, None)

    def remove_all(self, keys: Sequence[ChunkKey], tier: int) -> None:
        """Remove chunks from a tier. Raises ``KeyError``, and removes nothing, if one is not there."""
        bit = 1 << tier
        ready, pending, lengths = self._ready, self._pending, self._lengths
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
        self._policies[tier].removed_all(rows)
        for key, row in zip(keys, rows, strict=True):
            if not ready[row] | pending[row]:
                del self._rows[key[0]][key]
                self._vacant.append(row)
                self._pins.pop(key, None)

    def row(self, key: ChunkKey) -> int | None:
        """Return the row of a chunk, which is its own until it is removed from its last tier."""
        return self._rows[key[0]].get(key)

    def state(self, key: ChunkKey, tier: int) -> State:
        """Return a chunk's state in one tier."""
        row = self._rows[key[0]].get(key)
        if row is None:
            return State.ABSENT
        if self._ready[row] >> tier & 1:
            return State.READY
        return State.PENDING if self._pending[row] >> tier & 1 else State.ABSENT

    def length(self, key: ChunkKey) -> int:
        """Return the size of the chunk object in bytes. Raises ``KeyError`` if it is in no tier."""
        return self._lengths[self._rows[key[0]][key]]

    def tiers(self, key: ChunkKey) -> list[int]:
        """Return the tiers in which a chunk is READY, fastest first."""
        row = self._rows[key[0]].get(key)
        ready = 0 if row is None else self._ready[row]
        return [tier for tier in range(len(self._policies)) if ready >> tier & 1]

    def places(self, keys: Iterable[ChunkKey]) -> Iterator[tuple[int, int]]:
        """Yield for each chunk the bit masks of tiers in which it is READY and PENDING. Evaluated lazily."""
        rows, ready, pending = self._rows, self._ready, self._pending
        for key in keys:
            row = rows[key[0]].get(key)
            yield (0, 0) if row is None else (ready[row], pending[row])

    def fastest(self, key: ChunkKey) -> int:
        """Return the fastest tier in which a chunk is READY, or -1."""
        row = self._rows[key[0]].get(key)
        return -1 if row is None else _FASTEST[self._ready[row]]

    def prefix(self, keys: Sequence[ChunkKey], among: int = ALL_TIERS) -> list[int]:
        """Return the fastest tier of each leading chunk, up to the first that is READY in no tier.

        ``among`` is a bit mask of the tiers to consider.
        """
        rows, ready, fastest = self._rows, self._ready, _FASTEST
        found: list[int] = []
        try:
            for key in keys:
                tier = fastest[ready[rows[key[0]][key]] & among]
                if tier < 0:
                    break
                found.append(tier)
        except KeyError:
            pass  # The first chunk in no tier. Cheaper than a test for each chunk.
        return found

    def prefix_rows(self, keys: Sequence[ChunkKey], among: int = ALL_TIERS) -> tuple[list[int], list[int]]:
        """Return the rows of the chunks of :meth:`prefix`, and their fastest tiers."""
        rows: list[int] = []
        with suppress(KeyError):  # The first chunk in no tier. What was found before it remains in ``rows``.
            rows.extend(map(getitem, map(self._rows.__getitem__, map(_FIRST_BYTE, keys)), keys))
        tiers = [_FASTEST[self._ready[row] & among] for row in rows]
        if -1 in tiers:
            end = tiers.index(-1)
            del rows[end:], tiers[end:]
        return rows, tiers

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Record the use of a prefix."""
        self.touch_rows([row for key in keys if (row := self._rows[key[0]].get(key)) is not None])

    def touch_rows(self, rows: Sequence[int]) -> None:
        """Record the use of a prefix, given its rows."""
        for policy in self._policies:
            policy.used(rows)

    def pin(self, keys: Sequence[ChunkKey], until: float | None) -> None:
        """Protect chunks from eviction until a ``time.monotonic()`` time, or permanently with ``None``.

        Of two pins on one chunk the longer one counts. Chunks in no tier are ignored.
        """
        end = math.inf if until is None else until
        for key in keys:
            if key in self:
                self._pins[key] = max(end, self._pins.get(key, end))

    def unpin(self, keys: Sequence[ChunkKey]) -> None:
        """Remove all pins on these chunks. Chunks that are not pinned are ignored."""
        for key in keys:
            self._pins.pop(key, None)

    def pinned(self, key: ChunkKey, now: float) -> bool:
        """Whether a chunk is pinned at ``now`` (``time.monotonic()``)."""
        until = self._pins.get(key)
        if until is None:
            return False
        if until <= now:
            del self._pins[key]
            return False
        return True

    @property
    def pins(self) -> int:
        """Number of pinned chunks. An expired pin counts until eviction visits its chunk."""
        return len(self._pins)

    def used(self, tier: int) -> int:
        """Return the bytes of chunk objects in a tier, READY or PENDING."""
        return self._used[tier]

    def count(self, tier: int) -> int:
        """Return the number of chunks in a tier, READY or PENDING."""
        return self._count[tier]

    def victims(self, tier: int) -> Iterator[ChunkKey]:
        """Yield READY chunks of a tier that are not pinned, in eviction order.

        Evaluated lazily: stop at any time, and do not modify the catalog while iterating.
        """
        now, ready, pins = time.monotonic(), self._ready, self._pins
        for row in self._policies[tier].victims():
            if ready[row] >> tier & 1:
                key = self._key_of(row)
                if not (pins and self.pinned(key, now)):
                    yield key

    @property
    def rows(self) -> range:
        """All rows, including vacant ones. Use :meth:`slices` for long scans."""
        return range(len(self._lengths))

    def slices(self, rows: int) -> Iterator[range]:
        """Yield the current rows in ranges of ``rows``.

        The result of a scan is valid only until the event loop runs other tasks: a chunk added later may get
        a row that was already visited, or one after the last.
        """
        total = len(self._lengths)
        return (range(start, min(start + rows, total)) for start in range(0, total, rows))

    def keys(self, tier: int, namespace: bytes | None = None, *, rows: range | None = None) -> list[ChunkKey]:
        """Return the chunks of a tier, READY or PENDING, optionally of one namespace and some rows only.

        Takes about 0.1 s per million rows.
        """
        rows = self.rows if rows is None else rows
        space = None if namespace is None else self._space_numbers.get(namespace, -1)
        ready, pending = self._ready[rows.start : rows.stop], self._pending[rows.start : rows.stop]
        return [
            self._key_of(row)
            for row, ready_mask, pending_mask in zip(rows, ready, pending, strict=True)
            if (ready_mask | pending_mask) >> tier & 1 and (space is None or self._spaces[row] == space)
        ]

    def ready_keys(self, tier: int, rows: range) -> bytes:
        """Return the joined keys of the chunks in ``rows`` that are READY in a tier. About 0.1 µs per row."""
        selected = [mask >> tier & 1 for mask in self._ready[rows.start : rows.stop]]
        keys = _KEY.iter_unpack(self._keys[rows.start * KEY_BYTES : rows.stop * KEY_BYTES])
        return b"".join(key for (key,) in compress(keys, selected))

    def _key_of(self, row: int) -> ChunkKey:
        return ChunkKey(bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]))
