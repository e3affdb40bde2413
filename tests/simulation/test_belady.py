"""Belady's optimum: no other choice of chunks has more hits."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.simulation.belady import belady_hits, next_uses
from tests.simulation.making import trace_of

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


def test_next_uses() -> None:
    trace = trace_of([1, 2], [3], [2, 3])
    assert list(next_uses(trace)) == [3, 2, 2, 3, 3]


def test_enough_capacity_hits_whatever_was_there() -> None:
    trace = trace_of([1, 2], [1, 3], [3, 2])
    assert belady_hits(trace, 3, next_uses(trace)) == 3
