"""The controller's index: which places hold which chunks. Designed for a hundred million keys.

A *place* is one tier of one instance, identified by a small integer. Chunks of one prompt are mostly held by
the same places. So a key maps to the number of an interned *set* of places, and adding or removing a place is
a lookup of the transition from that set. The table of keys is the native core's, or 256 dictionaries without
it: 3 times as much memory, and twice the time of a rebuild, messages included.

Keys are added to a place under a *label*, which is never reused. Dropping a place removes its label in
constant time; sets and keys that still refer to the label are swept in slices, between other work.

Synchronous, not thread-safe. Takes about 45 bytes for each key, and none for its second place:
``benchmarks/controller_rebuild.py`` measures it.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

from kvtier import native
from kvtier.memory.keys import ChunkKey, split_keys

MAX_KEYS = 125_000_000
"""Indexed at once: a thousand instances with 100,000 chunks each, and a quarter more. Takes 6 GB.

Further keys are dropped, and lookups do not find them."""
MAX_PYTHON_KEYS = 25_000_000
"""The same without the native core, where these take 3 GB."""
MAX_SETS = 1 << 20
"""Combinations of places. A chunk that would need a further one keeps its previous holders."""
MAX_TRANSITIONS = 1 << 17
"""Cached transitions between sets."""
SETS_PER_SLICE = 16_384
ROWS = 256
"""Without the native core, which has other rows."""

EMPTY_SET = 0
"""The number of the empty set, to which no key refers."""

OwnerT = TypeVar("OwnerT", bound=Hashable)
Keys: TypeAlias = bytes | Sequence[ChunkKey]
"""Joined keys, or single ones."""
Moved: TypeAlias = tuple[int, int, int]
"""Two sets, and how many keys were moved from the first to the second."""
Next: TypeAlias = Callable[[int], int]
"""Returns the set that a key gets in place of its present one."""


class HolderSets:
    """Interned sets of labels, each with the number of keys that refer to it."""

    def __init__(self) -> None:
        self.labels: list[tuple[int, ...]] = [()]
        """By set number. May contain removed labels until the next sweep."""
        self.keys: list[int] = [0]
        """By set number: keys that refer to it. Undefined for ``EMPTY_SET``."""
        self.live: dict[int, int] = {}
        """The place of each live label."""
        self._numbers: dict[tuple[int, ...], int] = {(): EMPTY_SET}
        self._vacant: list[int] = []
        self._transitions: dict[tuple[int, bool, int], int] = {}
        """Cached results of :meth:`after`, by its arguments."""

    def __len__(self) -> int:
        return len(self.labels) - len(self._vacant)

    def places(self, number: int) -> list[int]:
        """Return the places of a set."""
        return [self.live[label] for label in self.labels[number] if label in self.live]

    def after(self, label: int, adds: bool, number: int) -> int:
        """Return the set with this label added, or removed; the same set if ``MAX_SETS`` is reached."""
        transition = label, adds, number
        known = self._transitions.get(transition)
        if known is None:
            if len(self._transitions) >= MAX_TRANSITIONS:
                self._transitions.clear()
            known = self._with_label(number, label) if adds else self._without_label(number, label)
            self._transitions[transition] = known
        return known

    def _with_label(self, number: int, label: int) -> int:
        labels = self.labels[number]
        if label in labels:
            return number
        others = [other for other in labels if other in self.live]
        labels_with = tuple(sorted([*others, label]))
        if labels_with in self._numbers or not others or len(self) < MAX_SETS:
            return self._number(labels_with)
        return number

    def _without_label(self, number: int, label: int) -> int:
        labels = self.labels[number]
        if label not in labels:
            return number
        return self._number(tuple(other for other in labels if other != label and other in self.live))

    def moved(self, moves: Iterable[Moved]) -> int:
        """Count keys that were moved to other sets. Return how many."""
        total = 0
        for before, after, keys in moves:
            self.keys[before] -= keys
            self.keys[after] += keys
            total += keys
        return total

    def _number(self, labels: tuple[int, ...]) -> int:
        number = self._numbers.get(labels)
        if number is None:
            if self._vacant:
                number = self._vacant.pop()
                self.labels[number] = labels
            else:
                number = len(self.labels)
                self.labels.append(labels)
                self.keys.append(0)
            self._numbers[labels] = number
        return number

    def sweep(self, numbers: range, needed: Iterable[int]) -> dict[int, int]:
        """Remove dead labels from sets, and free sets that have no keys and are not in ``needed``.

        Return the sets that thereby became equal to another one, and that other set, to which the caller must
        move their keys. It is ``EMPTY_SET`` for a set without live labels.
        """
        moves = {}
        targets = set(needed)
        for number in numbers:
            labels = self.labels[number]
            if not labels:
                continue
            if not self.keys[number] and number not in targets:
                self._rename(number, ())
                self._vacant.append(number)
                continue
            live_labels = tuple(label for label in labels if label in self.live)
            if len(live_labels) < len(labels):
                same = self._rename(number, live_labels)
                if same != number:
                    moves[number] = same
                    targets.add(same)
        # Cached transitions may lead to freed or merged sets.
        self._transitions.clear()
        return moves

    def _rename(self, number: int, labels: tuple[int, ...]) -> int:
        """Change the labels of a set. Return the set now interned under them: this one or an equal one."""
        before = self.labels[number]
        if self._numbers.get(before) == number:
            del self._numbers[before]
        self.labels[number] = labels
        return self._numbers.setdefault(labels, number)

    def vacate(self, numbers: Collection[int]) -> None:
        """Free these sets. All their keys have been moved."""
        for number in numbers:
            assert not self.keys[number]
            self.labels[number] = ()
            self._vacant.append(number)
        self._transitions.clear()


class PythonTable:
    """Maps keys to the numbers of sets: what the native core's ``KeyNumbers`` is without it.

    Sharded into dictionaries by the first byte of a key: resizing one does not stall the event loop, and the
    garbage collector skips them all.
    """

    rows = ROWS

    def __init__(self) -> None:
        self._rows: list[dict[ChunkKey, int]] = [{} for _ in range(ROWS)]

    def __len__(self) -> int:
        return sum(map(len, self._rows))

    def numbers(self, keys: Keys) -> list[int]:
        """Return the set of each key."""
        rows = self._rows
        return [rows[key[0]].get(key, EMPTY_SET) for key in _single(keys)]

    def runs(self, keys: Keys) -> list[tuple[int, int]]:
        """Return where runs of equal sets begin, and which these are, up to the first key without one."""
        rows, runs, last = self._rows, list[tuple[int, int]](), -1
        for index, key in enumerate(_single(keys)):
            number = rows[key[0]].get(key, EMPTY_SET)
            if number != last:
                runs.append((index, number))
                if number == EMPTY_SET:
                    break
                last = number
        return runs

    def change(self, keys: Keys, after: Next, max_keys: int) -> tuple[list[Moved], int]:
        """Move each key to the set ``after(its set)``; return the moves, and how many keys had no room."""
        rows, max_row = self._rows, -(-max_keys // ROWS)
        moves: dict[int, list[int]] = {}
        dropped = 0
        for key in _single(keys):
            row = rows[key[0]]
            before = row.get(key, EMPTY_SET)
            move = moves.get(before)
            if move is None:
                move = moves[before] = [after(before), 0]
            number = move[0]
            if number == before:
                continue
            if number == EMPTY_SET:
                del row[key]
            elif before != EMPTY_SET or len(row) < max_row:
                row[key] = number
            else:
                dropped += 1
                continue
            move[1] += 1
        return [(before, number, count) for before, (number, count) in moves.items() if count], dropped

    def sweep(self, row_number: int, targets: array[int]) -> list[Moved]:
        """Move all keys of a row to ``targets[their set]``; return the moves."""
        row, count = self._rows[row_number], len(targets)
        moves = [
            (number, targets[number], keys)
            for number, keys in Counter(row.values()).items()
            if number < count and targets[number] != number
        ]
        if moves:
            to = {number: after for number, after, _ in moves}
            # Rebuild the row: a dictionary does not shrink when keys are deleted.
            self._rows[row_number] = {
                key: after for key, number in row.items() if (after := to.get(number, number)) != EMPTY_SET
            }
        return moves


def _single(keys: Keys) -> Sequence[ChunkKey]:
    return split_keys(keys) if isinstance(keys, bytes) else keys


class Holders:
    """The index from keys to the places that hold them. Not thread-safe; all methods are synchronous.

    Joined keys raise ``ValueError`` (:class:`ProtocolError` without the native core) if one is cut off.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self.dropped_keys = 0
        """How often a key was dropped because the index was full."""
        self._table: PythonTable | native.core.KeyNumbers
        if native.available():
            self._table, self._max_keys = native.core.KeyNumbers(), max_keys
        else:
            self._table, self._max_keys = PythonTable(), min(max_keys, MAX_PYTHON_KEYS)
        self._sets = HolderSets()
        self._labels: dict[int, int] = {}
        self._counts: Counter[int] = Counter()
        self._new_labels = itertools.count(1)
        self._sweep = Sweep(self._table, self._sets)

    def __len__(self) -> int:
        """Return the number of indexed keys, including those without a holder until they are swept."""
        return len(self._table)

    @property
    def rows(self) -> int:
        """Number of slices in which all keys are swept."""
        return self._table.rows

    def add(self, place: int, keys: Keys) -> None:
        """Add keys to a place. Takes 65 to 150 ns per key (1 µs without the native core)."""
        label = self._labels.get(place)
        if label is None:
            label = self._labels[place] = next(self._new_labels)
            self._sets.live[label] = place
        moves, dropped = self._table.change(keys, partial(self._sets.after, label, True), self._max_keys)
        self._counts[place] += self._sets.moved(moves)
        self.dropped_keys += dropped

    def remove(self, place: int, keys: Keys) -> None:
        """Remove keys from a place. Keys that it does not hold are ignored."""
        label = self._labels.get(place)
        if label is None:
            return
        moves, _ = self._table.change(keys, partial(self._sets.after, label, False), self._max_keys)
        self._counts[place] -= self._sets.moved(moves)

    def drop(self, places: Collection[int]) -> None:
        """Remove all keys from these places. Takes constant time, independent of the number of keys."""
        for place in places:
            label = self._labels.pop(place, None)
            if label is not None:
                del self._sets.live[label]
                self._sweep.start()
            del self._counts[place]

    def count(self, place: int) -> int:
        """Return the number of keys that a place holds."""
        return self._counts[place]

    def prefixes(self, keys: Sequence[ChunkKey]) -> dict[int, int]:
        """Return how many leading keys each place holds. Places without the first key are omitted."""
        return self._leading(keys, self._sets.places)

    def prefixes_of(self, owners: Mapping[int, OwnerT], keys: Sequence[ChunkKey]) -> dict[OwnerT, int]:
        """Return how many leading keys each owner holds in any of its places. Other places are ignored."""
        places = self._sets.places
        return self._leading(
            keys, lambda number: {owners[place] for place in places(number) if place in owners}
        )

    def _leading(
        self, keys: Sequence[ChunkKey], owners_in: Callable[[int], Collection[OwnerT]]
    ) -> dict[OwnerT, int]:
        found: dict[OwnerT, int] = {}
        holding: Collection[OwnerT] | None = None
        # Chunks of one prompt mostly have the same holders, so there are few runs.
        for index, number in self._table.runs(keys):
            here = owners_in(number)
            if holding is None:
                holding = here
            else:
                found.update((owner, index) for owner in holding if owner not in here)
                holding = [owner for owner in holding if owner in here]
            if not holding:
                break
        found.update((owner, len(keys)) for owner in holding or ())
        return found

    def held(self, place: int, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return for each key whether a place holds it."""
        label = self._labels.get(place)
        if label is None:
            return [False] * len(keys)
        labels = self._sets.labels
        return [label in labels[number] for number in self._table.numbers(keys)]

    @property
    def sets(self) -> int:
        """Number of combinations of places, including those without a key until they are swept."""
        return len(self._sets)

    @property
    def needs_sweep(self) -> bool:
        """Whether :meth:`sweep` has work to do."""
        return self._sweep.is_due

    def sweep(self) -> None:
        """Sweep one slice: some milliseconds at a hundred million keys."""
        self._sweep.slice()


class Sweep:
    """Sweeps all sets, then all rows, one slice at a time. Repeats if labels were removed meanwhile."""

    def __init__(self, table: PythonTable | native.core.KeyNumbers, sets: HolderSets) -> None:
        self._table = table
        self._sets = sets
        self._started = False
        self._sets_at: int | None = None
        self._rows_left = 0
        self._moves: dict[int, int] = {}
        """Merged sets, and the sets to which their keys move. Keys are deleted if that is ``EMPTY_SET``."""
        self._targets = array("I")
        """By set number, where its keys move to: ``_moves`` as the table takes them."""
        self._sets_after = 0

    @property
    def is_due(self) -> bool:
        """Whether to sweep: labels were removed, or the number of sets has doubled since the last sweep."""
        if self._started or self._sets_at is not None or self._rows_left:
            return True
        return len(self._sets) > 2 * self._sets_after + 1024

    def start(self) -> None:
        """Request a sweep after a label was removed."""
        self._started = True

    def slice(self) -> None:
        """Sweep one slice."""
        if self._sets_at is not None:
            self._sweep_sets(self._sets_at)
        elif self._rows_left:
            self._sweep_row()
        elif self.is_due:
            self._started = False
            self._sets_at = 1

    def _sweep_sets(self, start: int) -> None:
        stop = min(start + SETS_PER_SLICE, len(self._sets.labels))
        self._moves.update(self._sets.sweep(range(start, stop), self._moves.values()))
        if stop < len(self._sets.labels):
            self._sets_at = stop
            return
        self._sets_at = None
        self._sets_after = len(self._sets)
        if self._moves:
            self._rows_left = self._table.rows
            # A label may have been removed meanwhile, and a target set may itself have been merged.
            self._moves = {number: self._end_of(number) for number in self._moves}
            self._targets = array("I", range(len(self._sets.labels)))
            for number, target in self._moves.items():
                self._targets[number] = target

    def _end_of(self, number: int) -> int:
        while number in self._moves:
            number = self._moves[number]
        return number

    def _sweep_row(self) -> None:
        self._sets.moved(self._table.sweep(self._rows_left - 1, self._targets))
        self._rows_left -= 1
        if not self._rows_left:
            self._sets.vacate(self._moves)
            self._moves, self._targets = {}, array("I")
            self._sets_after = len(self._sets)
