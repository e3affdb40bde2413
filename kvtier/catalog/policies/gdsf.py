"""GDSF eviction policy."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import log2

from pydantic import Field

from kvtier.catalog.eviction import NO_PARENT, ChunkColumns, DepthSettings, PolicySettings, RemovalReason
from kvtier.catalog.policies.rings import MAX_RINGS, NO_ROW, RingPolicy, cover
from kvtier.units import Number

MAX_USES = 254
MAX_DEPTH = 65_535
STEPS_A_DOUBLING = 4
"""Values are rounded to a quarter of a doubling."""
_ONE = 200
"""The ring of the chunks with a value of one second per byte."""
_HIGHEST = MAX_RINGS - 1
_VALUES = [2.0 ** ((ring - _ONE) / STEPS_A_DOUBLING) for ring in range(MAX_RINGS)]
_STEPS = bytes(round(STEPS_A_DOUBLING * log2(max(uses, 1))) for uses in range(MAX_USES + 1))
"""How many rings higher a chunk is for its number of uses."""


class GdsfSettings(DepthSettings):
    """Settings of the policy ``gdsf``."""

    chunk_seconds: Number = Field(
        default=0.01, gt=0, description="Time to compute the first chunk of a prompt, if no hint states it."
    )
    depth: Number = Field(
        default=256,
        gt=0,
        description="Depth in chunks at which a chunk takes twice as long as the first one.",
    )


class GdsfPolicy(RingPolicy):
    """Keeps the chunks that would take the most time to compute, for their size. 22 bytes per chunk.

    Cherkasova, *Improving WWW proxies performance with greedy-dual-size-frequency caching policy* (1998): the
    priority is uses x seconds / bytes, plus that of the last evicted chunk at the time of the last use. As in
    CAMP (Ghandeharizadeh et al., Middleware 2014), values are rounded, and all chunks with one value are in
    one ring, whose coldest has the lowest priority: no tree is needed.

    A chunk is worth as much as any chunk that continues it, because without it, both have to be computed.
    """

    settings_type = GdsfSettings

    def __init__(self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns) -> None:
        super().__init__(settings, capacity_bytes, chunks, rings=MAX_RINGS)
        assert isinstance(settings, GdsfSettings)
        self._chunk_seconds, self._depth = settings.chunk_seconds, settings.depth
        self._age = 0.0
        """The priority of the last evicted chunk."""
        self._ages = array("d")
        """The age of the tier at the last use of each chunk."""
        self._depths = array("H")
        self._uses = bytearray()
        self._worths = bytearray()
        """The ring of each chunk if it had one use."""

    def added(self, rows: Sequence[int], now: float) -> None:
        """Count the storing of a chunk as its first use."""
        if not rows:
            return
        self._rings.insert(rows, _ONE)
        cover(max(rows), self._ages, self._depths, self._uses, self._worths)
        above = self._depth_of(self._chunks.parents[rows[0]])
        for depth, row in enumerate(rows, above + 1):
            self._depths[row] = min(depth, MAX_DEPTH)
            self._uses[row] = 1
            self._worths[row] = self._worth(row)
        self._place(rows)

    def used(self, rows: Sequence[int], now: float) -> None:
        """Raise the priority of each chunk."""
        held = self._rings.held(rows)
        uses = self._uses
        for row in held:
            if uses[row] < MAX_USES:
                uses[row] += 1
        self._place(held)

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        """Let the tier age up to the priority of evicted chunks."""
        if reason is RemovalReason.EVICTED:
            ring_of = self._rings.ring_of
            for row in self._rings.held(rows):
                self._age = max(self._age, self._ages[row] + _VALUES[ring_of[row]])
        self._rings.remove(rows)

    def resized(self, row: int, change: int) -> None:
        """Take the new length into account."""
        if self._rings.held([row]):
            self._worths[row] = self._worth(row)
            self._place([row])

    def _order(self) -> Iterator[int]:
        rings, ages = self._rings, self._ages
        coldest = [(ring, rings.coldest(ring)) for ring, count in enumerate(rings.counts) if count]
        heap = [(ages[row] + _VALUES[ring], ring, row) for ring, row in coldest]
        heapq.heapify(heap)
        while heap:
            _, ring, row = heap[0]
            yield row
            following = rings.warmer(row)
            if following == NO_ROW:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (ages[following] + _VALUES[ring], ring, following))

    def _rest(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._ages[row] = self._age
        super()._rest(rows)

    def _place(self, rows: Sequence[int]) -> None:
        """Put chunks of a prompt into the rings of their values, the root as the warmest."""
        uses, worths, ages, age = self._uses, self._worths, self._ages, self._age
        worth = 0
        places = []
        for row in reversed(rows):
            ages[row] = age
            if worths[row] < worth:
                worths[row] = worth
            worth = worths[row]
            places.append(worth + _STEPS[uses[row]])
        # Neighbours mostly have the same value. The root is moved last, to become the warmest.
        stop = len(rows)
        for place, run in groupby(places):
            start = stop - len(list(run))
            self._rings.move(rows[start:stop], min(place, _HIGHEST))
            stop = start

    def _worth(self, row: int) -> int:
        seconds = self._chunks.hints.recompute_seconds(row)
        if seconds <= 0:
            seconds = self._chunk_seconds * (1 + (self._depths[row] - 1) / self._depth)
        length = max(self._chunks.lengths[row], 1)
        return max(0, min(_ONE + round(STEPS_A_DOUBLING * log2(seconds / length)), _HIGHEST))

    def _depth_of(self, row: int) -> int:
        """Return the depth of a chunk that may be in another tier; 0 for :data:`NO_PARENT`."""
        parents, rings = self._chunks.parents, self._rings
        above = 0
        while row != NO_PARENT and not rings.held([row]) and above < MAX_DEPTH:
            row = parents[row]
            above += 1
        return above if row == NO_PARENT else above + self._depths[row]
