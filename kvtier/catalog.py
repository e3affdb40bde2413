"""Which chunk is in which local tier, in which state, and pinned or not.

Made for ten million chunks: a structure of arrays. An object for each would cost seconds at every full
garbage collection, a list of their keys a tenth of a second, and one dictionary of them half a second when
it grows; so rows are found through 256 dictionaries by a key's first byte, which the collector passes over,
and all else lies in flat arrays indexed by the chunk's *row*. Synchronous, not thread-safe, and nothing
here takes longer than what it is asked for. ``benchmarks/catalog.py`` has the figures.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import compress
from struct import Struct

from kvtier.eviction.base import EvictionPolicy
from kvtier.keys import KEY_BYTES, ChunkKey

MAX_TIERS = 8
"""As many as a byte has bits."""
ALL_TIERS = (1 << MAX_TIERS) - 1

_KEY = Struct(f"{KEY_BYTES}s")
_NO_PARENT = -1
_FASTEST = [(mask & -mask).bit_length() - 1 for mask in range(1 << MAX_TIERS)]
"""The lowest tier number in a mask of tiers; -1 for none."""


class State(IntEnum):
    """A chunk's state in one tier."""

    ABSENT = 0
    PENDING = 1
    """On its way in: its room is taken, its bytes must not be read."""
    READY = 2


class Catalog:
    """The chunks of one host's tiers, numbered from the fastest; one eviction policy for each."""

    def __init__(self, policies: Sequence[EvictionPolicy]) -> None:
        if not 0 < len(policies) <= MAX_TIERS:
            raise ValueError(f"{len(policies)} tiers: there can be 1 to {MAX_TIERS}")
        self._policies = policies
        self._rows: list[dict[ChunkKey, int]] = [{} for _ in range(256)]
        self._keys = bytearray()
        self._parents = array("i")
        """The row of the chunk before each, as last known. It may be another chunk's by now, or vacant: good
        enough for the order of eviction, and 4 bytes where a key takes 32."""
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
        """Enter a chunk object of ``length`` bytes into a tier. ``ValueError`` where it is there already.

        A chunk is the same in every tier: where another holds it, ``length`` and ``namespace`` are what they
        were there, and ``parent`` may be left out. ``parent`` is the chunk before it, and need not be held.
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
            raise ValueError(f"chunk {key.hex()[:16]} is in tier {tier} already")
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
        """Enter consecutive chunks of one prompt: as :meth:`add` of each, in a third of the time.

        ``parent`` is the chunk before the first. Raises ``ValueError``, and enters nothing, where one of them
        is in the tier already, or there twice.
        """
        known = [self._rows[key[0]].get(key) for key in keys]
        bit = 1 << tier
        for key, row in zip(keys, known, strict=True):
            if row is not None and (self._ready[row] | self._pending[row]) & bit:
                raise ValueError(f"chunk {key.hex()[:16]} is in tier {tier} already")
        if len(set(keys)) < len(keys):
            raise ValueError("a chunk cannot come into a tier twice")
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
        """Rows for consecutive chunks that are in no tier, vacant ones first. ``parent`` is a row."""
        space = self._space_numbers.setdefault(namespace, len(self._space_numbers))
        again = min(len(keys), len(self._vacant))
        rows = [self._vacant.pop() for _ in range(again)]
        more = len(keys) - again
        rows += range(len(self._lengths), len(self._lengths) + more)
        parents = [parent, *rows[:-1]]
        if more:
            self._keys += b"".join(keys[again:])
            self._parents.extend(parents[again:])
            self._lengths.extend(lengths[again:])
            self._spaces.extend([space] * more)
            self._ready.frombytes(bytes(more))
            self._pending.frombytes(bytes(more))
        for at in range(again):
            self._fill(rows[at], keys[at], lengths[at], parents[at], space)
        held = self._rows
        for key, row in zip(keys, rows, strict=True):
            held[key[0]][key] = row
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
        """Use a vacant row again."""
        self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
        self._parents[row] = parent
        self._lengths[row] = length
        self._spaces[row] = space

    def set_ready(self, key: ChunkKey, tier: int) -> None:
        """What was PENDING has arrived. ``KeyError`` where it was not PENDING."""
        row = self._rows[key[0]][key]
        bit = 1 << tier
        if not self._pending[row] & bit:
            raise KeyError(f"chunk {key.hex()[:16]} is not on its way into tier {tier}")
        self._pending[row] ^= bit
        self._ready[row] |= bit

    def remove(self, key: ChunkKey, tier: int) -> None:
        """Take a chunk out of a tier, and forget it when it is in none. ``KeyError`` if it was not there."""
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
        """As :meth:`remove` of each. Raises ``KeyError``, and removes nothing, where one was not there."""
        bit = 1 << tier
        ready, pending, lengths = self._ready, self._pending, self._lengths
        rows = [self._rows[key[0]][key] for key in keys]
        for key, row in zip(keys, rows, strict=True):
            if not (ready[row] | pending[row]) & bit:
                raise KeyError(f"chunk {key.hex()[:16]} is not in tier {tier}")
        if len(set(rows)) < len(rows):
            raise KeyError("a chunk cannot leave a tier twice")
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

    def state(self, key: ChunkKey, tier: int) -> State:
        """A chunk's state in one tier."""
        row = self._rows[key[0]].get(key)
        if row is None:
            return State.ABSENT
        if self._ready[row] >> tier & 1:
            return State.READY
        return State.PENDING if self._pending[row] >> tier & 1 else State.ABSENT

    def length(self, key: ChunkKey) -> int:
        """Bytes of the chunk object. ``KeyError`` for a chunk in no tier."""
        return self._lengths[self._rows[key[0]][key]]

    def tiers(self, key: ChunkKey) -> list[int]:
        """The tiers in which a chunk is READY, fastest first."""
        row = self._rows[key[0]].get(key)
        ready = 0 if row is None else self._ready[row]
        return [tier for tier in range(len(self._policies)) if ready >> tier & 1]

    def places(self, keys: Iterable[ChunkKey]) -> Iterator[tuple[int, int]]:
        """The tiers in which each chunk is READY, and those in which it is PENDING, as masks. Lazily."""
        rows, ready, pending = self._rows, self._ready, self._pending
        for key in keys:
            row = rows[key[0]].get(key)
            yield (0, 0) if row is None else (ready[row], pending[row])

    def fastest(self, key: ChunkKey) -> int:
        """The fastest tier in which a chunk is READY, or -1."""
        row = self._rows[key[0]].get(key)
        return -1 if row is None else _FASTEST[self._ready[row]]

    def prefix(self, keys: Sequence[ChunkKey], among: int = ALL_TIERS) -> list[int]:
        """The fastest tier of each leading chunk, up to the first that is READY in none.

        ``among`` has a bit for each tier that counts.
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
            pass  # The first chunk that is in no tier: cheaper to find so than to ask for each.
        return found

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """A prefix was asked for."""
        rows = [row for key in keys if (row := self._rows[key[0]].get(key)) is not None]
        for policy in self._policies:
            policy.used(rows)

    def pin(self, keys: Sequence[ChunkKey], until: float | None) -> None:
        """Keep chunks from being victims until a time of ``time.monotonic()``, or ``None`` for good.

        Of two pins on one chunk the longer holds. A chunk that is in no tier is passed over.
        """
        end = math.inf if until is None else until
        for key in keys:
            if key in self:
                self._pins[key] = max(end, self._pins.get(key, end))

    def unpin(self, keys: Sequence[ChunkKey]) -> None:
        """End every pin on these chunks; those that are not pinned are passed over."""
        for key in keys:
            self._pins.pop(key, None)

    def pinned(self, key: ChunkKey, now: float) -> bool:
        """Whether a chunk is pinned at a time of ``time.monotonic()``."""
        until = self._pins.get(key)
        if until is None:
            return False
        if until <= now:
            del self._pins[key]
            return False
        return True

    @property
    def pins(self) -> int:
        """How many chunks are pinned. One whose time is over counts until eviction comes to it."""
        return len(self._pins)

    def used(self, tier: int) -> int:
        """Bytes of chunk objects in a tier, READY or PENDING."""
        return self._used[tier]

    def count(self, tier: int) -> int:
        """Chunks in a tier, READY or PENDING."""
        return self._count[tier]

    def victims(self, tier: int) -> Iterator[ChunkKey]:
        """READY chunks of a tier that are not pinned, in the order in which they should go.

        Lazily: stop at any time, and change nothing before.
        """
        now, ready, pins = time.monotonic(), self._ready, self._pins
        for row in self._policies[tier].victims():
            if ready[row] >> tier & 1:
                key = self._key_of(row)
                if not (pins and self.pinned(key, now)):
                    yield key

    @property
    def rows(self) -> range:
        """All rows, vacant ones included. Whoever has much to do with each walks them in :meth:`slices`."""
        return range(len(self._lengths))

    def slices(self, rows: int) -> Iterator[range]:
        """The rows that there are now, so many at a time.

        What a walk has found holds only until the loop has had its turn: a chunk that comes later may get a
        row that was passed, or one beyond the last.
        """
        total = len(self._lengths)
        return (range(start, min(start + rows, total)) for start in range(0, total, rows))

    def keys(self, tier: int, namespace: bytes | None = None, *, rows: range | None = None) -> list[ChunkKey]:
        """The chunks of a tier, READY or PENDING; of one namespace, and of some rows, where these are given.

        Takes about 0.1 s for a million rows.
        """
        rows = self.rows if rows is None else rows
        space = None if namespace is None else self._space_numbers.get(namespace, -1)
        ready, pending = self._ready[rows.start : rows.stop], self._pending[rows.start : rows.stop]
        return [
            self._key_of(row)
            for row, here, coming in zip(rows, ready, pending, strict=True)
            if (here | coming) >> tier & 1 and (space is None or self._spaces[row] == space)
        ]

    def ready_keys(self, tier: int, rows: range) -> bytes:
        """The keys of those chunks in some rows that are READY in a tier, joined. About 0.1 µs a row."""
        here = [mask >> tier & 1 for mask in self._ready[rows.start : rows.stop]]
        keys = _KEY.iter_unpack(self._keys[rows.start * KEY_BYTES : rows.stop * KEY_BYTES])
        return b"".join(key for (key,) in compress(keys, here))

    def _key_of(self, row: int) -> ChunkKey:
        return ChunkKey(bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]))
