"""Chunks that continue the same prefix are found by what they begin with."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.catalog.partial_matches import BranchIndex, PromptTags, block_tags_of
from kvtier.memory.keys import ChunkKey, block_hashes, equal_blocks
from kvtier.testing.backend import make_key

ROOT, OTHER = make_key(1000), make_key(1001)
BLOCK_TAGS = st.binary(min_size=1, max_size=4).map(lambda block_tags: bytes(tag % 3 for tag in block_tags))


class Known:
    """A branch index beside a plain list of its contents. Rows 0 and 1 are parents of others."""

    def __init__(self) -> None:
        self.parents = array("i", [-1] * 64)
        self.branches = BranchIndex(self.parents)
        self.held: dict[int, tuple[int | ChunkKey, bytes]] = {}

    def add(self, row: int, parent: int | ChunkKey, block_tags: bytes) -> None:
        self.remove(row)
        self.parents[row] = parent if isinstance(parent, int) else -1
        self.branches.add(row, ROOT if isinstance(parent, int) else parent, block_tags)
        self.held[row] = parent, block_tags

    def remove(self, row: int) -> None:
        self.branches.remove(row)
        self.held.pop(row, None)

    def most_shared(self, parent: int | ChunkKey, block_tags: bytes) -> int:
        return max(
            (shared(held, block_tags) for above, held in self.held.values() if above == parent), default=0
        )


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


@given(
    st.lists(
        st.tuples(st.integers(2, 12), st.sampled_from([0, 1, ROOT, OTHER]), st.one_of(st.none(), BLOCK_TAGS)),
        max_size=60,
    ),
    BLOCK_TAGS,
)
def test_best_shares_most_blocks(
    changes: list[tuple[int, int | ChunkKey, bytes | None]], block_tags: bytes
) -> None:
    known = Known()
    for row, parent, held in changes:
        if held is None:
            known.remove(row)
        else:
            known.add(row, parent, held)
    for parent in (0, 1, ROOT, OTHER):
        row, count = known.branches.best(parent, block_tags)
        assert count == known.most_shared(parent, block_tags)
        assert not count or shared(known.held[row][1], block_tags) == count
        assert not count or known.held[row][0] == parent


def test_nothing_is_kept_of_chunks_that_are_gone() -> None:
    known = Known()
    for row in range(2, 40):
        known.add(row, (0, ROOT)[row % 2], bytes([row]))
    for row in range(2, 40):
        known.remove(row)
    assert known.branches.best(0, b"\2") == (-1, 0)
    assert not known.branches._several
    assert not known.branches._roots


def test_a_parent_that_was_freed_has_no_children() -> None:
    known = Known()
    known.add(2, 0, b"ab")
    known.remove(2)
    known.add(2, 1, b"ab")
    assert known.branches.best(0, b"ab") == (-1, 0)
    assert known.branches.best(1, b"ab") == (2, 2)


@pytest.mark.parametrize("parent", [0, ROOT])
def test_longer_chunk_supersedes_the_beginning_of_it(parent: int | ChunkKey) -> None:
    known = Known()
    known.add(2, parent, b"ab")
    known.add(3, parent, b"abc")
    known.add(4, parent, b"abd")
    assert known.branches.superseded(3, equal=False) == [2]
    assert known.branches.superseded(2, equal=True) == []
    assert known.branches.is_superseded(2)
    assert not known.branches.is_superseded(3)
    assert not known.branches.is_superseded(63)
    known.add(5, parent, b"abc")
    assert known.branches.superseded(5, equal=True) == [2, 3]
    assert known.branches.superseded(3, equal=True) == [2, 5]
    assert not known.branches.is_superseded(5)


def test_block_tags_of_a_prompt_are_those_of_the_chunk_after_what_is_held() -> None:
    block_tags = PromptTags(ROOT, b"abcdefg", 3)
    keys = [make_key(1), make_key(2), make_key(3)]
    assert block_tags.after([]) == (ROOT, b"abc")
    assert block_tags.after(keys[:1]) == (keys[0], b"def")
    assert block_tags.after(keys[:2]) == (keys[1], b"g")
    assert block_tags.after(keys) == (keys[2], b"")


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 5))
def test_equal_block_hashes_are_equal_tokens(left: list[int], right: list[int], block: int) -> None:
    hashes, others = block_hashes(left, block), block_hashes(right, block)
    assert len(block_tags_of(hashes)) == len(left) // block
    assert equal_blocks(hashes, others) == shared(left, right) // block
