"""Numbers and keys of the chunks of a trace: the same from the native core as from Python."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.catalog.sampling import POLICY_SAMPLE, SAMPLED
from kvtier.lab.simulation.trace import chunk_keys, number_chunks
from kvtier.memory.keys import KEY_BYTES
from tests.lab.simulation.making import trace_of
from tests.rigs.cores import with_each_core

NUMBERS = range(1 << 14)
SMALL, LARGE = st.integers(0, 40), st.integers(0, 2**64 - 1) | st.integers(2**32 - 2, 2**32 + 2)


def columns(prompts: list[list[int]]) -> tuple[array[int], array[int]]:
    ids, ends = array("Q"), array("Q")
    for prompt in prompts:
        ids.extend(prompt)
        ends.append(len(ids))
    return ids, ends


@given(st.lists(st.lists(SMALL, max_size=9), max_size=12) | st.lists(st.lists(SMALL | LARGE, max_size=9)))
def test_native_numbers_equal_those_of_python(prompts: list[list[int]]) -> None:
    def compute() -> tuple[array[int], int, int, array[int]]:
        ids, ends = columns([[1], *prompts])
        return *number_chunks(ids, ends), ends

    fast, slow = with_each_core(compute)
    assert fast == slow
    chunks, numbers, unique, ends = fast
    assert max(chunks) < numbers
    assert (len(set(chunks)), len(chunks)) == (unique, ends[-1])


@pytest.mark.usefixtures("implementation")
def test_chunks_left_out_do_not_count_for_the_limit() -> None:
    ids, ends = columns([[15, 3, 3, 3]])
    assert number_chunks(ids, ends) == (array("I", [0, 1]), 2, 2)
    ids, ends = columns([[15, 3, 4], [3]])
    assert number_chunks(ids, ends) == (array("I", [15, 3, 4, 3]), 16, 3)


def test_repeated_chunks_of_a_prompt_are_left_out() -> None:
    trace = trace_of([1, 2, 2, 2], [5])
    assert (trace.repeated, list(trace.ends), trace.unique) == (2, [2, 3], 3)
    assert list(trace_of([4, 5, 4, 6, 5]).chunks) == [4, 5, 6]


# Keys: as good as the digests of a cache, because policies take parts of them as hashes.


def test_keys_are_distinct_and_the_same_each_time() -> None:
    keys = chunk_keys(NUMBERS)
    assert len(set(keys)) == len(NUMBERS)
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert chunk_keys(NUMBERS[5:9]) == keys[5:9]
    assert chunk_keys([]) == []


def test_keys_are_the_same_without_the_native_core() -> None:
    fast, slow = with_each_core(lambda: chunk_keys(NUMBERS[:99]))
    assert fast == slow


def test_each_part_that_serves_as_a_hash_varies() -> None:
    """Ghosts take the lower and the upper half of 64 bits: nearly all of them are different."""
    keys = chunk_keys(NUMBERS)
    for start, stop, distinct in ((0, 1, 256), (0, 4, len(NUMBERS) - 5), (4, 8, len(NUMBERS) - 5)):
        assert len({key[start:stop] for key in keys}) >= distinct


def test_samples_have_their_part_of_consecutive_chunks() -> None:
    """A prompt's chunks are numbered one after the other: none must be sampled whole, or not at all."""
    chosen = POLICY_SAMPLE.of(chunk_keys(NUMBERS), SAMPLED // 4)
    for start in range(0, len(NUMBERS), 512):
        assert 70 < sum(chosen[start : start + 512]) < 190
