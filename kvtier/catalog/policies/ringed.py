"""Base of the policies that keep the chunks of a tier in several rings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

from kvtier.catalog.eviction import ChunkColumns, EvictionPolicy, PolicySettings
from kvtier.catalog.policies.rings import Rings


class RingPolicy(EvictionPolicy):
    """Chunks in :class:`Rings`. Those that a search has offered in vain are not in the way of the next one.

    Chunks that are leased, pinned or parents stay in the tier, although they may be the coldest. If they
    stayed the coldest, every search would pass by all of them. So the next search first makes them the
    warmest: each is passed by once, and then the others have their turn.
    """

    def __init__(
        self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns, rings: int
    ) -> None:
        super().__init__(settings, capacity_bytes, chunks)
        self._chunks = chunks
        self._rings = Rings(rings)
        self._offered: list[int] = []
        """What the last search has offered, except the last chunk: whether it may leave was not examined."""
        self._full = 0
        """How many chunks the tier held when the last evictions began, after an addition."""
        self._evicting = False

    def victims(self) -> Iterator[int]:
        """Yield the chunks in the policy's order."""
        if self._offered:
            offered, self._offered = self._offered, []
            self._rest(self._rings.held(offered))
        for row in self._order():
            yield row
            self._offered.append(row)

    def evictable(self, rows: Sequence[int]) -> None:
        """Keep the place of chunks that may leave: they are not in the way."""
        if self._offered:
            leaving = set(rows)
            self._offered = [row for row in self._offered if row not in leaving]

    def _begin_eviction(self) -> None:
        """Note how many chunks the tier holds. Called before the evicted ones are removed."""
        if not self._evicting:
            self._evicting, self._full = True, len(self._rings)

    @abstractmethod
    def _order(self) -> Iterator[int]:
        """Yield each row once, in the order of eviction. May move rows that were not yielded yet."""

    def _rest(self, rows: Sequence[int]) -> None:
        """Make chunks that were offered in vain the warmest of their rings. The first stays the coldest."""
        by_ring: dict[int, list[int]] = {}
        for row in reversed(rows):
            by_ring.setdefault(self._rings.ring_of[row], []).append(row)
        for ring, same in by_ring.items():
            self._rings.move(same, ring)
