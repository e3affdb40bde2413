"""The controller's index: which places hold which chunks. Designed for ten million keys.

A *place* is one tier of one instance, identified by a small integer. Chunks of one prompt are mostly held by
the same places. So a key maps to the number of an interned *set* of places, and adding or removing a place is
a lookup of the transition from that set. Keys are sharded into 256 dictionaries by their first byte: resizing
one does not stall the event loop, and the garbage collector skips them all.

Keys are added to a place under a *label*, which is never reused. Dropping a place removes its label in
constant time; sets and keys that still refer to the label are swept in slices, between other work.

Synchronous, not thread-safe. Takes about 120 bytes for each key, and none for its second place:
``benchmarks/controller.py`` measures it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from kvtier.memory.keys import ChunkKey

MAX_KEYS = 25_000_000
"""Indexed at once, which takes 3 GB. Further keys are dropped, and lookups do not find them."""
MAX_SETS = 1 << 20
"""Combinations of places. A chunk that would need a further one keeps its previous holders."""
MAX_TRANSITIONS = 1 << 17
"""Cached transitions between sets."""
SETS_PER_SLICE = 16_384
ROWS = 256

EMPTY_SET = 0
"""The number of the empty set, to which no key refers."""

OwnerT = TypeVar("OwnerT", bound=Hashable)


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
        self.sets_with: dict[int, dict[int, int]] = {}
        """The cached results of :meth:`with_label`, by label and set number."""
        self.sets_without: dict[int, dict[int, int]] = {}
        """The same of :meth:`without_label`."""
        self._transitions = 0

    def __len__(self) -> int:
        return len(self.labels) - len(self._vacant)

    def add_label(self, label: int, place: int) -> None:
        """Assign a new label to a place."""
        self.live[label] = place
        self.sets_with[label] = {}
        self.sets_without[label] = {}

    def remove_label(self, label: int) -> None:
        """Remove a label. Sets may contain it until they are swept."""
        del self.live[label], self.sets_with[label], self.sets_without[label]

    def with_label(self, number: int, label: int) -> int:
        """Return the set with this label added, or the same set if ``MAX_SETS`` is reached."""
        labels = self.labels[number]
        number_with = number
        if label not in labels:
            others = [other for other in labels if other in self.live]
            labels_with = tuple(sorted([*others, label]))
            if labels_with in self._numbers or not others or len(self) < MAX_SETS:
                number_with = self._number(labels_with)
        self._cache_transition(self.sets_with[label], number, number_with)
        return number_with

    def without_label(self, number: int, label: int) -> int:
        """Return the set with this label removed."""
        labels = self.labels[number]
        number_without = number
        if label in labels:
            number_without = self._number(
                tuple(other for other in labels if other != label and other in self.live)
            )
        self._cache_transition(self.sets_without[label], number, number_without)
        return number_without

    def _cache_transition(self, transitions: dict[int, int], before: int, after: int) -> None:
        if self._transitions >= MAX_TRANSITIONS:
            self._clear_transitions()
        transitions[before] = after
        self._transitions += 1

    def _clear_transitions(self) -> None:
        """Clear in place: callers that iterate over keys hold references to these dictionaries."""
        for transitions in (*self.sets_with.values(), *self.sets_without.values()):
            transitions.clear()
        self._transitions = 0

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
        self._clear_transitions()
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
        self._clear_transitions()


class Holders:
    """The index from keys to the places that hold them. Not thread-safe; all methods are synchronous."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self.dropped_keys = 0
        """How often a key was dropped because the index was full."""
        self._max_row = -(-max_keys // ROWS)
        self._rows: list[dict[ChunkKey, int]] = [{} for _ in range(ROWS)]
        self._sets = HolderSets()
        self._labels: dict[int, int] = {}
        self._counts: Counter[int] = Counter()
        self._new_labels = itertools.count(1)
        self._sweep = Sweep(self._rows, self._sets)

    def __len__(self) -> int:
        """Return the number of indexed keys, including those without a holder until they are swept."""
        return sum(map(len, self._rows))

    def add(self, place: int, keys: Sequence[ChunkKey]) -> None:
        """Add keys to a place. Takes about 1 µs per key."""
        label = self._labels.get(place)
        if label is None:
            label = self._labels[place] = next(self._new_labels)
            self._sets.add_label(label, place)
        rows, sets = self._rows, self._sets
        transitions, counts, max_row = sets.sets_with[label], sets.keys, self._max_row
        alone = sets.with_label(EMPTY_SET, label)
        added = new = 0
        for key in keys:
            row = rows[key[0]]
            before = row.get(key)
            if before is None:
                if len(row) < max_row:
                    row[key] = alone
                    new += 1
                else:
                    self.dropped_keys += 1
                continue
            after = transitions.get(before)
            if after is None:
                after = sets.with_label(before, label)
            if after != before:
                row[key] = after
                counts[before] -= 1
                counts[after] += 1
                added += 1
        counts[alone] += new
        added += new
        self._counts[place] += added

    def remove(self, place: int, keys: Sequence[ChunkKey]) -> None:
        """Remove keys from a place. Keys that it does not hold are ignored."""
        label = self._labels.get(place)
        if label is None:
            return
        rows, sets = self._rows, self._sets
        transitions, counts = sets.sets_without[label], sets.keys
        removed = 0
        for key in keys:
            row = rows[key[0]]
            before = row.get(key, EMPTY_SET)
            after = transitions.get(before)
            if after is None:
                after = sets.without_label(before, label)
            if after == before:
                continue
            counts[before] -= 1
            removed += 1
            if after == EMPTY_SET:
                del row[key]
            else:
                row[key] = after
                counts[after] += 1
        self._counts[place] -= removed

    def drop(self, places: Collection[int]) -> None:
        """Remove all keys from these places. Takes constant time, independent of the number of keys."""
        for place in places:
            label = self._labels.pop(place, None)
            if label is not None:
                self._sets.remove_label(label)
                self._sweep.start()
            del self._counts[place]

    def count(self, place: int) -> int:
        """Return the number of keys that a place holds."""
        return self._counts[place]

    def prefixes(self, keys: Sequence[ChunkKey]) -> dict[int, int]:
        """Return how many leading keys each place holds. Places without the first key are omitted."""
        live, labels = self._sets.live, self._sets.labels
        return self._leading(keys, lambda number: [live[label] for label in labels[number] if label in live])

    def prefixes_of(self, owners: Mapping[int, OwnerT], keys: Sequence[ChunkKey]) -> dict[OwnerT, int]:
        """Return how many leading keys each owner holds in any of its places. Other places are ignored."""
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
        last = EMPTY_SET
        for index, key in enumerate(keys):
            number = rows[key[0]].get(key, EMPTY_SET)
            # Chunks of one prompt mostly have the same holders, so most of them end here.
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
        """Return for each key whether a place holds it."""
        label = self._labels.get(place)
        if label is None:
            return [False] * len(keys)
        rows, labels = self._rows, self._sets.labels
        return [label in labels[rows[key[0]].get(key, EMPTY_SET)] for key in keys]

    @property
    def sets(self) -> int:
        """Number of combinations of places, including those without a key until they are swept."""
        return len(self._sets)

    @property
    def needs_sweep(self) -> bool:
        """Whether :meth:`sweep` has work to do."""
        return self._sweep.is_due

    def sweep(self) -> None:
        """Sweep one slice: at ten million keys 15 ms, of 4 s in total."""
        self._sweep.slice()


class Sweep:
    """Sweeps all sets, then all rows, one slice at a time. Repeats if labels were removed meanwhile."""

    def __init__(self, rows: list[dict[ChunkKey, int]], sets: HolderSets) -> None:
        self._rows = rows
        self._sets = sets
        self._started = False
        self._sets_at: int | None = None
        self._rows_left = 0
        self._row = 0
        self._moves: dict[int, int] = {}
        """Merged sets, and the sets to which their keys move. Keys are deleted if that is ``EMPTY_SET``."""
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
            self._rows_left = ROWS
            # A label may have been removed meanwhile, and a target set may itself have been merged.
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
            # Rebuild the row: a dictionary does not shrink when keys are deleted.
            self._rows[self._row] = {
                key: to for key, number in row.items() if (to := moves.get(number, number)) != EMPTY_SET
            }
        self._row = (self._row + 1) % ROWS
        self._rows_left -= 1
        if not self._rows_left:
            self._sets.vacate(moves)
            self._moves = {}
            self._sets_after = len(self._sets)
