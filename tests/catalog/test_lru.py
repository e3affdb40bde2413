"""The LRU policy agrees with a list: the least recently used row leaves first, leaves before parents."""

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

    def added(self, rows: Sequence[int], parent: int) -> None:
        for row in rows:
            while row >= len(self.columns.parents):
                self.columns.parents.append(ROOTLESS)
                self.columns.lengths.append(1)
            self.columns.parents[row] = parent
            parent = row
        self.policy.added(rows, 0.0)

    def used(self, rows: Sequence[int]) -> None:
        self.policy.used(rows, 0.0)

    def removed(self, rows: Sequence[int]) -> None:
        self.policy.removed(rows, RemovalReason.EVICTED)

    def victims(self) -> Iterator[int]:
        """Yield the coldest first; at most 1000, so that a cycle fails instead of hanging."""
        return islice(self.policy.victims(), 1000)


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
        self.lru.removed([row])
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
        self.lru.added([row], data.draw(absent) if parent == ROOTLESS else parent)
        at = len(self.coldest_first) if parent == ROOTLESS else self.coldest_first.index(parent)
        self.coldest_first.insert(at, row)
        self.parents[row] = parent

    @rule(data=st.data(), count=st.integers(0, 5))
    def add_chain(self, data: st.DataObject, count: int) -> None:
        count = min(count, self.rows - len(self.parents))
        chain = data.draw(st.permutations(self.absent()))[: max(0, count)]
        parent = data.draw(st.sampled_from([ROOTLESS, *self.parents]))
        self.lru.added(chain, parent)
        for row in chain:
            at = len(self.coldest_first) if parent == ROOTLESS else self.coldest_first.index(parent)
            self.coldest_first.insert(at, row)
            self.parents[row] = parent
            parent = row

    @rule(data=st.data())
    def remove_all(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(range(self.rows + 2)), max_size=5))
        self.lru.removed(rows)
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
        assert list(self.lru.victims()) == self.coldest_first


def test_policy_agrees_with_a_list() -> None:
    run_state_machine_as_test(
        LruMachine, settings=hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
