"""Admission: which chunks are worth a write to a lower tier.

A chunk is used when an engine stores it, and whenever a lookup finds it. What is used once and never again
costs writes, and so the life of a disk. A tier that admits chunks on their ``second_use`` takes those that
are used again while they are in memory, and those that are stored again after they were dropped from it; one
that admits what is ``expected`` also takes those for which a pin, a hint or the first tier's eviction policy
expects a use. :class:`~kvtier.tiers.planner.TransferPlanner` asks, for caches and simulations alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from struct import Struct

from kvtier.catalog.catalog import Catalog
from kvtier.catalog.policies.rings import cover
from kvtier.catalog.policies.sketch import Sketch
from kvtier.memory.keys import ChunkKey
from kvtier.tiers.level import MAX_TRACKED_CHUNKS, Level

FIRST_USE, EXPECTED = "first_use", "expected"

_ONCE, _AGAIN, _UNUSED = 0, 1, 2
"""How often the chunk in a row was used. Unused: a peer pushed it, for a request that will look it up."""

PARTS = 256
"""Sketches, by the first byte of the key: none of them is so large that aging or growing it takes long."""
MIN_KEYS = 256
"""Keys for which the smallest sketch has room, twice: those since it was aged, and those before."""
_SEEN = 2
"""The count of a key that was seen. Aging halves it, so that it is forgotten the second time."""
_HASH = Struct("<8xQ")


class Doorkeeper:
    """Remembers each key until between one and two times ``keys`` others were seen: see :meth:`seen`.

    The doorkeeper of Einziger, Friedman and Manes, *TinyLFU: a highly efficient cache admission policy*
    (2017), except that keys are forgotten in two steps instead of all at once. Keys are digests, so a part of
    one is as good as a hash. Takes 512 KiB for up to 65,536 keys, and 8 to 16 bytes for each one beyond.
    Takes a key for one that was seen, wrongly, in one of 40 cases at most.
    """

    def __init__(self) -> None:
        self._sketches = [Sketch() for _ in range(PARTS)]
        self._noted = array("I", bytes(4 * PARTS))
        """Keys that were noted in each sketch since it was aged."""

    def seen(self, chunks: Sequence[ChunkKey], keys: int) -> list[bool]:
        """Return which chunks were seen before, and remember all of them. 3 µs for each.

        ``keys``: how many to remember at least.
        """
        sketches, noted, limit = self._sketches, self._noted, max(MIN_KEYS, keys // PARTS)
        seen = []
        for key in chunks:
            part = key[0]
            before = sketches[part].put(_HASH.unpack_from(key)[0], _SEEN)
            seen.append(before > 0)
            if before < _SEEN:
                noted[part] += 1
                if noted[part] == MIN_KEYS:
                    sketches[part].fit(2 * limit)
                if noted[part] >= limit:
                    noted[part] = 0
                    sketches[part].halve()
        return seen


class Admission:
    """Knows which chunks were used again: a byte for each row of the catalog, and a :class:`Doorkeeper`.

    Not thread-safe. Nothing is tracked, and nothing takes time, if all tiers admit every chunk.
    """

    def __init__(self, catalog: Catalog, tiers: Sequence[Level], clock: Callable[[], float]) -> None:
        """``tiers``: all of them. ``clock``: that of the catalog."""
        self._catalog = catalog
        self._columns = catalog.columns
        self._tiers = tiers
        self._clock = clock
        self.selective = any(tier.admit != FIRST_USE and tier.write != "never" for tier in tiers[1:])
        """Whether some lower tier does not admit every chunk."""
        self._uses = bytearray()
        """By row. It may be that of an earlier chunk in the row until the row's chunk is stored or used."""
        self._doorkeeper = Doorkeeper() if self.selective else None

    def stored(self, keys: Sequence[ChunkKey]) -> None:
        """Count the use of chunks that an engine has stored in the first tier. 4 µs for each."""
        if self._doorkeeper is None:
            return
        seen = self._doorkeeper.seen(keys, self._remembered_keys())
        for key, again in zip(keys, seen, strict=True):
            self._set(key, _AGAIN if again else _ONCE)

    def pushed(self, keys: Sequence[ChunkKey]) -> None:
        """Note that a peer has pushed chunks into the first tier, which is not a use."""
        for key in keys if self.selective else ():
            self._set(key, _UNUSED)

    def used(self, rows: Sequence[int]) -> list[int]:
        """Count a use of the chunks in these rows. Return those that are used again for the first time.

        40 ns for each that was used again before.
        """
        if self._doorkeeper is None or not rows:
            return []
        cover(max(rows), self._uses)
        uses = self._uses
        changed = [row for row in rows if uses[row] != _AGAIN]
        unused = [row for row in changed if uses[row] == _UNUSED]
        for row in changed:
            uses[row] = _AGAIN
        if not unused:
            return changed
        seen = self._doorkeeper.seen(self._columns.keys_of(unused), self._remembered_keys())
        for row, again in zip(unused, seen, strict=True):
            uses[row] = _AGAIN if again else _ONCE
        return [row for row in changed if uses[row] == _AGAIN]

    def admitted(self, tier: int, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which chunks a tier admits now. 0.5 µs for each.

        Not those whose parent it does not admit, unless some lower tier holds that: they would be useless.
        """
        admit = self._tiers[tier].admit
        if admit == FIRST_USE:
            return [True] * len(keys)
        is_expected = self._expectation() if admit == EXPECTED else None
        uses, parents = self._uses, self._columns.parents
        known = len(uses)

        def wanted(row: int) -> bool:
            again = row < known and uses[row] == _AGAIN
            return again or (is_expected is not None and is_expected(row))

        verdicts, before, last = [], -1, False
        for key in keys:
            row = self._catalog.row(key)
            verdict = row is not None and wanted(row)
            if row is not None and verdict and (parent := parents[row]) >= 0:
                verdict = last if parent == before else wanted(parent)
                verdict = verdict or self._held_below(parent)
            verdicts.append(verdict)
            before, last = -1 if row is None else row, verdict
        return verdicts

    def _expectation(self) -> Callable[[int], bool]:
        """Return a function: whether a use of the chunk in a row is expected now."""
        catalog, columns, now = self._catalog, self._columns, self._clock()
        hints, pins, policy = columns.hints, catalog.pins, catalog.policies[0]

        def is_expected(row: int) -> bool:
            if row < len(hints) and (
                hints.priority(row) > 0 or hints.resume_at(row) > now or hints.retain_until(row) > now
            ):
                return True
            return bool(pins and pins.holds(columns.key(row), now)) or policy.expects(row)

        return is_expected

    def _held_below(self, row: int) -> bool:
        [(ready, pending)] = self._catalog.places([self._columns.key(row)])
        return (ready | pending) >> 1 > 0

    def _set(self, key: ChunkKey, uses: int) -> None:
        row = self._catalog.row(key)
        if row is not None:  # Otherwise it was cleared meanwhile.
            cover(row, self._uses)
            self._uses[row] = uses

    def _remembered_keys(self) -> int:
        """Return how many chunks all tiers can hold: those used less often are of no use in any of them."""
        memory = self._tiers[0]
        length = memory.used_bytes // memory.count if memory.count else 1
        capacities = [tier.capacity for tier in self._tiers if tier.write != "never"]
        shared = MAX_TRACKED_CHUNKS * capacities.count(None)
        return sum(capacity for capacity in capacities if capacity) // max(length, 1) + shared
