"""Visits of prompts: which rows each has, in flat arrays.

A visit begins when a prompt is looked up or stored. It has the rows of its prompt that no later visit has: a
path of the tree of chunks, from its last row upwards. So the rows need no links of their own, only the number
of their visit. A prompt that comes back takes all rows of its last visit along; one that only begins like it
leaves the rest there.

A visit whose rows have all been evicted is a *ghost*: only one of its last keys and its history remain. They
show when it would have come back.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice

from kvtier import native
from kvtier.catalog.eviction import NO_PARENT, ChunkColumns

NONE = -1
"""No visit, or no row."""
MAX_GHOSTS = 1 << 16
"""More are not remembered, so that the list of their order is short."""
MAX_ANSWER_CHUNKS = 256
"""Of a longer answer the last ones count."""
VISITS_A_BLOCK = 1024
"""Visits to add to all arrays at once."""


@cache
def _empty_rings(rings: int) -> array[int]:
    """Return the links of rings without visits, to be copied: a millisecond for those of ``resume``."""
    return array("i", range(rings))


class Visits:
    """47 bytes for each visit, and 4 for each row."""

    def __init__(self, chunks: ChunkColumns, rings: int) -> None:
        """``rings``: how many there are for visits to be in."""
        self._chunks = chunks
        self.of_row = array("i")
        """The visit that has each row of the tier, or :data:`NONE`."""
        self.tails = array("i")
        """The last row of each visit; :data:`NONE` if it has no row left."""
        self.counts = array("i")
        """The number of rows of each visit."""
        self.added = array("i")
        """How many rows were added in each visit. A long prompt is stored in several parts."""
        self.since = array("d")
        """When each visit was last active, as ``time.monotonic()``."""
        self.typical = array("f")
        """The typical gap between the prompt's visits so far in seconds; 0 if it is its first one."""
        self.endings = array("H")
        """How the answer of each visit has ended: a slot of ``Endings`` plus 1; 0 if it has not."""
        self.marks = array("q")
        """The hash of the key of the last chunk but one of each prompt with an answer behind it; or 0."""
        self.ghosts: dict[int, int] = {}
        """The visits that have lost rows to eviction, by the hash of one of their last keys."""
        self._ghost_order: deque[int] = deque()
        """Those hashes, the oldest first, and some of former ghosts."""
        self.ghost_keys = array("q")
        """The key of each visit in :attr:`ghosts`; 0 if it is not there."""
        self.rings = array("i")
        """The ring of each visit."""
        self.sizes = array("i", bytes(4 * rings))
        """The number of visits in each ring."""
        self._newer, self._older = _empty_rings(rings)[:], _empty_rings(rings)[:]
        self._ends = rings
        self._vacant: list[int] = []

    def __len__(self) -> int:
        """Return the number of visits, ghosts included."""
        return len(self.tails) - len(self._vacant)

    def new(self, now: float, ring: int) -> int:
        """Begin a visit without rows, as the newest of a ring."""
        if not self._vacant:
            self._grow()
        visit = self._vacant.pop()
        self.since[visit] = now
        self.typical[visit] = 0.0
        self.added[visit] = self.endings[visit] = self.marks[visit] = 0
        self.append(visit, ring)
        return visit

    def _grow(self) -> None:
        first = len(self.tails)
        for numbers in (self.tails, self.rings, self._newer, self._older):
            numbers.extend([NONE] * VISITS_A_BLOCK)
        counts = self.counts, self.added, self.endings
        for column in (*counts, self.marks, self.ghost_keys, self.since, self.typical):
            column.frombytes(bytes(VISITS_A_BLOCK * column.itemsize))
        self._vacant += range(first + VISITS_A_BLOCK - 1, first - 1, -1)

    def end(self, visit: int) -> None:
        """Forget a visit that has no rows."""
        self.forget_ghost(visit)
        self._unlink(visit)
        self._vacant.append(visit)

    # Rows.

    def visit(self, row: int) -> int:
        """Return the visit that has a row, or :data:`NONE`."""
        return self.of_row[row] if 0 <= row < len(self.of_row) else NONE

    def cover(self, highest: int) -> None:
        """Make the arrays long enough for a row."""
        missing = highest + 1 - len(self.of_row)
        if missing > 0:
            self.of_row.extend([NONE] * max(missing, VISITS_A_BLOCK))

    def give(self, visit: int, rows: Sequence[int]) -> None:
        """Add consecutive rows below the visit's own, which no other visit has."""
        if self.counts[visit] and self.tails[visit] != self._chunks.parents[rows[0]]:
            self._split(visit, self.tails[visit])  # What is between was declined.
        of_row = self.of_row
        for row in rows:
            of_row[row] = visit
        self.tails[visit] = rows[-1]
        self.counts[visit] += len(rows)

    def runs(self, rows: Sequence[int]) -> list[list[int]]:
        """Return those of the rows that visits have, as lists in which each is the parent of the next."""
        of_row, parents = self.of_row, self._chunks.parents
        if native.available():
            return native.core.visits_runs(of_row, parents, rows)
        runs: list[list[int]] = []
        for row in rows:
            if self.visit(row) == NONE:
                continue
            if runs and parents[row] == runs[-1][-1]:
                runs[-1].append(row)
            else:
                runs.append([row])
        return runs

    def take(self, visit: int, rows: Sequence[int]) -> list[int]:
        """Move consecutive rows from their visits to a new one. Return the visits that have none left."""
        if native.available():
            emptied = native.core.visits_take(self.of_row, self.counts, visit, rows)
        else:
            emptied = self._take(visit, rows)
        for other in emptied:
            self.tails[other] = NONE
        self.tails[visit] = rows[-1]
        above = self._chunks.parents[rows[0]]
        other = self.visit(above)
        if other != NONE and other != visit:
            self._cut(other, above)
        return emptied

    def _take(self, visit: int, rows: Sequence[int]) -> list[int]:
        of_row, counts = self.of_row, self.counts
        emptied = []
        for row in rows:
            before, of_row[row] = of_row[row], visit
            counts[visit] += 1
            counts[before] -= 1
            if not counts[before]:
                emptied.append(before)
        return emptied

    def _cut(self, visit: int, above: int) -> None:
        """Restore the path of a visit that has lost the rows below one of its own."""
        if self.visit(self.tails[visit]) != visit:
            self.tails[visit] = above
        elif self.tails[visit] != above:
            self._split(visit, above)

    def _split(self, visit: int, above: int) -> None:
        """Give the rows of a visit from ``above`` upwards a visit of their own, so that each has one path."""
        split = self.new(self.since[visit], self.rings[visit])
        self.typical[split], self.endings[split] = self.typical[visit], self.endings[visit]
        self.marks[split] = self.marks[visit]
        rows = []
        while above != NO_PARENT and self.visit(above) == visit:
            rows.append(above)
            above = self._chunks.parents[above]
        rows.reverse()
        self.counts[visit] -= len(rows)
        self.give(split, rows)

    def path(self, visit: int) -> Iterator[int]:
        """Yield the rows of a visit, the last one first."""
        of_row, parents, row = self.of_row, self._chunks.parents, self.tails[visit]
        for _ in range(self.counts[visit]):
            yield row
            row = parents[row]
            if row < 0 or of_row[row] != visit:
                return

    def lose(self, row: int) -> int:
        """Remove a row from its visit, and return that one."""
        visit = self.of_row[row]
        self.of_row[row] = NONE
        self.counts[visit] -= 1
        above = self._chunks.parents[row]
        if self.visit(above) == visit:
            self._cut(visit, above)
        elif self.tails[visit] == row:
            self.tails[visit] = NONE
        return visit

    def last_rows(self, visit: int) -> list[int]:
        """Return the last two rows of a visit, and those from its mark on."""
        tail, mark = self.tails[visit], self.marks[visit]
        rows = [row for row in (tail, self._chunks.parents[tail]) if row != NO_PARENT]
        answer: list[int] = []
        for row in islice(self.path(visit), MAX_ANSWER_CHUNKS if mark else 0):
            answer.append(row)
            if hash(self._chunks.key(row)) == mark:
                return rows + answer
        return rows

    # Ghosts.

    def mark(self, visit: int, key: bytes) -> None:
        """Recognise a visit from a chunk on: behind it is the answer, which not every next turn contains."""
        self.marks[visit] = hash(key)
        # If another visit is remembered by it, this one keeps its key: without any, it would stay for ever.
        if self.ghost_keys[visit] and self.marks[visit] not in self.ghosts:
            self.forget_ghost(visit)
            self.remember(visit, key)

    def remember(self, visit: int, key: bytes) -> None:
        """Remember the mark of a visit or else a key, unless it has one, or another visit has the same."""
        number = self.marks[visit] or hash(key) or 1  # 0 stands for no key.
        if self.ghost_keys[visit] or number in self.ghosts or len(self.ghosts) >= MAX_GHOSTS:
            return
        self.ghosts[number] = visit
        self.ghost_keys[visit] = number
        self._ghost_order.append(number)
        if len(self._ghost_order) > 4 * len(self.ghosts) + VISITS_A_BLOCK:
            self._ghost_order = deque(number for number in self._ghost_order if number in self.ghosts)

    def oldest_ghost(self) -> int:
        """Forget the key that has been remembered for longest. Return its visit, or :data:`NONE`."""
        while self._ghost_order:
            visit = self.ghosts.get(self._ghost_order.popleft(), NONE)
            if visit != NONE:
                self.forget_ghost(visit)
                return visit
        return NONE

    def forget_ghost(self, visit: int) -> None:
        """Undo :meth:`remember`."""
        if number := self.ghost_keys[visit]:
            del self.ghosts[number]
            self.ghost_keys[visit] = 0

    # Rings.

    def append(self, visit: int, ring: int) -> None:
        """Link a visit that is in no ring as the newest of one."""
        self.rings[visit] = ring
        self.sizes[ring] += 1
        node, ends = visit + self._ends, ring
        newest = self._older[ends]
        self._older[node], self._newer[node] = newest, ends
        self._newer[newest] = self._older[ends] = node

    def _unlink(self, visit: int) -> None:
        node = visit + self._ends
        newer, older = self._newer[node], self._older[node]
        self._older[newer], self._newer[older] = older, newer
        self.sizes[self.rings[visit]] -= 1
        self.rings[visit] = NONE

    def move(self, visit: int, ring: int) -> None:
        """Make a visit the newest of another ring."""
        self._unlink(visit)
        self.append(visit, ring)

    def move_on(self, ring: int, at: int, starts: array[float], now: float, most: int) -> Sequence[int]:
        """Move the visits that are too old for a ring to later ones, up to ``most``, the oldest first.

        ``starts``: the age at which each span starts. ``ring`` is that of span ``at``, and those of the later
        spans follow. Return how many were moved into each span.
        """
        if native.available():
            links = self._newer, self._older, self.rings, self.sizes
            return native.core.visits_move_on(*links, self.since, ring, at, starts, now, most)
        moved = [0] * len(starts)
        while most > 0 and (node := self._newer[ring]) != ring:
            visit = node - self._ends
            reached = max(0, bisect_right(starts, now - self.since[visit]) - 1)
            if reached <= at:
                break
            self.move(visit, ring - at + reached)
            moved[reached] += 1
            most -= 1
        return moved

    def in_ring(self, ring: int, *, newest_first: bool = False) -> Iterator[int]:
        """Yield the visits of a ring, by default the oldest first. The ring must not change meanwhile."""
        links = self._older if newest_first else self._newer
        node = links[ring]
        while node != ring:
            yield node - self._ends
            node = links[node]
