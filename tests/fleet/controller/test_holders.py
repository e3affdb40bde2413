"""The index of chunk holders, compared with a dictionary of sets, before and after sweeps."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvtier import native
from kvtier.errors import ProtocolError
from kvtier.fleet.controller import holders as holders_module
from kvtier.fleet.controller.holders import ROWS, SETS_PER_SLICE, Holders
from kvtier.memory.keys import ChunkKey, join_keys
from tests.rigs.running_controller import keys_of

PLACES = st.integers(0, 3)
KEYS = keys_of("all", 12)
KEY_LISTS = st.lists(st.sampled_from(KEYS), max_size=12)


def leading(keys: list[ChunkKey], held: set[ChunkKey]) -> int:
    return len(list(itertools.takewhile(held.__contains__, keys)))


class HoldersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slices = patch.object(holders_module, "SETS_PER_SLICE", 2)
        self.slices.start()
        self.holders = Holders()
        self.model: dict[int, set[ChunkKey]] = defaultdict(set)

    def teardown(self) -> None:
        self.slices.stop()

    @rule(place=PLACES, keys=KEY_LISTS, joined=st.booleans())
    def add(self, place: int, keys: list[ChunkKey], joined: bool) -> None:
        self.holders.add(place, join_keys(keys) if joined else keys)
        self.model[place].update(keys)

    @rule(place=PLACES, keys=KEY_LISTS, joined=st.booleans())
    def remove(self, place: int, keys: list[ChunkKey], joined: bool) -> None:
        self.holders.remove(place, join_keys(keys) if joined else keys)
        self.model[place].difference_update(keys)

    @rule(places=st.sets(PLACES))
    def drop(self, places: set[int]) -> None:
        self.holders.drop(places)
        for place in places:
            self.model[place].clear()

    @rule(slices=st.sampled_from([1, 2, "half", "all"]))
    def sweep(self, slices: int | str) -> None:
        rows = self.holders.rows
        for _ in range({"half": rows // 2, "all": 2 * rows + 4}.get(slices, slices)):
            self.holders.sweep()

    @rule(keys=KEY_LISTS)
    def prefixes(self, keys: list[ChunkKey]) -> None:
        expected = {place: leading(keys, held) for place, held in self.model.items()}
        assert self.holders.prefixes(keys) == {place: count for place, count in expected.items() if count}

    @rule(keys=KEY_LISTS, owners=st.dictionaries(PLACES, st.sampled_from("ab")))
    def prefixes_of_owners(self, keys: list[ChunkKey], owners: dict[int, str]) -> None:
        together: dict[str, set[ChunkKey]] = defaultdict(set)
        for place, owner in owners.items():
            together[owner] |= self.model[place]
        expected = {owner: leading(keys, held) for owner, held in together.items()}
        assert self.holders.prefixes_of(owners, keys) == {
            owner: count for owner, count in expected.items() if count
        }

    @rule(place=PLACES, keys=KEY_LISTS)
    def held(self, place: int, keys: list[ChunkKey]) -> None:
        assert self.holders.held(place, keys) == [key in self.model[place] for key in keys]

    @invariant()
    def counts(self) -> None:
        for place in range(4):
            assert self.holders.count(place) == len(self.model[place])

    @invariant()
    def nothing_is_left_after_a_sweep(self) -> None:
        if not self.holders.needs_sweep:
            assert len(self.holders) == len(set().union(*self.model.values()))


SETTINGS = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_answers_are_those_of_sets_of_keys(implementation: str) -> None:
    run_state_machine_as_test(HoldersMachine, settings=SETTINGS)


def test_sides_answer_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.available():
        pytest.skip(native.summary())
    with_core = Holders()
    monkeypatch.setattr(native, "available", lambda: False)
    without = Holders()
    assert with_core.rows != without.rows, "they are two implementations"
    rng, keys = random.Random(1), keys_of("many", 3000)
    for turn in range(300):
        place, start = rng.randrange(6), rng.randrange(len(keys))
        some = keys[start : start + rng.randrange(400)]
        action = rng.choice(["add", "add", "add", "remove", "drop", "sweep"])
        for side in (with_core, without):
            if action == "drop":
                side.drop([place])
            elif action == "sweep":
                sweep_all(side)
            else:
                getattr(side, action)(place, join_keys(some) if turn % 2 else some)
        answers = [
            (side.prefixes(some), side.held(place, some), [side.count(each) for each in range(6)])
            for side in (with_core, without)
        ]
        assert answers[0] == answers[1]
    for side in (with_core, without):
        sweep_all(side)
    assert len(with_core) == len(without)


@pytest.mark.parametrize("joined", [bytes(31), bytes(33), bytes(64 + 1)])
def test_cut_off_keys_are_refused(implementation: str, joined: bytes) -> None:
    holders = Holders()
    holders.add(0, bytes(32))
    for change in (holders.add, holders.remove):
        with pytest.raises((ValueError, ProtocolError)):
            change(0, joined)
    assert len(holders) == holders.count(0) == 1


def test_joined_keys_are_single_ones(implementation: str) -> None:
    holders, keys = Holders(), keys_of("joined", 100)
    holders.add(0, join_keys(keys))
    assert holders.prefixes(keys) == {0: 100}
    holders.remove(0, join_keys(keys[50:]))
    assert holders.prefixes(keys) == {0: 50}


def sweep_all(holders: Holders) -> int:
    """Sweep until nothing is left to do, and return the number of slices."""
    slices = 0
    while holders.needs_sweep:
        holders.sweep()
        slices += 1
    return slices


def in_all_combinations(places: int) -> tuple[Holders, list[ChunkKey]]:
    """Return an index with one key in each combination of places."""
    holders, keys = Holders(), keys_of("each in other places", 1 << places)
    for place in range(places):
        holders.add(place, [key for number, key in enumerate(keys) if number >> place & 1])
    return holders, keys


def test_dropped_place_is_empty(implementation: str) -> None:
    holders, keys = Holders(), keys_of("prompt", 300)
    holders.add(0, keys)
    holders.add(1, keys[:100])
    holders.drop([0])
    assert holders.prefixes(keys) == {1: 100}
    holders.add(0, keys[:7])
    assert holders.prefixes(keys) == {0: 7, 1: 100}
    assert len(holders) == 300, "dropped keys are not swept yet"
    assert holders.rows < sweep_all(holders) <= holders.rows + 3
    assert len(holders) == 100
    assert holders.prefixes(keys) == {0: 7, 1: 100}


def test_places_dropped_during_a_sweep_are_swept(implementation: str) -> None:
    holders, keys = Holders(), keys_of("prompt", 3000)
    for place in range(3):
        holders.add(place, keys[1000 * place : 1000 * (place + 1)])
    holders.drop([0])
    for _ in range(holders.rows // 2):
        holders.sweep()
    holders.drop([1])
    sweep_all(holders)
    assert len(holders) == 1000
    assert holders.prefixes(keys[2000:]) == {2: 1000}


def test_number_of_keys_is_limited(implementation: str) -> None:
    holders = Holders(max_keys=10 * ROWS)
    keys = keys_of("too many", 20 * ROWS)
    holders.add(0, keys)
    assert len(holders) == holders.count(0) == len(keys) - holders.dropped_keys
    assert 9 * ROWS < len(holders) <= 10 * ROWS
    holders.add(1, keys)
    assert holders.held(0, keys) == holders.held(1, keys), "another holder takes no room"
    holders.remove(0, keys)
    holders.remove(1, keys)
    assert len(holders) == 0
    holders.add(0, keys[:ROWS])
    assert all(holders.held(0, keys[:ROWS])), "there is room again"


def test_number_of_sets_is_limited(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders_module, "MAX_SETS", 20)
    rng = random.Random(0)
    holders, keys = Holders(), keys_of("mixed", 200)
    added: dict[ChunkKey, set[int]] = defaultdict(set)
    for place, key in itertools.product(range(10), keys):
        if rng.random() < 0.5:
            holders.add(place, [key])
            added[key].add(place)
    for key in keys:
        known = set(holders.prefixes([key]))
        assert known <= added[key]
        assert bool(known) == bool(added[key]), "the first holder is always known"
    for place in range(10):
        assert holders.count(place) == sum(holders.held(place, keys))
        holders.remove(place, keys)
    assert len(holders) == 0


def test_unused_sets_are_removed(implementation: str) -> None:
    holders, keys = in_all_combinations(12)
    assert holders.needs_sweep
    for bit in range(1, 12):
        holders.remove(bit, keys)
    sweep_all(holders)
    assert holders.sets == 2, "the empty set, and the set of the only place left"
    assert holders.prefixes([keys[1]]) == {0: 1}
    assert not holders.needs_sweep


def test_many_sets_are_swept_in_slices(implementation: str) -> None:
    holders, keys = in_all_combinations(15)
    holders.drop([14])
    assert sweep_all(holders) > holders.rows + 2
    assert holders.sets == SETS_PER_SLICE
    assert holders.prefixes([keys[-1]]) == dict.fromkeys(range(14), 1)


def test_set_that_others_were_merged_into_is_merged_itself(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key of the first one would keep a set that is freed."""
    monkeypatch.setattr(holders_module, "SETS_PER_SLICE", 2)
    holders, (first, second) = Holders(), keys_of("prompt", 2)
    holders.add(0, [first])
    holders.add(1, [first])
    holders.add(1, [second])
    holders.drop([0])
    holders.sweep()
    holders.sweep()
    holders.drop([1])
    sweep_all(holders)
    assert len(holders) == 0
    assert holders.sets == 1


def test_places_dropped_between_slices_are_swept(implementation: str) -> None:
    holders, keys = in_all_combinations(15)
    holders.drop([14])
    for place in range(13, 2, -1):
        holders.sweep()
        holders.drop([place])
    sweep_all(holders)
    assert holders.sets == 8
    assert len(holders) == len(keys) * 7 // 8
    for place in range(3):
        holders.remove(place, keys)
    assert len(holders) == 0
