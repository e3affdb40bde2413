"""Which places hold which chunks: the controller's index of ten million keys.

A *place* is one tier of one instance, a small number. Chunks of one prompt are mostly held by the same
places, so a key maps to the number of an interned *set* of places, and what a key becomes when a place is
added or taken away is looked up by that number. Keys lie in 256 dictionaries by their first byte: none of
them is so large that its growing stops the event loop, and the garbage collector passes over all of them.

A place is *filled* under a label that is used once. Dropping a place ends its label, whatever it held, at
once; what the label leaves behind in sets and keys is swept away in slices, between other work.

Synchronous, not thread-safe. ``benchmarks/controller.py`` has the figures.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from kvtier.keys import ChunkKey

MOST_KEYS = 25_000_000
"""In mind at once: 3 GB of them. What comes beyond is not taken in, and so is not found."""
MOST_SETS = 1 << 20
"""Combinations of places; a chunk that would need another one is known by its first holders alone."""
MOST_STEPS = 1 << 17
"""Remembered answers to what a set becomes."""
SETS_A_SLICE = 16_384
ROWS = 256

NOBODY = 0
"""The number of the empty set, which has no keys."""

OwnerT = TypeVar("OwnerT", bound=Hashable)


class HolderSets:
    """Interned sets of labels, each with the number of keys that refer to it."""

    def __init__(self) -> None:
        self.labels: list[tuple[int, ...]] = [()]
        """By set. A label that has ended may still be in it, until it is swept."""
        self.keys: list[int] = [0]
        """By set: how many keys refer to it. What is said of ``NOBODY`` means nothing."""
        self.live: dict[int, int] = {}
        """The place of each label that has not ended."""
        self._numbers: dict[tuple[int, ...], int] = {(): NOBODY}
        self._vacant: list[int] = []
        self._with: dict[int, dict[int, int]] = {}
        self._without: dict[int, dict[int, int]] = {}
        self._steps = 0

    def __len__(self) -> int:
        return len(self.labels) - len(self._vacant)

    def begin(self, label: int, place: int) -> None:
        """A label stands for a place from now on."""
        self.live[label] = place
        self._with[label] = {}
        self._without[label] = {}

    def end(self, label: int) -> None:
        """It does no longer."""
        del self.live[label], self._with[label], self._without[label]

    def steps_with(self, label: int) -> dict[int, int]:
        """What sets become with a label, as far as it is known: for the rest ask :meth:`join`."""
        return self._with[label]

    def steps_without(self, label: int) -> dict[int, int]:
        """What sets become without a label, as far as it is known: for the rest ask :meth:`leave`."""
        return self._without[label]

    def join(self, number: int, label: int) -> int:
        """The set with this label, too. The set itself where there are too many sets for another one."""
        labels = self.labels[number]
        if label not in labels:
            others = [other for other in labels if other in self.live]
            joined = tuple(sorted([*others, label]))
            if joined in self._numbers or not others or len(self) < MOST_SETS:
                joined_number = self._number(joined)
            else:
                joined_number = number
        else:
            joined_number = number
        self._remember(self._with[label], number, joined_number)
        return joined_number

    def leave(self, number: int, label: int) -> int:
        """The set without this label."""
        labels = self.labels[number]
        left_number = number
        if label in labels:
            left_number = self._number(
                tuple(other for other in labels if other != label and other in self.live)
            )
        self._remember(self._without[label], number, left_number)
        return left_number

    def _remember(self, steps: dict[int, int], before: int, after: int) -> None:
        if self._steps >= MOST_STEPS:
            self._forget_steps()
        steps[before] = after
        self._steps += 1

    def _forget_steps(self) -> None:
        """In place: whoever is going through keys holds on to these dictionaries."""
        for steps in (*self._with.values(), *self._without.values()):
            steps.clear()
        self._steps = 0

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
        """Take ended labels out of these sets, and forget those that neither a key nor the caller needs.

        Where two sets are equal then, the keys of one can be moved to the other: by the one the other, which
        is ``NOBODY`` where none is left.
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
            left = tuple(label for label in labels if label in self.live)
            if len(left) < len(labels):
                same = self._rename(number, left)
                if same != number:
                    moves[number] = same
                    targets.add(same)
        # They may lead to what is vacant, or has moved.
        self._forget_steps()
        return moves

    def _rename(self, number: int, labels: tuple[int, ...]) -> int:
        """Give a set other labels; the set by which these are known, itself or another."""
        before = self.labels[number]
        if self._numbers.get(before) == number:
            del self._numbers[before]
        self.labels[number] = labels
        return self._numbers.setdefault(labels, number)

    def vacate(self, numbers: Collection[int]) -> None:
        """All keys of these have been moved."""
        for number in numbers:
            assert not self.keys[number]
            self.labels[number] = ()
            self._vacant.append(number)
        self._forget_steps()


class Holders:
    """Keys to places, and back to what :meth:`prefixes` and the others are asked."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self.overlooked = 0
        """Times that a key found no room."""
        self._most_in_a_row = -(-most_keys // ROWS)
        self._rows: list[dict[ChunkKey, int]] = [{} for _ in range(ROWS)]
        self._sets = HolderSets()
        self._labels: dict[int, int] = {}
        self._counts: Counter[int] = Counter()
        self._new_labels = itertools.count(1)
        self._sweep = Sweep(self._rows, self._sets)

    def __len__(self) -> int:
        """Keys in mind, those included that belong to nobody and have yet to be swept."""
        return sum(map(len, self._rows))

    def add(self, place: int, keys: Sequence[ChunkKey]) -> None:
        """A place holds these, too. About 1 µs a key."""
        label = self._labels.get(place)
        if label is None:
            label = self._labels[place] = next(self._new_labels)
            self._sets.begin(label, place)
        rows, sets = self._rows, self._sets
        steps, counts, most = sets.steps_with(label), sets.keys, self._most_in_a_row
        alone = sets.join(NOBODY, label)
        added = new = 0
        for key in keys:
            row = rows[key[0]]
            before = row.get(key)
            if before is None:
                if len(row) < most:
                    row[key] = alone
                    new += 1
                else:
                    self.overlooked += 1
                continue
            after = steps.get(before)
            if after is None:
                after = sets.join(before, label)
            if after != before:
                row[key] = after
                counts[before] -= 1
                counts[after] += 1
                added += 1
        counts[alone] += new
        added += new
        self._counts[place] += added

    def remove(self, place: int, keys: Sequence[ChunkKey]) -> None:
        """A place does not hold these any more. Those that it did not hold are passed over."""
        label = self._labels.get(place)
        if label is None:
            return
        rows, sets = self._rows, self._sets
        steps, counts = sets.steps_without(label), sets.keys
        removed = 0
        for key in keys:
            row = rows[key[0]]
            before = row.get(key, NOBODY)
            after = steps.get(before)
            if after is None:
                after = sets.leave(before, label)
            if after == before:
                continue
            counts[before] -= 1
            removed += 1
            if after == NOBODY:
                del row[key]
            else:
                row[key] = after
                counts[after] += 1
        self._counts[place] -= removed

    def drop(self, places: Collection[int]) -> None:
        """These places hold nothing. Takes no longer for ten million keys than for one."""
        for place in places:
            label = self._labels.pop(place, None)
            if label is not None:
                self._sets.end(label)
                self._sweep.start()
            del self._counts[place]

    def count(self, place: int) -> int:
        """How many keys a place holds."""
        return self._counts[place]

    def prefixes(self, keys: Sequence[ChunkKey]) -> dict[int, int]:
        """How many leading keys each place holds that holds the first."""
        live, labels = self._sets.live, self._sets.labels
        return self._leading(keys, lambda number: [live[label] for label in labels[number] if label in live])

    def prefixes_of(self, owners: Mapping[int, OwnerT], keys: Sequence[ChunkKey]) -> dict[OwnerT, int]:
        """The same for the owners of places, all places of an owner together. Others do not count."""
        live, labels = self._sets.live, self._sets.labels

        def owners_in(number: int) -> Collection[OwnerT]:
            places = [live[label] for label in labels[number] if label in live]
            return {owners[place] for place in places if place in owners}

        return self._leading(keys, owners_in)

    def _leading(
        self, keys: Sequence[ChunkKey], owners_in: Callable[[int], Collection[OwnerT]]
    ) -> dict[OwnerT, int]:
        rows = self._rows
        found: dict[OwnerT, int] = {}
        holding: Collection[OwnerT] | None = None
        last = NOBODY
        for index, key in enumerate(keys):
            number = rows[key[0]].get(key, NOBODY)
            if number == last and index:
                continue
            last = number
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
        """Of each key whether a place holds it."""
        label = self._labels.get(place)
        if label is None:
            return [False] * len(keys)
        rows, labels = self._rows, self._sets.labels
        return [label in labels[rows[key[0]].get(key, NOBODY)] for key in keys]

    @property
    def untidy(self) -> bool:
        """Whether there is something to :meth:`sweep`."""
        return self._sweep.due

    def sweep(self) -> None:
        """A slice of what dropping has left to be done: 15 ms at ten million keys, 4 s in all."""
        self._sweep.slice()


class Sweep:
    """Goes through the sets, then through the rows, a slice at a time, and then once more where it must."""

    def __init__(self, rows: list[dict[ChunkKey, int]], sets: HolderSets) -> None:
        self._rows = rows
        self._sets = sets
        self._started = False
        self._sets_at: int | None = None
        self._rows_left = 0
        self._row = 0
        self._moves: dict[int, int] = {}
        """Sets whose keys go to others, or go."""
        self._sets_after = 0

    @property
    def due(self) -> bool:
        """Whether a slice would change anything: labels have ended, or far more sets than there were."""
        if self._started or self._sets_at is not None or self._rows_left:
            return True
        return len(self._sets) > 2 * self._sets_after + 1024

    def start(self) -> None:
        """A label has ended."""
        self._started = True

    def slice(self) -> None:
        """Do a part of it."""
        if self._sets_at is not None:
            self._sweep_sets(self._sets_at)
        elif self._rows_left:
            self._sweep_row()
        elif self.due:
            self._started = False
            self._sets_at = 1

    def _sweep_sets(self, start: int) -> None:
        stop = min(start + SETS_A_SLICE, len(self._sets.labels))
        self._moves.update(self._sets.sweep(range(start, stop), self._moves.values()))
        if stop < len(self._sets.labels):
            self._sets_at = stop
            return
        self._sets_at = None
        self._sets_after = len(self._sets)
        if self._moves:
            self._rows_left = ROWS
            # A label may have ended meanwhile, and what keys should move to may itself have moved.
            self._moves = {number: self._end_of(number) for number in self._moves}

    def _end_of(self, number: int) -> int:
        while number in self._moves:
            number = self._moves[number]
        return number

    def _sweep_row(self) -> None:
        moves, row = self._moves, self._rows[self._row]
        moved = {number: count for number, count in Counter(row.values()).items() if number in moves}
        if moved:
            for number, count in moved.items():
                self._sets.keys[number] -= count
                self._sets.keys[moves[number]] += count
            # A new one: a dictionary gives nothing back for what is deleted.
            self._rows[self._row] = {
                key: to for key, number in row.items() if (to := moves.get(number, number)) != NOBODY
            }
        self._row = (self._row + 1) % ROWS
        self._rows_left -= 1
        if not self._rows_left:
            self._sets.vacate(moves)
            self._moves = {}
            self._sets_after = len(self._sets)
