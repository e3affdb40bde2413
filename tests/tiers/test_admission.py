"""Which chunks lower tiers admit: plans of the router against a small model, and the memory of seen keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import ChunkColumns, EvictionPolicy, RemovalReason
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.policies.adaptive import AdaptivePolicy
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.catalog.policies.resume import ResumePolicy
from kvtier.catalog.tenants import Quota, Tenants
from kvtier.events import Evict, Store
from kvtier.memory.keys import ChunkKey, chunk_keys, root_key
from kvtier.tiers.admission import PARTS, Admission, Doorkeeper
from kvtier.tiers.planner import FIRST, TransferPlanner
from tests.rigs.clock import Clock

LENGTH = 1 << 20
DISK, POOL = 1, 2
KEYS = chunk_keys(root_key(bytes(32)), range(20_000), 1)
IN_ONE_PART = [ChunkKey(bytes(1) + key[1:]) for key in KEYS]
"""Keys that a doorkeeper remembers in the same of its parts."""


@dataclass
class FakeTier:
    """A tier with the settings that admission depends on."""

    admit: str = "first_use"
    write: str = "through"
    capacity: int | None = 64 * LENGTH
    available: bool = True
    is_durable: bool = True
    used_bytes: int = 0
    count: int = 0


class AdmissionSetup:
    """Memory, a disk that admits selectively and, if it is given, a pool below."""

    def __init__(self, admit: str, write: str = "through", pool: FakeTier | None = None) -> None:
        self.tiers = [FakeTier(), FakeTier(admit, write), *([pool] if pool else [])]
        self.clock = Clock()
        self.catalog = Catalog([LruPolicy.factory() for _ in self.tiers], clock=self.clock)
        self.planner = TransferPlanner(self.catalog, self.tiers, self.clock)

    def store(
        self, keys: Sequence[ChunkKey], parent: ChunkKey | None = None, **hints: float
    ) -> set[ChunkKey]:
        """Store chunks as an engine does. Return what is written to disk."""
        given_hints = ChunkHints(**hints) if hints else None  # type: ignore[arg-type]
        lengths = [LENGTH] * len(keys)
        self.catalog.add_chain(keys, FIRST, lengths, State.READY, parent, hints=given_hints)
        self.planner.admission.stored(keys)
        return self.to(DISK, self.planner.store(Store(keys=keys)))

    def use(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Look chunks up. Return what is written to disk."""
        rows = [row for key in keys if (row := self.catalog.row(key)) is not None]
        again = self.catalog.columns.keys_of(self.planner.admission.used(rows))
        return self.to(DISK, self.planner.store_later(Store(keys=again)))

    def evict(self, keys: Sequence[ChunkKey], target: int = DISK) -> set[ChunkKey]:
        """Evict chunks from memory. Return what is written to a tier; nothing arrives there."""
        demoted = self.to(target, self.planner.evict(Evict(keys=keys, tier=FIRST)))
        self.catalog.remove_all(keys, FIRST)
        return demoted

    @staticmethod
    def to(target: int | None, plan: Sequence[object]) -> set[ChunkKey]:
        return {key for transfer in plan if transfer.target == target for key in transfer.keys}  # type: ignore[attr-defined]


def test_every_chunk_is_admitted_on_first_use() -> None:
    setup = AdmissionSetup("first_use")
    assert setup.store(KEYS[:3]) == set(KEYS[:3])
    assert setup.use(KEYS[:3]) == set(), "their write was planned when they were stored"
    assert setup.evict(KEYS[:3]) == set(KEYS[:3])
    assert not setup.planner.admission.selective


@pytest.mark.parametrize("admit", ["second_use", "expected"])
def test_chunk_is_written_when_it_is_looked_up(admit: str) -> None:
    setup = AdmissionSetup(admit)
    assert setup.store(KEYS[:3]) == set()
    assert setup.use(KEYS[:2]) == set(KEYS[:2])
    assert setup.use(KEYS[:3]) == {KEYS[2]}, "the others were written already"


@pytest.mark.parametrize("admit", ["second_use", "expected"])
def test_chunk_is_written_when_it_is_stored_again(admit: str) -> None:
    setup = AdmissionSetup(admit)
    setup.store(KEYS[:3])
    assert setup.evict(KEYS[:3]) == set()
    assert setup.store(KEYS[:4]) == set(KEYS[:3])


def test_chunks_used_once_are_not_demoted() -> None:
    setup = AdmissionSetup("second_use", "on_evict")
    setup.store(KEYS[:4])
    assert setup.use(KEYS[:2]) == set(), "this tier is only written on eviction"
    [demoted, dropped] = setup.planner.evict(Evict(keys=KEYS[:4], tier=FIRST))
    assert (demoted.target, demoted.keys, demoted.admitted) == (DISK, KEYS[:2], True)
    assert (dropped.target, dropped.keys, dropped.admitted) == (None, KEYS[2:4], False)


def test_next_tier_takes_what_the_first_one_does_not_admit() -> None:
    setup = AdmissionSetup("second_use", "on_evict", FakeTier(write="on_evict"))
    setup.store(KEYS[:4])
    setup.use(KEYS[:1])
    plan = setup.planner.evict(Evict(keys=KEYS[:4], tier=FIRST))
    assert {transfer.target: transfer.keys for transfer in plan} == {DISK: KEYS[:1], POOL: KEYS[1:4]}


def test_write_through_pool_is_not_written_again_on_the_second_use() -> None:
    setup = AdmissionSetup("second_use", pool=FakeTier())
    setup.store(KEYS[:2])
    rows = [row for key in KEYS[:2] if (row := setup.catalog.row(key)) is not None]
    again = setup.catalog.columns.keys_of(setup.planner.admission.used(rows))
    assert [transfer.target for transfer in setup.planner.store_later(Store(keys=again))] == [DISK]


@pytest.mark.parametrize(
    ("hints", "later", "is_written"),
    [
        ({"priority": 1}, False, True),
        ({"priority": 0}, False, False),
        ({"priority": -1}, False, False),
        ({"resume": 5.0}, False, True),
        ({"resume": 5.0}, True, False),
        ({"retention": 5.0}, False, True),
        ({"retention": 5.0}, True, False),
        ({"recompute": 5.0}, False, False),
    ],
)
def test_hints_tell_what_is_expected(hints: dict[str, float], later: bool, is_written: bool) -> None:
    for admit in ("expected", "second_use"):
        setup = AdmissionSetup(admit)
        written = setup.store(KEYS[:2], **hints)
        if later:
            setup.clock.now += 6
            written = setup.evict(KEYS[:2])
        assert written == (set(KEYS[:2]) if is_written and admit == "expected" else set())


def test_pinned_chunks_are_expected_until_the_pin_ends() -> None:
    setup = AdmissionSetup("expected")
    setup.store(KEYS[:2])
    setup.catalog.pin(KEYS[:2], setup.clock.now + 5)
    plan = setup.planner.store_later(Store(keys=KEYS[:2]))
    assert setup.to(DISK, plan) == set(KEYS[:2])
    setup.clock.now += 6
    assert setup.planner.store_later(Store(keys=KEYS[:2])) == []


class ExpectsEven(LruPolicy):
    """Expects the use of every other row."""

    def expects(self, row: int) -> bool:
        return row % 2 == 0


def test_policy_of_the_first_tier_tells_what_is_expected() -> None:
    setup = AdmissionSetup("expected")
    setup.catalog.policies[FIRST] = ExpectsEven(LruPolicy.settings_type(type=""), 0, setup.catalog.columns)
    for at in range(4):
        written = setup.store(KEYS[at : at + 1])
        assert written == (set(KEYS[at : at + 1]) if at % 2 == 0 else set())


@pytest.mark.parametrize("policy", [ResumePolicy, AdaptivePolicy])
def test_prompts_are_expected_if_others_like_them_have_come_back(policy: type[EvictionPolicy]) -> None:
    for returning in (True, False):
        clock = Clock()
        catalog = Catalog([policy.factory(policy.settings_type(type=""), 4000 * LENGTH)], clock=clock)
        for at in range(300):
            clock.now += 10
            catalog.add_chain(KEYS[3 * at : 3 * at + 3], FIRST, [LENGTH] * 3, State.READY)
            if returning and at:
                catalog.touch(KEYS[3 * at - 3 : 3 * at])
        clock.now += 1
        catalog.add_chain(KEYS[3000:3003], FIRST, [LENGTH] * 3, State.READY)
        expected = [
            catalog.policies[FIRST].expects(row) for key in KEYS[3000:3003] if (row := catalog.row(key))
        ]
        assert expected == [returning] * 3
    assert not catalog.policies[FIRST].expects(10_000), "no chunk has this row"


def test_tenants_ask_their_own_policy() -> None:
    def make(fraction: float):  # type: ignore[no-untyped-def]
        def create(columns: ChunkColumns) -> LruPolicy:
            kind = ExpectsEven if fraction < 1 else LruPolicy
            return kind(LruPolicy.settings_type(type=""), 0, columns)

        return create

    policy = Tenants({"team": "team"}).policy(make, {"team": Quota(max=0.5)}, 64 * LENGTH)
    catalog = Catalog([policy])
    for key, tenant in zip(KEYS[:3], ("team", "other", "team"), strict=True):
        catalog.add(key, FIRST, LENGTH, State.READY, hints=ChunkHints(tenant))
    assert [catalog.policies[FIRST].expects(row) for row in range(4)] == [True, False, True, False]


def test_chunk_without_an_admitted_parent_is_not_written() -> None:
    setup = AdmissionSetup("expected")
    setup.store(KEYS[:1])
    assert setup.store(KEYS[1:3], KEYS[0], priority=5) == set()
    setup = AdmissionSetup("expected")
    setup.store(KEYS[:1])
    setup.catalog.add_copies(KEYS[:1], DISK)
    assert setup.store(KEYS[1:3], KEYS[0], priority=5) == set(KEYS[1:3])


def test_lookup_for_which_chunks_were_pushed_is_their_first_use() -> None:
    setup = AdmissionSetup("second_use")
    setup.catalog.add_chain(KEYS[:2], FIRST, [LENGTH] * 2, State.READY)
    setup.planner.admission.pushed(KEYS[:2])
    assert setup.use(KEYS[:2]) == set()
    assert setup.use(KEYS[:2]) == set(KEYS[:2])
    setup.evict(KEYS[:2])
    setup.catalog.add_chain(KEYS[:2], FIRST, [LENGTH] * 2, State.READY)
    setup.planner.admission.pushed(KEYS[:2])
    assert setup.use(KEYS[:2]) == set(KEYS[:2]), "they were used before they were pushed again"


Operations = st.lists(
    st.tuples(
        st.sampled_from(["serve", "serve", "look up", "evict", "clear"]),
        st.integers(0, 19),
        st.integers(1, 4),
    ),
    min_size=40,
    max_size=80,
)


@given(Operations, st.sampled_from(["through", "on_evict"]))
def test_second_uses_are_those_of_a_small_model(operations: list[tuple[str, int, int]], write: str) -> None:
    """Twenty prompts of four chunks; a row of the catalog serves many chunks after each other."""
    setup = AdmissionSetup("second_use", write)
    uses: dict[ChunkKey, int] = {}
    for kind, number, count in operations:
        if kind != "serve":  # Of a prompt that was served.
            served = sorted({KEYS.index(key) // 4 for key in uses}) or [0]
            prompt = served[number % len(served)]
        else:
            prompt = number
        chain = KEYS[4 * prompt : 4 * prompt + count]
        held = [key for key in chain if setup.catalog.state(key, FIRST) is State.READY]
        if kind in ("look up", "serve"):
            written = setup.use(held)
            for key in held:
                uses[key] += 1
            expected = {key for key in held if uses[key] == 2}
        if kind == "serve":
            missing = chain[len(held) :]
            written |= setup.store(missing, held[-1] if held else None) if missing else set()
            expected |= {key for key in missing if uses.get(key, 0) >= 1}
            for key in missing:
                uses[key] = uses.get(key, 0) + 1
        if kind in ("evict", "clear"):
            rest = KEYS[4 * prompt + count - 1 : 4 * prompt + 4]
            left = [key for key in reversed(rest) if setup.catalog.state(key, FIRST) is State.READY]
            expected = {key for key in left if uses[key] >= 2}
            if kind == "clear":
                setup.catalog.remove_all(left, FIRST, RemovalReason.CLEARED)
                continue
            assert setup.evict(left) == expected
            continue
        assert written == (expected if write == "through" else set())


def test_doorkeeper_remembers_keys_and_forgets_them() -> None:
    doorkeeper, remembered = Doorkeeper(), 4000 * PARTS
    first = IN_ONE_PART[:1000]
    assert sum(doorkeeper.seen(first, remembered)) < 25
    doorkeeper.seen(IN_ONE_PART[1000:4000], remembered)
    assert all(doorkeeper.seen(first, remembered))
    doorkeeper.seen(IN_ONE_PART[4000:14_000], remembered)
    kept = sum(doorkeeper.seen(first, remembered))
    assert kept < 50, f"{kept} of 1000 keys are remembered after 2.5 times as many others as asked for"


def test_doorkeeper_seldom_takes_a_new_key_for_a_known_one() -> None:
    doorkeeper = Doorkeeper()
    mistaken = sum(doorkeeper.seen(IN_ONE_PART, 4000 * PARTS))
    assert mistaken < len(IN_ONE_PART) / 40


def test_doorkeeper_is_bounded_by_what_it_shall_remember() -> None:
    doorkeeper = Doorkeeper()

    def counters() -> int:
        return sum(len(line) for sketch in doorkeeper._sketches for line in sketch._lines)

    smallest = counters()
    assert smallest == 512 << 10
    doorkeeper.seen(IN_ONE_PART, 100)
    assert counters() == smallest
    doorkeeper.seen(IN_ONE_PART, 4000 * PARTS)
    assert smallest < counters() <= smallest + 16 * 4000


def test_admission_takes_a_byte_for_each_row() -> None:
    setup = AdmissionSetup("second_use")
    for start in range(0, 2000, 100):
        setup.store(KEYS[start : start + 100])
        setup.evict(KEYS[start : start + 100][::-1])
    assert len(setup.planner.admission._uses) == 100


def test_nothing_is_tracked_if_all_tiers_admit_every_chunk() -> None:
    catalog = Catalog([LruPolicy.factory()] * 2)
    row = catalog.add(KEYS[0], FIRST, LENGTH, State.READY)
    every, never = FakeTier(), FakeTier("expected", "never")
    for tiers in ([every, every], [FakeTier("second_use"), every], [every, never]):
        admission = Admission(catalog, tiers, float)
        admission.stored(KEYS[:1])
        assert admission.used([row]) == []
        assert not admission.selective
