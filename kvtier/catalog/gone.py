"""Chunks that are in no tier any more, or never were: why not. The memory is fixed, the oldest are forgotten.

A set-associative table of 16 bytes a chunk: the first 8 bytes of its key, which two of a million chunks share
in one of 40 million such tables, and what is known. Its pages take memory only once they are used. Of what it
forgets, Bloom filters (https://doi.org/10.1145/362686.362692) still tell that it was there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import repeat
from mmap import mmap
from struct import Struct
from typing import NamedTuple

from kvtier.catalog.eviction import RemovalReason
from kvtier.catalog.misses import MissReason
from kvtier.memory.keys import KEY_BYTES, ChunkKey

REMOVED = {
    RemovalReason.EVICTED: MissReason.EVICTED,
    RemovalReason.CLEARED: MissReason.CLEARED,
    RemovalReason.REPLACED: MissReason.REPLACED,
    RemovalReason.MOVED: MissReason.MOVED,
    RemovalReason.EXPIRED: MissReason.EXPIRED,
    RemovalReason.LOST: MissReason.LOST,
    RemovalReason.ABORTED: MissReason.STORE_FAILED,
}
_CODES = list(MissReason)
_NUMBERS = {reason: number for number, reason in enumerate(_CODES)}
_FINAL = {_NUMBERS[MissReason.REPLACED], _NUMBERS[MissReason.UNREADABLE]}

NO_TIER = 63
WAYS = 8
"""Chunks that share a bucket: the one that went first is forgotten for a new one."""
FILTER_BITS = 1 << 24
FILTER_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
FILTER_CHUNKS = FILTER_BITS // 10
"""Of a filter. There are two: then 2 % of the chunks that were never stored count as unknown at most."""
_PLACE = Struct(f"<QQ{KEY_BYTES - 16}x")
_BUCKET = Struct(f"={WAYS}Q")
_SIX_BITS, _MAX_KEPT = 0x3F, (1 << 22) - 1


class Gone(NamedTuple):
    """What is known of a chunk that is in no tier."""

    reason: MissReason
    tier: int = NO_TIER
    """The last tier that held it."""
    kept: float = 0.0
    """For how many seconds the tiers had it."""
    ago: float = 0.0
    """How many seconds ago that ended."""


class GoneChunks:
    """Remembers why chunks are gone. Not thread-safe; nothing blocks. A microsecond for each chunk."""

    def __init__(self, chunks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``chunks``: how many to remember, in 16 bytes each; 0 for none."""
        self._buckets = -(-chunks // WAYS)
        self._tags = _zeros(self._buckets * WAYS)
        self._facts = _zeros(self._buckets * WAYS)
        """In 30 bits the second of removal, counted from 1; in 22 how many seconds it was kept; tier; reason.
        0 if vacant."""
        self._clock, self._start = clock, clock() - 1
        self._filters: list[bytearray] = []
        """Of what was forgotten, the newest first."""
        self._filtered = 0
        """The number of chunks in the newest filter."""

    def __bool__(self) -> bool:
        return self._buckets > 0

    def now(self) -> int:
        """Return the current second, for :meth:`note`."""
        return int(self._clock() - self._start)

    def note(
        self, keys: Sequence[ChunkKey], reason: MissReason, tier: int = NO_TIER, since: Sequence[int] = ()
    ) -> None:
        """Remember chunks that are READY in no tier now. ``since``: the second in which each was added.

        A copy that did not arrive says nothing of a chunk that was lost since it was added, and no copy does
        of one that was replaced or cannot be read. One that a lower tier has not taken says more of a chunk
        than that it was evicted.
        """
        if not self._buckets:
            return
        tags, facts, now, bucket = self._tags, self._facts, self.now(), _BUCKET.unpack_from
        fact = now << 34 | tier << 6 | _NUMBERS[reason]
        for key, then in zip(keys, since or repeat(now), strict=False):
            tag, place = _PLACE.unpack(key)
            at = place % self._buckets * WAYS
            known = bucket(tags, at * 8)
            if tag in known:
                at += known.index(tag)
                since_then = bool(since) and facts[at] >> 34 >= then
                if since_then and (reason is MissReason.STORE_FAILED or facts[at] & _SIX_BITS in _FINAL):
                    continue
                if since_then and reason is MissReason.EVICTED and tier < _refused(facts[at]):
                    continue
            else:
                ages = bucket(facts, at * 8)
                oldest = min(ages)
                at += ages.index(oldest)
                if oldest:
                    self._forget(tags[at])
            tags[at], facts[at] = tag, fact | min(now - then, _MAX_KEPT) << 12

    def find(self, key: ChunkKey) -> Gone | None:
        """Return what is known of a chunk; ``None`` if it was never here."""
        if not self._buckets:
            return None
        tag, place = _PLACE.unpack(key)
        at = place % self._buckets * WAYS
        known = _BUCKET.unpack_from(self._tags, at * 8)
        if tag in known and (fact := self._facts[at + known.index(tag)]):
            return _unpack(fact, self.now())
        return Gone(MissReason.UNKNOWN) if self._is_forgotten(tag) else None

    def _forget(self, tag: int) -> None:
        if not self._filters or self._filtered >= FILTER_CHUNKS:
            self._filters = [bytearray(FILTER_BITS // 8), *self._filters[:1]]
            self._filtered = 0
        for bit in _bits(tag):
            self._filters[0][bit >> 3] |= 1 << (bit & 7)
        self._filtered += 1

    def _is_forgotten(self, tag: int) -> bool:
        return any(all(bits[bit >> 3] >> (bit & 7) & 1 for bit in _bits(tag)) for bits in self._filters)


def _zeros(count: int) -> memoryview:
    return memoryview(mmap(-1, max(1, count) * 8)).cast("Q")


def _bits(tag: int) -> list[int]:
    return [tag * factor % (1 << 64) * FILTER_BITS >> 64 for factor in FILTER_FACTORS]


def _refused(fact: int) -> int:
    """Return the tier that has not stored a chunk, if that is the fact; else -1."""
    return fact >> 6 & _SIX_BITS if fact & _SIX_BITS == _NUMBERS[MissReason.STORE_FAILED] else -1


def _unpack(fact: int, now: int) -> Gone:
    kept, ago = fact >> 12 & _MAX_KEPT, now - (fact >> 34)
    return Gone(_CODES[fact & _SIX_BITS], fact >> 6 & _SIX_BITS, float(kept), float(ago))
