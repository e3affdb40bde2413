"""The LRU policy: the least recently used row is evicted first, and a leaf before its parent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.catalog.eviction import ChunkColumns, RemovalReason
from kvtier.catalog.policies.lru import LruPolicy

pytestmark = pytest.mark.usefixtures("either_core")

ROOTLESS = -1


class Lru:
    """A policy with the columns of a catalog."""

    def __init__(self) -> None:
        self.columns = ChunkColumns()
        self.policy = LruPolicy.factory()(self.columns)

    def added(self, row: int, parent: int) -> None:
        self.added_chain([row], parent)

    def added_chain(self, rows: Sequence[int], parent: int) -> None:
        for row in rows:
            while row >= len(self.columns.parents):
                self.columns.parents.append(ROOTLESS)
                self.columns.lengths.append(1)
            self.columns.parents[row] = parent
            parent = row
        self.policy.added(rows, 0.0)

    def used(self, rows: Sequence[int]) -> None:
        self.policy.used(rows, 0.0)

    def removed(self, row: int) -> None:
        self.removed_all([row])

    def removed_all(self, rows: Sequence[int]) -> None:
        self.policy.removed(rows, RemovalReason.EVICTED)

    def victims(self) -> Iterator[int]:
        return islice(self.policy.victims(), 1000)


def policy(*chunks: tuple[int, int]) -> Lru:
    """Return a policy with chunks added, each as (row, parent)."""
    lru = Lru()
    for row, parent in chunks:
        lru.added(row, parent)
    return lru


def order(lru: Lru) -> list[int]:
    """Return the victims, coldest first; at most 1000, so that a cycle fails instead of hanging."""
    return list(lru.victims())


def test_empty_policy_has_no_victims() -> None:
    assert order(Lru()) == []


def test_unrelated_chunks_are_evicted_in_order_of_insertion() -> None:
    assert order(policy((5, ROOTLESS), (0, ROOTLESS), (3, ROOTLESS))) == [5, 0, 3]


def test_prompt_is_evicted_from_its_end() -> None:
    assert order(policy((0, ROOTLESS), (1, 0), (2, 1))) == [2, 1, 0]


def test_branches_are_evicted_before_their_shared_prefix() -> None:
    shared, left, right = 0, 1, 2
    lru = policy((shared, ROOTLESS), (left, shared), (right, shared), (3, left))
    assert order(lru) == [3, left, right, shared]


def test_chunk_with_an_absent_parent_is_the_warmest() -> None:
    assert order(policy((0, ROOTLESS), (1, 7))) == [0, 1]


def test_used_prefix_is_the_warmest_with_its_root_last() -> None:
    lru = policy((0, ROOTLESS), (1, 0), (2, 1), (8, ROOTLESS), (9, 8))
    lru.used([0, 1])
    assert order(lru) == [2, 9, 8, 1, 0]


def test_unknown_rows_are_ignored() -> None:
    lru = policy((0, ROOTLESS), (4, 0))
    for row in (2, 77):
        lru.removed(row)
        lru.used([row, 0, row])
    assert order(lru) == [4, 0]


@pytest.mark.parametrize("removed_row", [0, 1, 2])
def test_removal_at_any_position(removed_row: int) -> None:
    lru = policy((0, ROOTLESS), (1, 0), (2, 1))
    lru.removed(removed_row)
    assert order(lru) == [row for row in (2, 1, 0) if row != removed_row]


def test_reused_row_has_no_old_state() -> None:
    lru = policy((0, ROOTLESS), (1, 0), (2, ROOTLESS))
    lru.removed(1)
    lru.added(1, ROOTLESS)
    assert order(lru) == [0, 2, 1]
    lru.used([0])
    assert order(lru) == [2, 1, 0]


def test_removed_row_neither_returns_nor_is_a_parent() -> None:
    lru = policy((0, ROOTLESS), (1, 0), (2, ROOTLESS))
    lru.removed(0)
    lru.used([0, 1])
    lru.removed(0)
    lru.added(3, 0)
    assert order(lru) == [2, 1, 3]


def test_search_does_not_change_the_order() -> None:
    lru = policy((0, ROOTLESS), (1, 0), (2, 1), (3, 2))
    assert list(islice(lru.victims(), 2)) == [3, 2]
    assert order(lru) == [3, 2, 1, 0]


def test_removing_the_last_row_leaves_an_empty_policy() -> None:
    lru = policy((6, ROOTLESS))
    lru.removed(6)
    assert order(lru) == []
    lru.added(6, ROOTLESS)
    assert order(lru) == [6]


class LruMachine(RuleBasedStateMachine):
    """The model is a list. Chunks are added after their parents, and removed in any order."""

    rows = 12

    def __init__(self) -> None:
        super().__init__()
        self.lru = Lru()
        self.coldest_first: list[int] = []
        self.parents: dict[int, int] = {}

    def absent(self) -> list[int]:
        return [row for row in range(self.rows + 2) if row not in self.parents]

    def children(self, row: int) -> list[int]:
        return [child for child, parent in self.parents.items() if parent == row]

    def remove_row(self, row: int) -> None:
        self.lru.removed(row)
        self.coldest_first.remove(row)
        del self.parents[row]
        for child in self.children(row):
            self.parents[child] = ROOTLESS

    @precondition(lambda self: len(self.parents) < self.rows)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.absent()))
        parent = data.draw(st.sampled_from([ROOTLESS, *self.parents]))
        absent = st.sampled_from([ROOTLESS, *self.absent()]).filter(row.__ne__)
        self.lru.added(row, data.draw(absent) if parent == ROOTLESS else parent)
        at = len(self.coldest_first) if parent == ROOTLESS else self.coldest_first.index(parent)
        self.coldest_first.insert(at, row)
        self.parents[row] = parent

    @rule(data=st.data(), count=st.integers(0, 5))
    def add_chain(self, data: st.DataObject, count: int) -> None:
        count = min(count, self.rows - len(self.parents))
        chain = data.draw(st.permutations(self.absent()))[: max(0, count)]
        parent = data.draw(st.sampled_from([ROOTLESS, *self.parents]))
        self.lru.added_chain(chain, parent)
        for row in chain:
            at = len(self.coldest_first) if parent == ROOTLESS else self.coldest_first.index(parent)
            self.coldest_first.insert(at, row)
            self.parents[row] = parent
            parent = row

    @rule(data=st.data())
    def remove_all(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(range(self.rows + 2)), max_size=5))
        self.lru.removed_all(rows)
        for row in set(rows).intersection(self.parents):
            self.coldest_first.remove(row)
            del self.parents[row]
            for child in self.children(row):
                self.parents[child] = ROOTLESS

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        unknown = data.draw(st.lists(st.sampled_from(self.absent()), max_size=2))
        prefix = [data.draw(st.sampled_from(sorted(self.parents)))]
        while (parent := self.parents[prefix[0]]) != ROOTLESS:
            prefix.insert(0, parent)
        self.lru.used([*unknown, *prefix, *unknown])
        rest = [row for row in self.coldest_first if row not in prefix]
        self.coldest_first = rest + prefix[::-1]

    @precondition(lambda self: self.parents)
    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        for row in list(islice(self.lru.victims(), count)):
            assert not self.children(row), "a parent goes before its child"
            self.remove_row(row)

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.remove_row(data.draw(st.sampled_from(sorted(self.parents))))

    @invariant()
    def agrees(self) -> None:
        assert order(self.lru) == self.coldest_first


def test_policy_agrees_with_a_list() -> None:
    run_state_machine_as_test(
        LruMachine, settings=hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
