"""Belady's optimum: no other choice of chunks has more hits."""

from __future__ import annotations

from array import array
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.lab.simulation.belady import REPORT_REQUESTS, belady_hits, next_uses
from tests.lab.simulation.making import trace_of
from tests.rigs.cores import with_each_core

PROMPTS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=7)


def most_hits(prompts: list[list[int]], capacity: int) -> int:
    """Return the most hits of all possible choices, by trying them all."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for prompt in prompts:
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            total = hits + len(held.intersection(prompt))
            known = held.union(prompt)
            for kept in combinations(known, min(capacity, len(known))):
                after[frozenset(kept)] = max(total, after.get(frozenset(kept), 0))
        best = after
    return max(best.values())


@given(PROMPTS, st.integers(0, 5))
def test_it_is_the_best_of_all_choices(prompts: list[list[int]], capacity: int) -> None:
    trace = trace_of(*prompts)
    assert belady_hits(trace, capacity, next_uses(trace)) == most_hits(prompts, capacity)


def test_next_use_is_the_request_that_asks_for_the_chunk_again() -> None:
    trace = trace_of([1, 2], [3], [2, 3])
    assert list(next_uses(trace)) == [3, 2, 2, 3, 3]


def test_enough_capacity_hits_whatever_was_there() -> None:
    trace = trace_of([1, 2], [1, 3], [3, 2])
    assert belady_hits(trace, 3, next_uses(trace)) == 3


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=9), min_size=1, max_size=30),
    st.integers(0, 30),
    st.randoms(),
)
def test_native_optimum_equals_the_python_one(
    prompts: list[list[int]], capacity: int, chance: Random
) -> None:
    trace = trace_of([0], *prompts)
    trace.order = array("I", chance.sample(range(len(trace)), len(trace)))

    def compute() -> tuple[array[int], int]:
        uses = next_uses(trace)
        return uses, belady_hits(trace, capacity, uses)

    fast, slow = with_each_core(compute)
    assert fast == slow


@pytest.mark.usefixtures("implementation")
def test_progress_is_reported() -> None:
    trace = trace_of(*([turn % 2] for turn in range(2 * REPORT_REQUESTS + 1)))
    steps: list[int] = []
    assert belady_hits(trace, 1, next_uses(trace), steps.append) == REPORT_REQUESTS
    assert steps == [REPORT_REQUESTS] * 2
