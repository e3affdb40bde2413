"""Doubly linked rings of rows in two flat arrays, and the base of the policies that keep chunks in them."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence

from kvtier import native
from kvtier.catalog.eviction import ChunkColumns, EvictionPolicy, PolicySettings

NO_ROW = -1
"""In place of a row: a ring has no further one."""
NOWHERE = 255
"""In place of a ring's number: the row is in none."""
MAX_RINGS = NOWHERE
MAX_PASSED = 4096
"""Chunks that a search may pass by before it yields one, although that was used: it blocks the event loop."""
FEW = 4
"""Up to this number, rows are linked faster without the native core."""


def cover(highest: int, *columns: array[int] | array[float] | bytearray) -> None:
    """Append zeros to columns so that they have a row. Rows are added in order, so this is rarely long."""
    for column in columns:
        missing = highest + 1 - len(column)
        if missing <= 0:
            continue
        if isinstance(column, bytearray):
            column += bytes(missing)
        else:
            column.frombytes(bytes(missing * column.itemsize))


class Rings:
    """Rings numbered from 0, each from its coldest to its warmest row. A row is in one ring, or in none.

    They take 9 bytes per chunk, whatever their number.
    The first nodes of the arrays are the sentinels of the rings, each for both ends of its ring. After them
    come the rows. Batches are those of one prompt, from its root: the root becomes the warmest.
    """

    def __init__(self, rings: int) -> None:
        """``rings``: their number, at most :data:`MAX_RINGS`."""
        self.counts = array("q", bytes(8 * rings))
        """The number of rows in each ring."""
        self.ring_of = bytearray()
        """The ring of each row, or :data:`NOWHERE`. Read-only for others."""
        self._sentinels = rings
        self._warmer = array("i", range(rings))
        self._colder = array("i", range(rings))

    def __len__(self) -> int:
        """Return the number of rows in all rings."""
        return sum(self.counts)

    def ring(self, row: int) -> int:
        """Return the ring of a row, or :data:`NOWHERE`. The row may be any integer."""
        return self.ring_of[row] if 0 <= row < len(self.ring_of) else NOWHERE

    def held(self, rows: Sequence[int]) -> list[int]:
        """Return those of the rows that are in a ring, each once and in the same order."""
        ring_of, known = self.ring_of, len(self.ring_of)
        held = [row for row in rows if row < known and ring_of[row] != NOWHERE]
        return held if len(set(held)) == len(held) else list(dict.fromkeys(held))

    def insert(self, rows: Sequence[int], ring: int) -> None:
        """Add rows that are in no ring, as the warmest of one."""
        if not rows:
            return
        missing = max(rows) + 1 - len(self.ring_of)
        if missing > 0:
            self.ring_of += bytes([NOWHERE]) * missing
            self._warmer.frombytes(bytes(missing * self._warmer.itemsize))
            self._colder.frombytes(bytes(missing * self._colder.itemsize))
        self._link(rows, ring)

    def use(self, rows: Sequence[int], ring: int) -> None:
        """Make those of the rows that are in any ring the warmest of one."""
        if native.available():
            native.core.rings_use(self._warmer, self._colder, self.ring_of, self.counts, rows, ring)
        else:
            self.move(self.held(rows), ring)

    def move(self, rows: Sequence[int], ring: int) -> None:
        """Make rows that are in any rings the warmest of one."""
        self._unlink(rows)
        self._link(rows, ring)

    def remove(self, rows: Sequence[int]) -> None:
        """Remove those of the rows that are in a ring."""
        held = self.held(rows)
        self._unlink(held)
        for row in held:
            self.ring_of[row] = NOWHERE

    def coldest(self, ring: int) -> int:
        """Return the coldest row of a ring, or :data:`NO_ROW`."""
        node = self._warmer[ring]
        return NO_ROW if node == ring else node - self._sentinels

    def warmer(self, row: int) -> int:
        """Return the next warmer row of the same ring, or :data:`NO_ROW`."""
        node = self._warmer[row + self._sentinels]
        return NO_ROW if node < self._sentinels else node - self._sentinels

    def rows(self, ring: int) -> Iterator[int]:
        """Yield the rows of a ring, coldest first. A row that was yielded may be moved or removed meanwhile.

        Rows that become the warmest meanwhile are yielded as well, unless they are the last one.
        """
        row = self.coldest(ring)
        while row != NO_ROW:
            following = self.warmer(row)
            yield row
            row = following

    def _link(self, rows: Sequence[int], ring: int) -> None:
        self.counts[ring] += len(rows)
        ring_of, first = self.ring_of, self._sentinels
        for row in rows:
            ring_of[row] = ring
        warmer, colder = self._warmer, self._colder
        if len(rows) > FEW and native.available():
            # The native ring numbers rows from node 1. Rows are linked just colder than the ring's sentinel.
            shift = first - 1
            native.core.lru_link_chain(warmer, colder, [row + shift for row in rows], ring - 1)
            return
        above = ring
        for row in rows:
            node, below = row + first, colder[above]
            warmer[node], colder[node] = above, below
            warmer[below] = colder[above] = node
            above = node

    def _unlink(self, rows: Sequence[int]) -> None:
        ring_of, first = self.ring_of, self._sentinels
        warmer, colder = self._warmer, self._colder
        if len(rows) <= FEW or not native.available():
            for row in rows:
                node = row + first
                above, below = warmer[node], colder[node]
                warmer[below], colder[above] = above, below
                self.counts[ring_of[row]] -= 1
            return
        shift = first - 1
        native.core.lru_unlink(warmer, colder, [row + shift for row in rows])
        left = bytes([ring_of[row] for row in rows])
        for ring in set(left):
            self.counts[ring] -= left.count(ring)


class RingPolicy(EvictionPolicy):
    """Chunks in :class:`Rings`. Those that a search could not evict are not in the way of the next one.

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
        """Make chunks that could not be evicted the warmest of their rings. The first stays the coldest."""
        by_ring: dict[int, list[int]] = {}
        for row in reversed(rows):
            by_ring.setdefault(self._rings.ring_of[row], []).append(row)
        for ring, same in by_ring.items():
            self._rings.move(same, ring)
