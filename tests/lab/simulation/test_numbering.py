"""Numbers of chunks: the same from the native core as from Python."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import native
from kvtier.lab.simulation.trace import number_chunks
from tests.lab.simulation.making import trace_of

SMALL, LARGE = st.integers(0, 40), st.integers(0, 2**64 - 1) | st.integers(2**32 - 2, 2**32 + 2)


def columns(prompts: list[list[int]]) -> tuple[array[int], array[int]]:
    ids, ends = array("Q"), array("Q")
    for prompt in prompts:
        ids.extend(prompt)
        ends.append(len(ids))
    return ids, ends


@given(st.lists(st.lists(SMALL, max_size=9), max_size=12) | st.lists(st.lists(SMALL | LARGE, max_size=9)))
def test_native_numbers_equal_those_of_python(prompts: list[list[int]]) -> None:
    results = []
    for available in (native.available(), False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "available", lambda now=available: now)
            ids, ends = columns([[1], *prompts])
            results.append((*number_chunks(ids, ends), ends))
    assert results[0] == results[1]
    chunks, numbers, unique, ends = results[0]
    assert max(chunks) < numbers
    assert (len(set(chunks)), len(chunks)) == (unique, ends[-1])


@pytest.mark.parametrize("available", [True, False], ids=["native", "python"])
def test_chunks_left_out_do_not_count_for_the_limit(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not available:
        monkeypatch.setattr(native, "available", lambda: False)
    ids, ends = columns([[15, 3, 3, 3]])
    assert number_chunks(ids, ends) == (array("I", [0, 1]), 2, 2)
    ids, ends = columns([[15, 3, 4], [3]])
    assert number_chunks(ids, ends) == (array("I", [15, 3, 4, 3]), 16, 3)


def test_length_of_chunks_is_that_of_whole_prompts() -> None:
    trace = trace_of([1, 2, 2, 2], [5])
    assert (trace.repeated, list(trace.ends), trace.unique) == (2, [2, 3], 3)
