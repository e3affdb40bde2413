"""S3-FIFO eviction policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import Field

from kvtier.catalog.eviction import ChunkColumns, PolicySettings, RemovalReason
from kvtier.catalog.policies.ghosts import Ghosts, hashes_of
from kvtier.catalog.policies.rings import MAX_PASSED, NO_ROW, RingPolicy, cover
from kvtier.units import Number

SMALL, MAIN = 0, 1
MAX_USES = 3
PROMOTED_USES = 2
"""The number of uses with which a chunk leaves the small queue for the main one."""


class S3FifoSettings(PolicySettings):
    """Settings of the policy ``s3fifo``."""

    small: Number = Field(
        default=0.1, gt=0, lt=1, description="Fraction of the chunks in the small queue, for new ones."
    )
    ghosts: Number = Field(
        default=0.9, ge=0, le=1, description="Evicted chunks to remember, for each chunk in the tier."
    )


class S3FifoPolicy(RingPolicy):
    """Two queues: new chunks leave soon, unless they are used twice. 10 bytes per chunk and ghosts.

    Yang et al., *FIFO queues are all you need for cache eviction* (SOSP 2023). A use only counts up a byte. A
    chunk that comes back soon after it has left the small queue goes to the main queue. The capacity is what
    the tier holds, in chunks.
    """

    settings_type = S3FifoSettings

    def __init__(self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns) -> None:
        super().__init__(settings, capacity_bytes, chunks, rings=2)
        assert isinstance(settings, S3FifoSettings)
        self._small, self._ghosts_a_chunk = settings.small, settings.ghosts
        self._ghosts = Ghosts()
        self._uses = bytearray()

    def added(self, rows: Sequence[int], now: float) -> None:
        """Append chunks to the small queue, and those that come back to the main queue."""
        self._evicting = False
        new: list[int] = list(rows)
        returned: list[int] = []
        if self._ghosts:
            new = []
            for row, hashed in zip(rows, hashes_of(self._chunks, rows), strict=True):
                (returned if self._ghosts.discard(hashed) else new).append(row)
        self._rings.insert(new, SMALL)
        self._rings.insert(returned, MAIN)
        cover(max(rows, default=-1), self._uses)
        for row in rows:
            self._uses[row] = 0

    def used(self, rows: Sequence[int], now: float) -> None:
        """Count a use of each chunk. Those of other tiers start at 0 when they are added to this one."""
        uses, known = self._uses, len(self._uses)
        for row in rows:
            if row < known and uses[row] < MAX_USES:
                uses[row] += 1

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        """Remember which chunks are evicted from the small queue."""
        rings = self._rings
        if reason is RemovalReason.EVICTED:
            self._begin_eviction()
            limit = int(self._full * self._ghosts_a_chunk)
            left = [row for row in rings.held(rows) if rings.ring_of[row] == SMALL]
            for hashed in hashes_of(self._chunks, left):
                self._ghosts.add(hashed, limit)
        rings.remove(rows)

    def _order(self) -> Iterator[int]:
        rings, uses, left = self._rings, self._uses, list(self._rings.counts)
        in_main = len(rings) - int(len(rings) * self._small)
        next_small, next_main = rings.coldest(SMALL), rings.coldest(MAIN)
        passed = 0
        while left[SMALL] or left[MAIN]:
            if left[MAIN] > in_main or not left[SMALL]:
                row, next_main = next_main, rings.warmer(next_main)
                if uses[row] and passed < MAX_PASSED:
                    passed += 1
                    uses[row] -= 1
                    rings.move([row], MAIN)
                    next_main = row if next_main == NO_ROW else next_main
                    continue
                left[MAIN] -= 1
            else:
                row, next_small = next_small, rings.warmer(next_small)
                left[SMALL] -= 1
                if uses[row] >= PROMOTED_USES and passed < MAX_PASSED:
                    passed += 1
                    uses[row] = 0
                    rings.move([row], MAIN)
                    next_main = row if next_main == NO_ROW else next_main
                    left[MAIN] += 1
                    continue
            passed = 0
            yield row
