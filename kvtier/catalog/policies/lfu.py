"""LFU eviction policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from pydantic import Field

from kvtier.catalog.eviction import ChunkColumns, PolicySettings, RemovalReason
from kvtier.catalog.policies.rings import MAX_RINGS, NO_ROW, RingPolicy, cover

MAX_USES = MAX_RINGS - 1


class LfuSettings(PolicySettings):
    """Settings of the policy ``lfu``."""

    ageing: bool = Field(
        default=True, description="Let chunks leave in the end that were used often a long time ago."
    )


class LfuPolicy(RingPolicy):
    """Evicts the chunks with the fewest uses, the least recently used of these first. 10 bytes per chunk.

    With ageing it is LFU-DA: Arlitt et al., *Evaluating content management techniques for Web proxy caches*
    (2000). The level of a chunk is the number of its uses plus the age of the tier at the last one; the age
    is the level at which chunks are evicted. Each level has a ring. A chunk that was offered and not
    evicted is in use, which counts as a use.
    """

    settings_type = LfuSettings

    def __init__(self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns) -> None:
        super().__init__(settings, capacity_bytes, chunks, rings=MAX_RINGS)
        assert isinstance(settings, LfuSettings)
        self._ages = settings.ageing
        self._age = 0
        """No chunk has a lower level, and none a level that is higher by more than ``MAX_USES``."""
        self._uses = bytearray()

    def added(self, rows: Sequence[int], now: float) -> None:
        """Count the storing of a chunk as its first use."""
        self._rings.insert(rows, (self._age + 1) % MAX_RINGS)
        cover(max(rows, default=-1), self._uses)
        for row in rows:
            self._uses[row] = 1

    def used(self, rows: Sequence[int], now: float) -> None:
        """Raise the level of each chunk."""
        held = self._rings.held(rows)
        uses, age = self._uses, self._age
        for row in held:
            if uses[row] < MAX_USES:
                uses[row] += 1
        # Neighbours mostly have the same number of uses. The root is moved last, to become the warmest.
        runs = [list(run) for _, run in groupby(held, uses.__getitem__)]
        for run in reversed(runs):
            self._rings.move(run, (age + uses[run[0]]) % MAX_RINGS)

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        """Let the tier age up to the level of evicted chunks."""
        rings, age = self._rings, self._age
        oldest = age
        if self._ages and reason is RemovalReason.EVICTED:
            levels = [age + (rings.ring_of[row] - age) % MAX_RINGS for row in rings.held(rows)]
            oldest = max(levels, default=age)
        rings.remove(rows)
        while self._age < oldest and rings.coldest(self._age % MAX_RINGS) == NO_ROW:
            self._age += 1

    def _order(self) -> Iterator[int]:
        for level in range(self._age, self._age + MAX_RINGS):
            yield from self._rings.rows(level % MAX_RINGS)

    def _rest(self, rows: Sequence[int]) -> None:
        self.used(rows[::-1], 0.0)
