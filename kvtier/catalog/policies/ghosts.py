"""Memory of evicted chunks: their keys, hashed to integers, in flat arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from struct import Struct

from kvtier.catalog.eviction import ChunkColumns
from kvtier.memory.keys import KEY_BYTES

_HASH = Struct("<Q")
_MIN_SLOTS = 64
_BITS = 0xFFFFFFFF


def hashes_of(chunks: ChunkColumns, rows: Iterable[int]) -> list[int]:
    """Return 64 bits of the key of each chunk. Keys are digests, so these are as good as a hash."""
    unpack, keys = _HASH.unpack_from, chunks.keys
    return [unpack(keys, row * KEY_BYTES)[0] for row in rows]


class Ghosts:
    """A first-in, first-out set of hashes, without an object per hash: at most 40 bytes for each.

    A log of the hashes, with a chain through those of one bucket, from the newest to the oldest. A chain ends
    where the log begins, so nothing is unlinked when the log's oldest hash is dropped, and arrays are doubled
    by repeating them: no call takes time proportional to the number of hashes, except to copy memory. Two
    hashes with the same upper 31 bits in one bucket are taken for one: once in a billion lookups.
    """

    def __init__(self) -> None:
        self._tags = array("I", bytes(4 * _MIN_SLOTS))
        """The upper bits of the hash in each slot; 0 if it was discarded."""
        self._before = array("I", bytes(4 * _MIN_SLOTS))
        """How many places before it in the log the next older hash of its bucket is."""
        self._heads = array("I", bytes(4 * _MIN_SLOTS // 2))
        """The end of each bucket's newest hash in the log, in its lower 32 bits."""
        self._start = self._stop = 1
        """The part of the log that is kept. Place *n* is in slot *n* modulo the number of slots."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, hashed: int) -> bool:
        return self._find(hashed) >= 0

    def add(self, hashed: int, limit: int) -> None:
        """Add a hash that is not known. Drop the oldest ones if there are more than ``limit``."""
        slots = len(self._tags)
        if self._stop - self._start == slots:
            if slots < 2 * limit:
                self._grow()
                slots *= 2
            else:
                self._drop()
        place = self._stop
        bucket = hashed & len(self._heads) - 1
        newest = self._heads[bucket]
        # Never 0, which marks a hash that was discarded.
        self._tags[place & slots - 1] = hashed >> 32 | 1
        self._before[place & slots - 1] = place - newest & _BITS
        self._heads[bucket] = place & _BITS
        self._stop = place + 1
        self._count += 1
        if self._count > limit:
            self.trim(limit)

    def discard(self, hashed: int) -> bool:
        """Forget a hash. Return whether it was known."""
        slot = self._find(hashed)
        if slot < 0:
            return False
        self._tags[slot] = 0
        self._count -= 1
        return True

    def trim(self, limit: int) -> None:
        """Drop the oldest hashes, until at most ``limit`` remain."""
        while self._count > max(limit, 0):
            self._drop()

    def _find(self, hashed: int) -> int:
        """Return the slot of a hash, or -1."""
        tags, before, mask, tag = self._tags, self._before, len(self._tags) - 1, hashed >> 32 | 1
        distance = self._stop - self._heads[hashed & len(self._heads) - 1] & _BITS
        kept = self._stop - self._start
        while 0 < distance <= kept:
            slot = self._stop - distance & mask
            if tags[slot] == tag:
                return slot
            step = before[slot]
            if not step:
                break
            distance += step
        return -1

    def _drop(self) -> None:
        slot = self._start & len(self._tags) - 1
        if self._tags[slot]:
            self._tags[slot] = 0
            self._count -= 1
        self._start += 1

    def _grow(self) -> None:
        # Of the two copies of a slot, one is at its place modulo the new size. Both halves of a bucket begin
        # with the same chain: it has hashes that are not searched there, which does no harm.
        self._tags += self._tags
        self._before += self._before
        self._heads += self._heads
