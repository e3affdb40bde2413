"""The catalog agrees with a model of plain dicts; and, one by one, what the model does not have."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from blake3 import blake3
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.catalog.catalog import (
    ALL_TIERS,
    MAX_REPORT_SECONDS,
    REPORT_SECONDS,
    REPORTS_PER_STEP,
    Catalog,
    State,
)
from kvtier.catalog.eviction import ChunkColumns, PolicySettings, RemovalReason
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.catalog.table import MAX_TIERS
from kvtier.memory.keys import ChunkKey, chunk_keys, root_key

pytestmark = pytest.mark.usefixtures("either_core")

ABSENT, PENDING, READY = State.ABSENT, State.PENDING, State.READY
RAM, SSD, POOL = range(3)
LENGTH = 8192
PROMPT = chunk_keys(root_key(bytes(32)), range(8), 1)
A, B, C, D = PROMPT[:4]


@pytest.fixture
def catalog() -> Catalog:
    return Catalog([LruPolicy.factory(), LruPolicy.factory(), LruPolicy.factory()])


def store(catalog: Catalog, keys: list[ChunkKey], tier: int, state: State = READY) -> None:
    """Add consecutive chunks of the prompt."""
    for key in keys:
        at = PROMPT.index(key)
        catalog.add(key, tier, LENGTH, state, PROMPT[at - 1] if at else None)


# States.


def test_errors_name_the_chunk(catalog: Catalog) -> None:
    catalog.add(A, SSD, LENGTH, READY)
    name = f"chunk {A.hex()[:16]}"
    with pytest.raises(ValueError, match=f"{name} is already in tier {SSD}"):
        catalog.add(A, SSD, LENGTH, READY)
    with pytest.raises(KeyError, match=f"{name} is not pending in tier {SSD}"):
        catalog.set_ready(A, SSD)
    with pytest.raises(KeyError, match=f"{name} is not in tier {RAM}"):
        catalog.remove(A, RAM)
    catalog.remove(A, SSD)
    with pytest.raises(KeyError, match=f"{name} is in no tier"):
        catalog.length(A)


def test_reused_row_has_no_old_state(catalog: Catalog) -> None:
    catalog.add(A, RAM, LENGTH, READY, namespace=b"one")
    catalog.add(A, POOL, LENGTH, PENDING)
    catalog.pin([A], None)
    catalog.remove(A, RAM)
    catalog.remove(A, POOL)
    catalog.add(B, SSD, 4096, PENDING, namespace=b"two")
    assert [catalog.state(B, tier) for tier in (RAM, SSD, POOL)] == [ABSENT, PENDING, ABSENT]
    assert (catalog.length(B), catalog.pins.holds(B, 0), len(catalog)) == (4096, False, 1)
    assert (catalog.keys(SSD, b"one"), catalog.keys(SSD, b"two")) == ([], [B])
    catalog.add(A, RAM, LENGTH, READY)
    assert not catalog.pins.holds(A, 0)


def test_rows_are_iterated_in_slices(catalog: Catalog) -> None:
    store(catalog, PROMPT[:5], RAM)
    store(catalog, PROMPT[2:6], SSD)
    catalog.add(PROMPT[6], RAM, LENGTH, PENDING, namespace=b"one")
    catalog.remove(PROMPT[0], RAM)
    slices = list(catalog.slices(3))
    assert slices == [range(3), range(3, 6), range(6, 7)]
    for tier, held in ((RAM, PROMPT[1:5]), (SSD, PROMPT[2:6]), (POOL, [])):
        assert b"".join(catalog.ready_keys(tier, rows) for rows in slices) == b"".join(held)
    assert [len(catalog.keys(RAM, rows=rows)) for rows in slices] == [2, 2, 1]
    assert [len(catalog.keys(RAM, b"one", rows=rows)) for rows in slices] == [0, 0, 1]


@pytest.mark.parametrize("tiers", [0, MAX_TIERS + 1])
def test_number_of_tiers_is_limited(tiers: int) -> None:
    with pytest.raises(ValueError, match="must be 1 to 8"):
        Catalog([LruPolicy.factory() for _ in range(tiers)])


def test_eight_tiers_are_separate() -> None:
    catalog = Catalog([LruPolicy.factory() for _ in range(MAX_TIERS)])
    for tier in reversed(range(MAX_TIERS)):
        catalog.add(A, tier, LENGTH, READY)
        assert catalog.fastest(A) == tier
    assert catalog.tiers(A) == list(range(MAX_TIERS))


# Prefixes.


@pytest.mark.parametrize("seed", range(30))
def test_rows_of_a_prefix_are_those_of_its_chunks_wherever_they_are(seed: int) -> None:
    """Chunks are stored in any order and in runs, removed, and stored again in other rows."""
    chance = random.Random(seed)
    catalog = Catalog([LruPolicy.factory() for _ in range(2)])
    prompts = [chunk_keys(root_key(bytes(32), str(number)), range(40), 1) for number in range(3)]
    for _ in range(60):
        prompt, tier = chance.choice(prompts), chance.randrange(2)
        start = chance.randrange(len(prompt))
        run = prompt[start : start + chance.choice([1, 1, 2, 5, 20, 40])]
        if chance.random() < 0.6:
            absent = [key for key in run if catalog.state(key, tier) is ABSENT]
            state = chance.choice([READY, READY, READY, PENDING])
            catalog.add_chain(absent, tier, [LENGTH] * len(absent), state)
        else:
            catalog.remove_all([key for key in run if catalog.state(key, tier) is not ABSENT], tier)
        for keys in (prompt, run, chance.sample(prompt, 20), prompt[:start] + prompts[0]):
            for among in (1, 2, ALL_TIERS):
                rows, tiers = catalog.prefix_rows(keys, among)
                assert list(tiers) == catalog.prefix(keys, among)
                assert rows == [catalog.row(key) for key in keys[: len(rows)]]


# Victims.


def test_no_more_victims_than_needed(catalog: Catalog) -> None:
    store(catalog, PROMPT, RAM)
    for key in catalog.victims(RAM, 3 * LENGTH):
        catalog.remove(key, RAM)
    assert list(catalog.victims(RAM)) == PROMPT[4::-1]


def test_parent_is_known_in_every_tier(catalog: Catalog) -> None:
    """A chunk keeps its parent when it is added to another tier."""
    store(catalog, [A, B], RAM)
    catalog.add_chain([C, D], RAM, [LENGTH] * 2, READY, B)
    catalog.remove(B, RAM)
    store(catalog, [B], RAM)  # Reuses its former row.
    for tier in (SSD, POOL):
        for key in (A, B, C, D):
            catalog.add(key, tier, LENGTH, READY)
        assert list(catalog.victims(tier)) == [D, C, B, A]


@pytest.mark.parametrize("used", [[C], [B, D], [D, B, C]])
def test_leaf_is_a_victim_before_its_parent_whatever_was_used(catalog: Catalog, used: list[ChunkKey]) -> None:
    """A use that is not a prefix makes a leaf warmer than its parent."""
    store(catalog, PROMPT, RAM)
    for key in used:
        catalog.touch([key])
    assert sorted(catalog.victims(RAM)) == sorted(PROMPT)
    left = set(PROMPT)
    for key in catalog.victims(RAM):
        left.remove(key)
        children = PROMPT[PROMPT.index(key) + 1 :][:1]
        assert not left.intersection(children)


def test_parent_of_many_children(catalog: Catalog) -> None:
    """Counts beyond 254 do not fit into a byte."""
    catalog.add(A, RAM, LENGTH, READY)
    branches = [ChunkKey(blake3(number.to_bytes(2, "little")).digest()) for number in range(600)]
    for key in branches:
        catalog.add(key, RAM, LENGTH, READY, A)
    assert catalog.victims(RAM)[-1] == A
    catalog.touch([*branches, A])
    for key in branches[:-1]:
        catalog.remove(key, RAM)
    assert catalog.victims(RAM) == [branches[-1], A]
    catalog.remove(A, RAM)
    assert (A in catalog, len(catalog)) == (False, 1)
    catalog.remove(branches[-1], RAM)
    assert len(catalog) == 0


def test_leased_chunk_does_not_keep_its_prefix(catalog: Catalog) -> None:
    store(catalog, PROMPT[:4], RAM)
    leased = {catalog.row(D)}
    assert catalog.victims(RAM, is_leased=leased.__contains__) == [C, B, A]
    assert catalog.victims(RAM, is_leased=leased.__contains__, limit=2) == [C]


def test_circular_chain_is_evicted(catalog: Catalog) -> None:
    """Only a peer that lies about parents can create one."""
    catalog.add(A, RAM, LENGTH, READY)
    catalog.add(B, RAM, LENGTH, READY, A)
    catalog.add(A, SSD, LENGTH, READY, B)
    while victims := catalog.victims(RAM):
        for key in victims:
            catalog.remove(key, RAM)
    assert catalog.count(RAM) == 0
    catalog.remove(A, SSD)
    assert len(catalog) == 0


def test_row_of_a_removed_parent_is_not_reused(catalog: Catalog) -> None:
    store(catalog, [A, B], RAM)
    row = catalog.row(A)
    catalog.remove(A, RAM)
    assert (A in catalog, len(catalog), catalog.state(A, RAM)) == (False, 1, ABSENT)
    with pytest.raises(KeyError):
        catalog.remove(A, RAM)
    catalog.add(C, RAM, LENGTH, READY)
    assert catalog.row(C) != row
    catalog.add(A, SSD, 2 * LENGTH, READY, namespace=b"new")
    assert (catalog.row(A), catalog.length(A), catalog.keys(SSD, b"new")) == (row, 2 * LENGTH, [A])
    catalog.remove(A, SSD)
    catalog.remove(B, RAM)
    assert (catalog.row(A), len(catalog)) == (None, 1)
    catalog.add_chain(PROMPT[4:7], RAM, [LENGTH] * 3, READY)
    assert sorted(catalog.row(key) for key in [*PROMPT[4:7], C]) == [0, 1, 2, 3]


# Hints.


def test_hints_of_a_request_are_those_of_its_chunks(catalog: Catalog) -> None:
    now = time.monotonic()
    store(catalog, [A], RAM)
    hints = ChunkHints(tenant="a", priority=3, retention=60, resume=5, recompute=0.5)
    catalog.add_chain([B, C], RAM, [LENGTH] * 2, READY, A, hints=hints)
    catalog.add(D, RAM, LENGTH, READY, C, hints=ChunkHints("b"))
    columns = catalog.columns.hints
    a, b, c, d = (catalog.row(key) for key in (A, B, C, D))
    assert [columns.priority(row) for row in (a, b, c, d)] == [0, 3, 3, 0]
    assert columns.tenant(a) == 0
    assert len({columns.tenant(row) for row in (a, b, c, d)}) == 3
    assert 60 <= columns.retain_until(c) - now < 120
    assert 5 <= columns.resume_at(c) - now < 65
    assert columns.recompute_seconds(b) == 0.5
    assert (columns.retain_until(d), columns.resume_at(a), columns.recompute_seconds(a)) == (0, 0, 0)
    catalog.set_hints([b, c], ChunkHints(priority=-200))
    assert [columns.priority(row) for row in (b, c)] == [-100, -100]
    assert columns.tenant(b) == 0
    catalog.set_hints([b], ChunkHints("b"))  # Only names the tenant.
    assert (columns.tenant(b), columns.priority(b)) == (columns.number("b"), -100)


def test_reused_row_has_no_hints(catalog: Catalog) -> None:
    catalog.add(A, RAM, LENGTH, READY, hints=ChunkHints(priority=7))
    row = catalog.row(A)
    catalog.remove(A, RAM)
    catalog.add(B, RAM, LENGTH, READY)
    assert (catalog.row(B), catalog.columns.hints.priority(row)) == (row, 0)


def test_tenants_are_bounded(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.catalog.hints.MAX_TENANTS", 2)
    for key, tenant in zip(PROMPT, "abcda", strict=False):
        catalog.add(key, RAM, LENGTH, READY, hints=ChunkHints(tenant))
    columns = catalog.columns.hints
    assert [columns.tenant(catalog.row(key)) for key in PROMPT[:5]] == [1, 2, 0, 0, 1]


# Pins.


def test_pinned_chunk_is_not_a_victim(catalog: Catalog) -> None:
    store(catalog, [A, B], RAM)
    catalog.pin([A, B], None)
    assert list(catalog.victims(RAM)) == []
    assert catalog.pins.holds(A, 1e18)
    assert catalog.pinned == 2
    catalog.pins.remove([B, C])
    assert catalog.pinned == 1
    assert list(catalog.victims(RAM)) == [B]


def test_pin_expires(catalog: Catalog) -> None:
    now = time.monotonic()
    store(catalog, [A, B], RAM)
    catalog.pin([A], now + 1000)
    catalog.pin([B], now - 1)
    assert catalog.pinned == 1, "expired ones do not count"
    assert list(catalog.victims(RAM)) == [B]
    assert catalog.pins.holds(A, now + 999)
    assert not catalog.pins.holds(A, now + 1000)


@pytest.mark.parametrize(
    ("times", "longest"), [([5, 9], 9), ([9, 5], 9), ([None, 5], None), ([5, None], None)]
)
def test_longer_pin_wins(catalog: Catalog, times: list[float | None], longest: float | None) -> None:
    store(catalog, [A], RAM)
    for until in times:
        catalog.pin([A], until)
    assert catalog.pins.holds(A, 8)
    assert catalog.pins.holds(A, 1e18) is (longest is None)


# Namespaces.


def test_keys_by_tier_and_namespace(catalog: Catalog) -> None:
    catalog.add(A, RAM, LENGTH, READY, namespace=b"one")
    catalog.add(B, RAM, LENGTH, PENDING, namespace=b"two")
    catalog.add(B, SSD, LENGTH, READY, namespace=b"ignored: it is known already")
    catalog.add(C, SSD, LENGTH, READY)
    assert set(catalog.keys(RAM)) == {A, B}
    assert catalog.keys(RAM, b"one") == [A]
    assert catalog.keys(SSD, b"two") == [B]
    assert catalog.keys(SSD, b"") == [C]
    assert catalog.keys(SSD, b"three") == []


# Stored lengths.


def test_encoded_chunks_have_their_own_length(catalog: Catalog) -> None:
    catalog = Catalog([LruPolicy.factory()] * 3, encoded=[SSD])
    for tier in (RAM, SSD, POOL):
        catalog.add_chain([A, B], tier, [4 * LENGTH] * 2, PENDING)
    catalog.resize(A, SSD, LENGTH)
    catalog.resize(B, SSD, 4 * LENGTH)
    catalog.resize(C, SSD, LENGTH)
    assert [catalog.stored_length(A, tier, 0) for tier in (RAM, SSD, POOL)] == [
        4 * LENGTH,
        LENGTH,
        4 * LENGTH,
    ]
    assert [catalog.used(tier) for tier in (RAM, SSD, POOL)] == [8 * LENGTH, 5 * LENGTH, 8 * LENGTH]
    assert (catalog.length(A), catalog.stored_length(C, SSD, 7)) == (4 * LENGTH, 7)
    for key in (A, B):
        catalog.set_ready(key, SSD)
    catalog.touch([A])
    assert catalog.victims(SSD, LENGTH) == [B]
    assert catalog.victims(SSD, 5 * LENGTH) == [B, A]
    catalog.remove(A, SSD)
    assert catalog.used(SSD) == 4 * LENGTH
    catalog.add(A, SSD, 1, READY)
    assert catalog.used(SSD) == 8 * LENGTH, "the length of an earlier object"


# Batches.


def test_add_chain_equals_repeated_add(catalog: Catalog) -> None:
    one_by_one = Catalog([LruPolicy.factory(), LruPolicy.factory(), LruPolicy.factory()])
    for instance in (catalog, one_by_one):
        store(instance, PROMPT[:1], RAM)
        store(instance, PROMPT[2:4], SSD)
        instance.remove(C, SSD)
    catalog.add_chain(PROMPT[1:], RAM, [LENGTH] * 7, PENDING, A, b"space")
    for at in range(1, 8):
        one_by_one.add(PROMPT[at], RAM, LENGTH, PENDING, PROMPT[at - 1], b"space")
    for instance in (catalog, one_by_one):
        for key in PROMPT[1:]:
            instance.set_ready(key, RAM)
    assert list(catalog.victims(RAM)) == list(one_by_one.victims(RAM)) == PROMPT[::-1]
    for tier in (RAM, SSD):
        assert (catalog.used(tier), catalog.count(tier)) == (one_by_one.used(tier), one_by_one.count(tier))
        assert catalog.keys(tier, b"space") == one_by_one.keys(tier, b"space")
    assert len(catalog) == len(one_by_one)


@pytest.mark.parametrize("keys", [[B, A, C], [B, C, B], [A]], ids=["there", "twice", "alone"])
def test_add_chain_is_all_or_nothing(catalog: Catalog, keys: list[ChunkKey]) -> None:
    store(catalog, [A], RAM)
    with pytest.raises(ValueError, match=r"already|twice"):
        catalog.add_chain(keys, RAM, [LENGTH] * len(keys), READY)
    assert (len(catalog), catalog.count(RAM), catalog.used(RAM)) == (1, 1, LENGTH)
    assert list(catalog.victims(RAM)) == [A]


def test_add_copies_equals_repeated_add(catalog: Catalog) -> None:
    """Also with gaps, where a chunk's parent is not the one before it."""
    one_by_one = Catalog([LruPolicy.factory(), LruPolicy.factory(), LruPolicy.factory()])
    copied = [*PROMPT[1:3], *PROMPT[4:]]
    for instance in (catalog, one_by_one):
        store(instance, PROMPT, SSD)
        store(instance, PROMPT[3:4], RAM)
    rows = catalog.add_copies(copied, RAM)
    assert rows == [one_by_one.add(key, RAM, LENGTH, PENDING) for key in copied]
    for instance in (catalog, one_by_one):
        assert [instance.state(key, RAM) for key in copied] == [PENDING] * len(copied)
        for key in copied:
            instance.set_ready(key, RAM)
    assert catalog.victims(RAM) == one_by_one.victims(RAM)
    assert (catalog.used(RAM), catalog.count(RAM)) == (one_by_one.used(RAM), one_by_one.count(RAM))
    for instance in (catalog, one_by_one):
        instance.remove_all(PROMPT, SSD)
        instance.remove_all([*copied, D], RAM)
        assert len(instance) == 0


@pytest.mark.parametrize("keys", [[B, A], [B, D], [B, B]], ids=["there", "nowhere", "twice"])
def test_add_copies_is_all_or_nothing(catalog: Catalog, keys: list[ChunkKey]) -> None:
    store(catalog, [A, B], SSD)
    store(catalog, [A], RAM)
    with pytest.raises(ValueError, match=r"already|in no tier|twice"):
        catalog.add_copies(keys, RAM)
    assert (len(catalog), catalog.count(RAM), catalog.used(RAM)) == (2, 1, LENGTH)
    assert catalog.victims(RAM) == [A]


@pytest.mark.parametrize("keys", [[A, C], [A, D], [A, B, A]], ids=["elsewhere", "nowhere", "twice"])
def test_remove_all_is_all_or_nothing(catalog: Catalog, keys: list[ChunkKey]) -> None:
    store(catalog, [A, B], RAM)
    store(catalog, [C], SSD)
    with pytest.raises(KeyError):
        catalog.remove_all(keys, RAM)
    assert (len(catalog), catalog.count(RAM), catalog.used(RAM)) == (3, 2, 2 * LENGTH)
    catalog.remove_all([A, B], RAM)
    assert (len(catalog), catalog.count(RAM), catalog.used(RAM)) == (1, 0, 0)
    assert list(catalog.victims(RAM)) == []


def test_empty_batches_change_nothing(catalog: Catalog) -> None:
    catalog.add_chain([], RAM, [], READY)
    catalog.remove_all([], RAM)
    assert len(catalog) == 0


# Comparison with a model.

TREE_PARENTS: list[int | None] = [None, 0, 1, 2, 1, 4, 0, 6, None, 8, 9, 8]
"""Branching prompts: the parent of each chunk."""
TREE = [ChunkKey(blake3(bytes([at])).digest()) for at in range(len(TREE_PARENTS))]
TREE_TIERS = 3

nodes = st.sampled_from(range(len(TREE)))
tiers = st.sampled_from(range(TREE_TIERS))


def path_to(node: int) -> list[int]:
    parent = TREE_PARENTS[node]
    return [node] if parent is None else [*path_to(parent), node]


class CatalogMachine(RuleBasedStateMachine):
    """The model: a state per chunk and tier, an order per tier, and the set of pins."""

    def __init__(self) -> None:
        super().__init__()
        self.catalog = Catalog([LruPolicy.factory() for _ in range(TREE_TIERS)])
        self.states: dict[tuple[int, int], State] = {}
        self.coldest_first: list[list[int]] = [[] for _ in range(TREE_TIERS)]
        self.pins: set[int] = set()
        self.now = time.monotonic()

    def held(self, node: int) -> bool:
        return any((node, tier) in self.states for tier in range(TREE_TIERS))

    def ready_tiers(self, node: int) -> list[int]:
        return [tier for tier in range(TREE_TIERS) if self.states.get((node, tier)) is READY]

    def length(self, node: int) -> int:
        return 4096 * (node + 1)

    @rule(node=nodes, tier=tiers, state=st.sampled_from([PENDING, READY]))
    def add(self, node: int, tier: int, state: State) -> None:
        parent = TREE_PARENTS[node]
        arguments = (TREE[node], tier, self.length(node), state, None if parent is None else TREE[parent])
        if (node, tier) in self.states:
            with pytest.raises(ValueError, match="already"):
                self.catalog.add(*arguments)
            return
        self.catalog.add(*arguments)
        self.states[node, tier] = state
        order = self.coldest_first[tier]
        order.insert(order.index(parent) if parent in order else len(order), node)

    @rule(node=nodes, tier=tiers, state=st.sampled_from([PENDING, READY]), skipped=st.integers(0, 2))
    def add_chain(self, node: int, tier: int, state: State, skipped: int) -> None:
        chain = path_to(node)[skipped:]
        parent = TREE_PARENTS[chain[0]] if chain else None
        if any((step, tier) in self.states for step in chain):
            with pytest.raises(ValueError, match="already"):
                self.enter(chain, tier, state, parent)
            return
        self.enter(chain, tier, state, parent)
        order = self.coldest_first[tier]
        for step in chain:
            self.states[step, tier] = state
            order.insert(order.index(parent) if parent in order else len(order), step)
            parent = step

    def enter(self, chain: list[int], tier: int, state: State, parent: int | None) -> None:
        keys, lengths = [TREE[step] for step in chain], [self.length(step) for step in chain]
        self.catalog.add_chain(keys, tier, lengths, state, None if parent is None else TREE[parent])

    @rule(node=nodes, tier=tiers)
    def remove_all(self, node: int, tier: int) -> None:
        path = path_to(node)
        if any((step, tier) not in self.states for step in path):
            with pytest.raises(KeyError):
                self.catalog.remove_all([TREE[step] for step in path], tier)
            return
        self.catalog.remove_all([TREE[step] for step in path], tier)
        for step in path:
            del self.states[step, tier]
            self.coldest_first[tier].remove(step)
            if not self.held(step):
                self.pins.discard(step)

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        node, tier = data.draw(st.sampled_from(sorted(self.states)))
        if self.states[node, tier] is PENDING:
            self.catalog.set_ready(TREE[node], tier)
            self.states[node, tier] = READY
        else:
            with pytest.raises(KeyError):
                self.catalog.set_ready(TREE[node], tier)

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.remove_from_tier(*data.draw(st.sampled_from(sorted(self.states))))

    def remove_from_tier(self, node: int, tier: int) -> None:
        self.catalog.remove(TREE[node], tier)
        del self.states[node, tier]
        self.coldest_first[tier].remove(node)
        if not self.held(node):
            self.pins.discard(node)

    @rule(node=nodes, tier=tiers)
    def refuse(self, node: int, tier: int) -> None:
        if (node, tier) not in self.states:
            for refused in (self.catalog.set_ready, self.catalog.remove):
                with pytest.raises(KeyError):
                    refused(TREE[node], tier)

    @precondition(lambda self: self.states)
    @rule(tier=tiers, count=st.integers(1, 4))
    def evict(self, tier: int, count: int) -> None:
        for key in self.catalog.victims(tier)[:count]:
            self.remove_from_tier(TREE.index(key), tier)

    @rule(node=nodes)
    def touch(self, node: int) -> None:
        path = path_to(node)
        self.catalog.touch([TREE[step] for step in path])
        for tier, order in enumerate(self.coldest_first):
            present = [step for step in path if step in order]
            self.coldest_first[tier] = [other for other in order if other not in present] + present[::-1]

    @rule(node=nodes, seconds=st.sampled_from([None, 1000, -1]))
    def pin(self, node: int, seconds: float | None) -> None:
        until = None if seconds is None else self.now + seconds
        self.catalog.pin([TREE[step] for step in path_to(node)], until)
        if seconds != -1:
            self.pins.update(step for step in path_to(node) if self.held(step))

    @rule(node=nodes)
    def unpin(self, node: int) -> None:
        self.catalog.pins.remove([TREE[node]])
        self.pins.discard(node)

    @invariant()
    def chunks_agree(self) -> None:
        assert len(self.catalog) == sum(map(self.held, range(len(TREE))))
        for node, key in enumerate(TREE):
            assert (key in self.catalog) is self.held(node)
            assert self.catalog.tiers(key) == self.ready_tiers(node)
            assert self.catalog.fastest(key) == next(iter(self.ready_tiers(node)), -1)
            assert self.catalog.pins.holds(key, self.now) is (node in self.pins)
            if self.held(node):
                assert self.catalog.length(key) == self.length(node)
            for tier in range(TREE_TIERS):
                assert self.catalog.state(key, tier) is self.states.get((node, tier), ABSENT)

    @invariant()
    def prefixes_agree(self) -> None:
        for node in range(len(TREE)):
            path = path_to(node)
            leading = itertools.takewhile(self.ready_tiers, path)
            assert self.catalog.prefix([TREE[step] for step in path]) == [
                self.ready_tiers(step)[0] for step in leading
            ]

    @invariant()
    def tiers_agree(self) -> None:
        for tier, order in enumerate(self.coldest_first):
            assert self.catalog.count(tier) == len(order)
            assert self.catalog.used(tier) == sum(map(self.length, order))
            assert sorted(self.catalog.keys(tier)) == sorted(TREE[node] for node in order)
            assert self.catalog.victims(tier) == [TREE[node] for node in self.leaves_first(tier, order)]

    def leaves_first(self, tier: int, order: list[int]) -> list[int]:
        """Return the victims: in this order, but a chunk after its children that are in the tier."""
        parents = self.known_parents()
        children = {node: [child for child in order if parents[child] == node] for node in order}
        victims: list[int] = []
        finished: set[int] = set()
        for at, next_node in enumerate(order):
            waiting = [next_node]
            while waiting:
                node = waiting.pop()
                may_leave = self.states[node, tier] is READY and node not in self.pins
                if node in finished or (may_leave and not finished.issuperset(children[node])):
                    continue
                finished.add(node)
                if may_leave:
                    victims.append(node)
                # A parent that has been examined before was only waiting for its last child.
                parent = parents[node]
                if parent in children and order.index(parent) < at:
                    waiting.append(parent)
        return victims

    def known_parents(self) -> dict[int, int | None]:
        """Return the parent of each chunk, unless it was unknown when the chunk was added."""
        nodes = {self.catalog.row(key): node for node, key in enumerate(TREE)}
        parents = self.catalog.columns.parents
        return {node: nodes.get(parents[row]) for row, node in nodes.items() if row is not None}


def test_catalog_agrees_with_the_model() -> None:
    run_state_machine_as_test(
        CatalogMachine, settings=hypothesis_settings(max_examples=60, stateful_step_count=50, deadline=None)
    )


# Memory.


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="from 3.14 on, the collector tracks every dictionary")
def test_collector_does_not_visit_chunks(catalog: Catalog) -> None:
    def visited() -> int:
        gc.collect()
        return sum(len(gc.get_referents(tracked)) for tracked in gc.get_objects())

    before = visited()
    for number in range(20_000):
        catalog.add(ChunkKey(blake3(number.to_bytes(4, "little")).digest()), SSD, LENGTH, READY)
    assert visited() - before < 2_000


# When policies learn of lookups.


class Notified(LruPolicy):
    """Notes what is reported to it, and fails once after :attr:`fails` was set."""

    def __init__(self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns) -> None:
        super().__init__(settings, capacity_bytes, chunks)
        self.reports: list[tuple[str, int, float]] = []
        self.fails = False

    def used(self, rows: Sequence[int], now: float) -> None:
        if self.fails:
            self.fails = False
            raise RuntimeError("a policy has failed")
        self.reports.append(("used", len(rows), now))
        super().used(rows, now)

    def missed(self, keys: Sequence[ChunkKey], now: float) -> None:
        self.reports.append(("missed", len(keys), now))

    def added(self, rows: Sequence[int], now: float) -> None:
        self.reports.append(("added", len(rows), now))
        super().added(rows, now)

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        self.reports.append(("removed", len(rows), 0.0))
        super().removed(rows, reason)


class LateTier:
    """A catalog whose policy learns of lookups later, and one that learns of them at once."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[Callable[[], None]] = []
        self.delays: list[float] = []
        factory, clock = Notified.factory(), lambda: self.now
        self.catalog = Catalog([factory], clock=clock, later=self.later)
        self.at_once = Catalog([factory], clock=clock)
        for catalog in (self.catalog, self.at_once):
            catalog.add_chain(PROMPT[:4], RAM, [LENGTH] * 4, READY)
        (self.policy,) = self.catalog.policies
        assert isinstance(self.policy, Notified)
        self.reports = self.policy.reports
        self.reports.clear()

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        self.delays.append(seconds)
        self.due.append(function)

    def look_up(self, held: int, hints: ChunkHints | None = None, after: float = 1.0) -> None:
        self.now += after
        for catalog in (self.catalog, self.at_once):
            rows, _ = catalog.prefix_rows(PROMPT[:held])
            if hints is not None:
                catalog.set_hints(rows, hints)
            catalog.touch_rows(rows)
            catalog.report_missed(PROMPT[held:])


@pytest.mark.parametrize("hints", [None, ChunkHints(tenant="a")])
def test_one_call_is_outstanding_however_many_lookups_come(hints: ChunkHints | None) -> None:
    """With hints, policies learn of each lookup before the next one."""
    tier = LateTier()
    for _ in range(100):
        tier.look_up(4, hints, after=0.00025)
        assert len(tier.due) == 1
    while tier.due:
        tier.now += 0.001
        tier.due.pop()()
    assert [kind for kind, *_ in tier.reports].count("used") == 100


def test_policies_learn_of_lookups_later_in_order() -> None:
    tier = LateTier()
    tier.look_up(2)
    tier.look_up(4)
    assert (tier.reports, len(tier.due)) == ([], 1)
    tier.now = 99.0
    while tier.due:
        tier.due.pop()()
    assert tier.reports == [("used", 2, 1.0), ("missed", 6, 1.0), ("used", 4, 2.0), ("missed", 4, 2.0)]
    tier.look_up(1)
    assert len(tier.due) == 1
    assert tier.catalog.policies == [tier.policy]
    assert tier.reports[4:] == [("used", 1, 100.0), ("missed", 7, 100.0)]
    tier.due.pop()()
    assert len(tier.reports) == 6


def test_policies_learn_in_steps_between_which_lookups_are_answered() -> None:
    tier = LateTier()
    for _ in range(5):
        tier.look_up(4, after=0.0)
    tier.now += REPORT_SECONDS
    learned = []
    while tier.due:
        tier.due.pop()()
        learned.append(len(tier.reports))
    assert learned[0] == REPORTS_PER_STEP
    assert max(after - before for before, after in pairwise([0, *learned])) == REPORTS_PER_STEP
    assert learned[-1] == 10
    assert tier.delays == [REPORT_SECONDS] + [0.0] * (len(learned) - 1)


def test_policies_learn_while_lookups_keep_coming_but_not_at_once() -> None:
    tier, learned_at = LateTier(), 0.0
    while tier.now < 3 * MAX_REPORT_SECONDS:
        tier.look_up(4, after=REPORT_SECONDS / 4)
        if tier.delays[-1] == 0.0 or round(tier.now / REPORT_SECONDS, 6).is_integer():
            for function in tier.due[:]:
                tier.due.remove(function)
                function()
        learned_at = learned_at or (tier.now if tier.reports else 0.0)
    assert MAX_REPORT_SECONDS <= learned_at < MAX_REPORT_SECONDS + 3 * REPORT_SECONDS


def test_lookups_do_not_pile_up_if_many_come_between_two_steps() -> None:
    tier = LateTier()
    looked_up, known = 0, []
    for _ in range(400):
        for _ in range(10):
            tier.look_up(4, after=REPORT_SECONDS / 100)
        looked_up += 20
        for function in tier.due[:]:
            tier.due.remove(function)
            function()
        known.append(looked_up - len(tier.reports))
    assert max(known[200:]) <= max(known[:200])


@pytest.mark.parametrize(
    "change",
    [
        lambda catalog: catalog.add(PROMPT[4], RAM, LENGTH, READY, D),
        lambda catalog: catalog.add_chain(PROMPT[4:], RAM, [LENGTH] * 4, READY, D),
        lambda catalog: catalog.remove(D, RAM),
        lambda catalog: catalog.victims(RAM, LENGTH),
        lambda catalog: catalog.report_answer_ended([C, D], ()),
        lambda catalog: catalog.set_hints([0], ChunkHints("tenant")),
        lambda catalog: catalog.resize(A, RAM, LENGTH - 1),
    ],
)
def test_policies_know_all_lookups_before_anything_changes(change: Callable[[Catalog], object]) -> None:
    tier = LateTier()
    tier.look_up(2)
    assert tier.reports == []
    change(tier.catalog)
    assert tier.reports[:2] == [("used", 2, 1.0), ("missed", 6, 1.0)]


def test_policies_evict_the_same_whether_they_learn_at_once_or_later() -> None:
    tier, chance = LateTier(), random.Random(3)
    for _ in range(60):
        tier.look_up(chance.randint(0, 4), ChunkHints("x") if chance.random() < 0.3 else None)
        if chance.random() < 0.2:
            wanted = tier.catalog.victims(RAM, LENGTH)
            assert wanted == tier.at_once.victims(RAM, LENGTH)
            for catalog in (tier.catalog, tier.at_once):
                catalog.remove_all(wanted, RAM)
                catalog.add(wanted[0], RAM, LENGTH, READY, PROMPT[PROMPT.index(wanted[0]) - 1])
    assert tier.catalog.policies == [tier.policy]
    assert tier.reports == tier.at_once.policies[0].reports[1:]  # type: ignore[attr-defined]


def test_policy_that_fails_keeps_no_other_tier_from_learning(failed_policies: list[str]) -> None:
    due: list[Callable[[], None]] = []
    policies, now = [Notified.factory(), Notified.factory()], iter(range(100))
    catalog = Catalog(policies, clock=lambda: next(now), later=lambda _, function: due.append(function))
    catalog.add(A, RAM, LENGTH, READY)
    fast, slow = catalog.policies
    assert isinstance(fast, Notified)
    assert isinstance(slow, Notified)
    fast.fails = True
    catalog.touch([A])
    due.pop()()
    assert [name for name, *_ in slow.reports] == ["used"]
    assert failed_policies.pop()


def test_lookup_without_a_timer_does_not_keep_later_ones_from_having_one() -> None:
    due: list[Callable[[], None]] = []
    running = False

    def later(_seconds: float, function: Callable[[], None]) -> None:
        if not running:
            raise RuntimeError("no running event loop")
        due.append(function)

    catalog = Catalog([Notified.factory()], later=later)
    catalog.add(A, RAM, LENGTH, READY)
    with pytest.raises(RuntimeError, match="no running event loop"):
        catalog.touch([A])
    running = True
    catalog.touch([A])
    assert len(due) == 1


def test_policy_that_fails_at_a_lookup_fails_nothing_else(
    caplog: pytest.LogCaptureFixture, failed_policies: list[str]
) -> None:
    tier = LateTier()
    tier.policy.fails = True  # type: ignore[attr-defined]
    tier.look_up(3)
    assert tier.catalog.victims(RAM, LENGTH) == [D]
    assert "the eviction policy of tier 0 has failed at a lookup: RuntimeError" in caplog.text
    failed_policies.clear()
    assert tier.reports == [("missed", 5, 1.0)]
    tier.due.pop()()
    tier.look_up(1)
    tier.now += 1
    tier.due.pop()()
    assert len(tier.reports) == 3
