"""W-TinyLFU eviction policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from pydantic import Field

from kvtier.catalog.eviction import ChunkColumns, PolicySettings, RemovalReason
from kvtier.catalog.policies.ghosts import hashes_of
from kvtier.catalog.policies.rings import RingPolicy, cover
from kvtier.catalog.policies.sketch import MAX_COUNT, Sketch
from kvtier.units import Number

WINDOW, PROBATION, PROTECTED = 0, 1, 2
SAMPLE = 10
"""Uses per chunk in the tier after which all counts are halved."""
MIN_SAMPLE = 1000
_HALF = bytes(value >> 1 for value in range(256))


class TinyLfuSettings(PolicySettings):
    """Settings of the policy ``tinylfu``."""

    window: Number = Field(
        default=0.01, gt=0, lt=1, description="Fraction of the chunks in the window, for new ones."
    )
    protected: Number = Field(
        default=0.8,
        ge=0,
        lt=1,
        description="Fraction of the others that uses can protect.",
    )


class TinyLfuPolicy(RingPolicy):
    """Lets a chunk in from a small window only if it is used more often than what it replaces.

    Einziger, Friedman and Manes, *TinyLFU: a highly efficient cache admission policy* (2017), with the
    segments and the halving of Caffeine. A chunk in the tier has a counter of its own, and only those of
    evicted chunks are in the sketch: so a use counts up a byte. 10 bytes per chunk, and 4 to 8 for the
    sketch. The capacity is what the tier holds, in chunks.
    """

    settings_type = TinyLfuSettings

    def __init__(self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns) -> None:
        super().__init__(settings, capacity_bytes, chunks, rings=3)
        assert isinstance(settings, TinyLfuSettings)
        self._window, self._protected = settings.window, settings.protected
        self._sketch = Sketch()
        self._uses = bytearray()
        self._candidates: deque[int] = deque()
        """The chunks that have left the window last, coldest first, and have not competed for their place."""
        self._sampled = 0

    def added(self, rows: Sequence[int], now: float) -> None:
        """Put chunks into the window, with their count before."""
        self._rings.insert(rows, WINDOW)
        cover(max(rows, default=-1), self._uses)
        for row, hashed in zip(rows, hashes_of(self._chunks, rows), strict=True):
            self._uses[row] = min(self._sketch.count(hashed) + 1, MAX_COUNT)
        self._sketch.fit(len(self._rings))
        self._leave_window()
        self._sample(len(rows))

    def used(self, rows: Sequence[int], now: float) -> None:
        """Make a prefix the warmest: in the window what is there, and protected what is not."""
        rings, uses = self._rings, self._uses
        held = rings.held(rows)
        for row in held:
            if uses[row] < MAX_COUNT:
                uses[row] += 1
        ring_of = rings.ring_of
        in_window = [row for row in held if ring_of[row] == WINDOW]
        if in_window:
            rings.move(in_window, WINDOW)
            held = [row for row in held if ring_of[row] != WINDOW]
        rings.move(held, PROTECTED)
        self._demote()
        self._sample(len(held) + len(in_window))

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        """Remember how often evicted chunks were used."""
        if reason is RemovalReason.EVICTED:
            held = self._rings.held(rows)
            for row, hashed in zip(held, hashes_of(self._chunks, held), strict=True):
                self._sketch.put(hashed, self._uses[row])
        self._rings.remove(rows)

    def _order(self) -> Iterator[int]:
        rings, uses, candidates = self._rings, self._uses, self._candidates
        seen: set[int] = set()
        for ring in (PROBATION, PROTECTED, WINDOW):
            for row in rings.rows(ring):
                while candidates:
                    candidate = candidates.popleft()
                    if rings.ring(candidate) != PROBATION or candidate in seen:
                        continue
                    if candidate == row or uses[candidate] > uses[row]:
                        break
                    seen.add(candidate)
                    yield candidate
                if row not in seen:
                    seen.add(row)
                    yield row

    def _leave_window(self) -> None:
        """Move the coldest chunks of a window that is full to probation, where they have to compete."""
        rings = self._rings
        in_window = max(1, int(len(rings) * self._window))
        coldest = list(islice(rings.rows(WINDOW), max(0, rings.counts[WINDOW] - in_window)))
        rings.move(coldest[::-1], PROBATION)
        self._candidates.extend(coldest)
        while len(self._candidates) > max(in_window, len(coldest)):
            self._candidates.popleft()

    def _demote(self) -> None:
        """Move the coldest protected chunks to probation, if there are too many."""
        rings = self._rings
        most = int((len(rings) - rings.counts[WINDOW]) * self._protected)
        surplus = rings.counts[PROTECTED] - most
        if surplus > 0:
            coldest = list(islice(rings.rows(PROTECTED), surplus))
            rings.move(coldest[::-1], PROBATION)

    def _sample(self, uses: int) -> None:
        """Halve all counts once there were enough uses, so that popularity fades: 2 ms per million chunks."""
        self._sampled += uses
        if self._sampled >= max(SAMPLE * len(self._rings), MIN_SAMPLE):
            self._sampled //= 2
            self._uses = self._uses.translate(_HALF)
            self._sketch.halve()
