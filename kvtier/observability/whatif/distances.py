"""Reuse distances: which capacity of an LRU cache a chunk would have needed to be a hit, from a sample.

The sampling, and the limit of the sample, are those of C. Waldspurger et al., "Efficient MRC construction
with SHARDS" (FAST 2015). What differs is that a request looks up a whole prompt, of which only a prefix can
be a hit. So a lookup yields more than its sampled chunks do: if the first sampled miss of a prompt is at
position *p*, then *p* chunks are hits, less those between the first miss and the first sampled one, whose
mean number is known. This has no bias, and for chats a thirtieth of the error of counting sampled hits:
whether a system prompt that everyone uses is in the sample matters no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from kvtier.catalog.sampling import ESTIMATE_SAMPLE, SAMPLED
from kvtier.concurrency.threads import let_others_run
from kvtier.memory.keys import ChunkKey

NEVER = math.inf
"""The distance of a chunk that was not used before, or longer ago than is remembered."""
BLOCK_BITS = 7
"""Places of a block: sums are over 2\\ :sup:`7` places or fewer, and over the blocks."""
MIN_PLACES = 1024
LOWERED = 0.75
"""By which factor the sample gets smaller at a time."""
MIN_THRESHOLD = 1
SLICE = 1024
"""Places to number anew before other threads may run. Takes 0.3 ms."""
BUCKETS = 64
"""Of a histogram for each doubling of the distance."""
OCTAVES = 56


class ReuseDistances:
    """Sampled chunks in the order of their last use, with the bytes that were used since.

    Takes 1 to 3 µs for each sampled chunk, and about 250 bytes of memory. Every few thousand chunks, it takes
    a millisecond to number the places anew.
    """

    def __init__(self, max_chunks: int, reach: int, threshold: int = SAMPLED) -> None:
        """``reach``: the distance in bytes up to which chunks are remembered.

        If these are more than ``max_chunks``, the threshold of the sample is lowered.
        """
        self._max_chunks = max_chunks
        self._reach = reach
        self.threshold = max(MIN_THRESHOLD, min(SAMPLED, threshold))
        self._places: dict[ChunkKey, int] = {}
        self._keys: list[ChunkKey | None] = []
        """By place, the least recently used first. ``None`` where none is any more."""
        self._lengths: list[int] = []
        """In bytes; 0 where no chunk is."""
        self._blocks: list[int] = []
        """The sum of the lengths in each block of places."""
        self._oldest = 0
        """No chunk is before this place."""

    def __len__(self) -> int:
        return len(self._places)

    @property
    def rate(self) -> float:
        """The part of all keys that the sample has."""
        return self.threshold / SAMPLED

    def access(self, keys: Sequence[ChunkKey], lengths: Sequence[int]) -> list[float]:
        """Use the sampled chunks of a prompt, in its order. Return the distance of each in bytes.

        A cache of at least that size would have held the chunk and what was used after it. All are
        looked up at once; then the first one is the most recent. So distances do not decrease along a prompt.
        """
        places = [self._places.get(key) for key in keys]
        furthest, scale = 0.0, SAMPLED / self.threshold
        distances = []
        for place, length in zip(places, lengths, strict=True):
            if place is None or furthest == NEVER:
                furthest = NEVER
            else:
                furthest = max(furthest, self._after(place) * scale + length)
            distances.append(furthest)
        for place in places:
            if place is not None:
                self._vacate(place)
        for key, length in zip(reversed(keys), reversed(lengths), strict=True):
            self._append(key, length)
        self._limit()
        return distances

    def add(self, keys: Sequence[ChunkKey], lengths: Sequence[int]) -> None:
        """Add sampled chunks that were stored, as the most recent ones, unless they are known."""
        for key, length in zip(keys, lengths, strict=True):
            if key not in self._places:
                self._append(key, length)
        self._limit()

    def lower(self, factor: float = LOWERED) -> None:
        """Reduce the sample. Its further chunks are forgotten."""
        self.threshold = max(MIN_THRESHOLD, int(self.threshold * factor))
        keys = list(self._places)
        for start in range(0, len(keys), SLICE):
            part = keys[start : start + SLICE]
            for key, stays in zip(part, ESTIMATE_SAMPLE.of(part, self.threshold), strict=True):
                if not stays:
                    self._vacate(self._places.pop(key))
            let_others_run()
        self._compact()

    def _after(self, place: int) -> int:
        """Return the bytes of the chunks after a place."""
        block = place >> BLOCK_BITS
        return sum(self._lengths[place + 1 : (block + 1) << BLOCK_BITS]) + sum(self._blocks[block + 1 :])

    def _append(self, key: ChunkKey, length: int) -> None:
        place = len(self._keys)
        if not place & (1 << BLOCK_BITS) - 1:
            self._blocks.append(0)
        self._places[key] = place
        self._keys.append(key)
        self._lengths.append(length)
        self._blocks[-1] += length

    def _vacate(self, place: int) -> None:
        self._blocks[place >> BLOCK_BITS] -= self._lengths[place]
        self._lengths[place] = 0
        self._keys[place] = None

    def _limit(self) -> None:
        """Forget what is too much, and number the places anew if most of them are vacant."""
        while len(self._places) > self._max_chunks:
            # As long as the oldest chunk is nearer than the largest capacity, only a smaller sample helps.
            if sum(self._blocks) * SAMPLED < self._reach * self.threshold and self.threshold > MIN_THRESHOLD:
                self.lower()
            else:
                self._forget(len(self._places) - self._max_chunks)
        if len(self._keys) > MIN_PLACES + 2 * len(self._places):
            self._compact()

    def _forget(self, count: int) -> None:
        """Forget the chunks that were not used for longest."""
        while count:
            key = self._keys[self._oldest]
            if key is not None:
                self._vacate(self._places.pop(key))
                count -= 1
            self._oldest += 1

    def _compact(self) -> None:
        """Number the places anew, with pauses: it takes milliseconds."""
        keys, lengths = self._keys, self._lengths
        self._places, self._keys, self._lengths, self._blocks, self._oldest = {}, [], [], [], 0
        for start in range(0, len(keys), SLICE):
            for at in range(start, min(start + SLICE, len(keys))):
                if (key := keys[at]) is not None:
                    self._append(key, lengths[at])
            let_others_run()


class HitCurve:
    """How many chunks an LRU cache would have hit, as a function of its capacity.

    A histogram over the capacities: buckets of 1.1 % each, linear between their bounds.
    """

    def __init__(self) -> None:
        self._always = 0.0
        """Chunks that are hits with any capacity, less those whose miss is not in the sample."""
        self._gained = [0.0] * (BUCKETS * OCTAVES)
        """Chunks that become hits in each bucket of capacities."""
        self.asked = 0.0

    def add(self, positions: Sequence[int], distances: Sequence[float], count: int, rate: float) -> None:
        """Add a lookup of ``count`` chunks, of which those at ``positions`` are in the sample."""
        self.asked += count
        between = 1 / rate - 1
        """The mean number of chunks between one in a prompt and the next sampled one."""
        if not positions:
            self._always += count
            return
        self._always += positions[0] - between
        gained = self._gained
        for index, distance in enumerate(distances, 1):
            if distance == NEVER:
                break
            here = positions[index - 1]
            next_miss = positions[index] - between if index < len(positions) else count
            gained[int(math.log2(distance) * BUCKETS)] += next_miss - here + between

    def decay(self, factor: float) -> None:
        """Decay all that was added."""
        self.asked *= factor
        self._always *= factor
        self._gained = [gained * factor for gained in self._gained]

    def hit_rates(self) -> HitRates:
        """Return the hit rates as of now. Takes 0.2 ms."""
        return HitRates(self._always, self._gained, self.asked)


class HitRates:
    """The hit rate at each capacity."""

    def __init__(self, always: float, gained: Sequence[float], asked: float) -> None:
        self._hits = list(accumulate(gained, initial=always))
        """At the lower bound of each bucket."""
        self._asked = asked

    def at(self, capacity_bytes: float) -> float:
        """Return the hit rate with a capacity, from 0 to 1."""
        if not self._asked or capacity_bytes < 1:
            return 0.0
        exact = min(math.log2(capacity_bytes) * BUCKETS, len(self._hits) - 2.0)
        bucket = int(exact)
        lower, upper = self._hits[bucket], self._hits[bucket + 1]
        hits = lower + (exact - bucket) * (upper - lower)
        return min(1.0, max(0.0, hits / self._asked))
