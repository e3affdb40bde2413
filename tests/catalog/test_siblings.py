"""Chunks that continue the same prefix are found by what they begin with."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.catalog.siblings import PromptMarks, Siblings, marks_of
from kvtier.memory.keys import ChunkKey, block_hashes, equal_blocks
from kvtier.testing.backend import make_key

ROOT, OTHER = make_key(1000), make_key(1001)
MARKS = st.binary(min_size=1, max_size=4).map(lambda marks: bytes(mark % 3 for mark in marks))


class Known:
    """Siblings beside a list of what is in them. Rows 0 and 1 are parents of others."""

    def __init__(self) -> None:
        self.parents = array("i", [-1] * 64)
        self.siblings = Siblings(self.parents)
        self.held: dict[int, tuple[int | ChunkKey, bytes]] = {}

    def add(self, row: int, parent: int | ChunkKey, marks: bytes) -> None:
        self.remove(row)
        self.parents[row] = parent if isinstance(parent, int) else -1
        self.siblings.add(row, ROOT if isinstance(parent, int) else parent, marks)
        self.held[row] = parent, marks

    def remove(self, row: int) -> None:
        self.siblings.remove(row)
        self.held.pop(row, None)

    def most_shared(self, parent: int | ChunkKey, marks: bytes) -> int:
        return max((shared(held, marks) for above, held in self.held.values() if above == parent), default=0)


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


@given(
    st.lists(
        st.tuples(st.integers(2, 12), st.sampled_from([0, 1, ROOT, OTHER]), st.one_of(st.none(), MARKS)),
        max_size=60,
    ),
    MARKS,
)
def test_best_shares_most_blocks(
    changes: list[tuple[int, int | ChunkKey, bytes | None]], marks: bytes
) -> None:
    known = Known()
    for row, parent, held in changes:
        if held is None:
            known.remove(row)
        else:
            known.add(row, parent, held)
    for parent in (0, 1, ROOT, OTHER):
        row, count = known.siblings.best(parent, marks)
        assert count == known.most_shared(parent, marks)
        assert not count or shared(known.held[row][1], marks) == count
        assert not count or known.held[row][0] == parent


def test_nothing_is_kept_of_chunks_that_are_gone() -> None:
    known = Known()
    for row in range(2, 40):
        known.add(row, (0, ROOT)[row % 2], bytes([row]))
    for row in range(2, 40):
        known.remove(row)
    assert known.siblings.best(0, b"\2") == (-1, 0)
    assert not known.siblings._several
    assert not known.siblings._roots


def test_a_parent_that_was_freed_has_no_children() -> None:
    known = Known()
    known.add(2, 0, b"ab")
    known.remove(2)
    known.add(2, 1, b"ab")
    assert known.siblings.best(0, b"ab") == (-1, 0)
    assert known.siblings.best(1, b"ab") == (2, 2)


@pytest.mark.parametrize("parent", [0, ROOT])
def test_longer_chunk_supersedes_the_beginning_of_it(parent: int | ChunkKey) -> None:
    known = Known()
    known.add(2, parent, b"ab")
    known.add(3, parent, b"abc")
    known.add(4, parent, b"abd")
    assert known.siblings.superseded(3, equal=False) == [2]
    assert known.siblings.superseded(2, equal=True) == []
    assert known.siblings.is_superseded(2)
    assert not known.siblings.is_superseded(3)
    assert not known.siblings.is_superseded(63)
    known.add(5, parent, b"abc")
    assert known.siblings.superseded(5, equal=True) == [2, 3]
    assert known.siblings.superseded(3, equal=True) == [2, 5]
    assert not known.siblings.is_superseded(5)


def test_marks_of_a_prompt_are_those_of_the_chunk_after_what_is_held() -> None:
    marks = PromptMarks(ROOT, b"abcdefg", 3)
    keys = [make_key(1), make_key(2), make_key(3)]
    assert marks.after([]) == (ROOT, b"abc")
    assert marks.after(keys[:1]) == (keys[0], b"def")
    assert marks.after(keys[:2]) == (keys[1], b"g")
    assert marks.after(keys) == (keys[2], b"")


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 5))
def test_equal_block_hashes_are_equal_tokens(left: list[int], right: list[int], block: int) -> None:
    hashes, others = block_hashes(left, block), block_hashes(right, block)
    assert len(marks_of(hashes)) == len(left) // block
    assert equal_blocks(hashes, others) == shared(left, right) // block
