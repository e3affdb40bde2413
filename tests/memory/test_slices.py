"""The slice allocator: leases never overlap, and all memory is returned."""

from __future__ import annotations

import itertools
from array import array

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import ArenaError
from kvtier.memory.arena import Arena
from kvtier.memory.slices import PAGE_BYTES, Lease, Leases

from .conftest import allocate

either_core = pytest.mark.usefixtures("implementation")


def sharing(arena: Arena, leases: list[Lease]) -> Leases:
    """Return further leases on slices, as of rows in the opposite order."""
    places = array("i", [0, *(lease.number + 1 for lease in reversed(leases))])
    return Leases.sharing(arena, places, range(len(leases), 0, -1))


def test_new_arena_is_one_free_run() -> None:
    arena = Arena.create(PAGE_BYTES + 1)
    assert (arena.capacity, arena.page_bytes) == (2 * PAGE_BYTES, PAGE_BYTES)
    assert (arena.used, arena.leases, len(arena._free_by_start)) == (0, 0, 1)
    arena.close()


def test_released_lease_has_no_view_and_cannot_be_shared(arena: Arena) -> None:
    lease = allocate(arena, 1)
    lease.release()
    with pytest.raises(ArenaError, match="released"):
        _ = lease.view
    with pytest.raises(ArenaError, match="released"):
        lease.share()
    assert arena.leases == 0


@either_core
def test_batch_counts_as_separate_leases(arena: Arena) -> None:
    own = [allocate(arena, pages) for pages in (1, 2, 3)]
    used = arena.used
    together = sharing(arena, own)
    assert (len(together), together.offsets) == (3, [lease.offset for lease in own])
    assert arena.leases == 6
    assert not any(lease.is_exclusive for lease in own)
    together.release(1)
    together.release(1)
    assert [lease.is_exclusive for lease in own] == [False, True, False]
    together.release_all()
    together.release_all()
    assert all(lease.is_exclusive for lease in own)
    assert (arena.leases, arena.used) == (3, used)


@either_core
def test_memory_is_freed_with_the_last_lease_of_a_batch(arena: Arena) -> None:
    own = [allocate(arena, 1) for _ in range(16)]
    together = sharing(arena, own)
    for lease in own:
        lease.release()
    assert arena.used == 16 * PAGE_BYTES
    for index in (3, 9):
        together.release(index)
    assert (len(arena._free_by_start), arena.used) == (2, 14 * PAGE_BYTES)
    together.release_all()
    assert (len(arena._free_by_start), arena.used, arena.leases) == (1, 0, 0)


@either_core
def test_batch_is_split_into_leases(arena: Arena) -> None:
    together = Leases.of([allocate(arena, 1), allocate(arena, 2), allocate(arena, 3)])
    together.release(0)
    second, third = together.split()
    together.release_all()
    assert (second.length, third.length) == (2 * PAGE_BYTES, 3 * PAGE_BYTES)
    assert third.is_exclusive
    second.release()
    third.release()
    assert (arena.used, arena.leases) == (0, 0)


@either_core
def test_leases_moved_into_a_batch_are_released(arena: Arena) -> None:
    own = [allocate(arena, 1), allocate(arena, 1)]
    together = Leases.of(own)
    for lease in own:
        lease.release()
    assert arena.leases == 2
    with pytest.raises(ArenaError, match="released"):
        Leases.of(own)
    together.release_all()
    assert arena.leases == 0


@either_core
def test_batch_ends_before_a_row_without_a_slice(arena: Arena) -> None:
    own = allocate(arena, 1)
    for missing in (1, 2):
        together = Leases.sharing(arena, array("i", [own.number + 1, 0]), [0, missing, 0])
        assert (len(together), together.offsets, arena.leases) == (1, [own.offset], 2)
        together.release_all()
    own.release()


@either_core
def test_slice_without_a_lease_is_not_shared(arena: Arena) -> None:
    own, freed = allocate(arena, 1), allocate(arena, 1)
    freed.release()
    with pytest.raises(IndexError):
        sharing(arena, [own, freed])
    assert (arena.leases, own.is_exclusive) == (1, True)
    own.release()
    assert (arena.leases, arena.used) == (0, 0)


@either_core
def test_number_of_a_freed_slice_is_used_again(arena: Arena) -> None:
    first = allocate(arena, 1)
    first.release()
    second = allocate(arena, 2)
    assert (second.number, second.length) == (first.number, 2 * PAGE_BYTES)
    first.release()
    assert second.is_exclusive
    second.release()
    assert arena.used == 0


@either_core
def test_empty_batch_holds_nothing(arena: Arena) -> None:
    for together in (Leases.of([]), sharing(arena, [])):
        together.release_all()
        assert (len(together), together.offsets, together.split()) == (0, [], [])


# Comparison with a model.


class ArenaMachine(RuleBasedStateMachine):
    """The model is a list of handles and, for each slice, its length and fill byte."""

    pages = 24

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena.create(self.pages * PAGE_BYTES)
        self.handles: list[Lease] = []
        self.slices: dict[int, tuple[int, int]] = {}
        """Offset → allocated bytes, fill byte."""
        self.fills = itertools.cycle(range(1, 256))

    def gaps(self) -> list[tuple[int, int]]:
        """Return the free runs as (length, offset)."""
        gaps, stop = [], 0
        for offset, (length, _) in [*sorted(self.slices.items()), (self.arena.capacity, (0, 0))]:
            assert offset >= stop, "two slices overlap"
            if offset > stop:
                gaps.append((offset - stop, stop))
            stop = offset + length
        return gaps

    @rule(length=st.integers(1, 8 * PAGE_BYTES) | st.integers(1, 8).map(PAGE_BYTES.__mul__))
    def allocate(self, length: int) -> None:
        allocated = -(-length // PAGE_BYTES) * PAGE_BYTES
        fitting = sorted(gap for gap in self.gaps() if gap[0] >= allocated)
        lease = self.arena.allocate(length)
        if not fitting:
            assert lease is None
            return
        assert lease is not None
        assert (lease.offset, lease.length) == (fitting[0][1], length)
        fill = next(self.fills)
        lease.view[:] = bytes([fill]) * length
        self.handles.append(lease)
        self.slices[lease.offset] = allocated, fill

    @rule(length=st.integers(1, 3 * PAGE_BYTES), count=st.integers(0, 6))
    def allocate_all(self, length: int, count: int) -> None:
        allocated = -(-length // PAGE_BYTES) * PAGE_BYTES
        leases = self.arena.allocate_all(length, count)
        for lease in leases:
            fitting = sorted(gap for gap in self.gaps() if gap[0] >= allocated)
            assert (lease.offset, lease.length) == (fitting[0][1], length)
            fill = next(self.fills)
            lease.view[:] = bytes([fill]) * length
            self.handles.append(lease)
            self.slices[lease.offset] = allocated, fill
        if len(leases) < count:
            assert all(gap < allocated for gap, _ in self.gaps())

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        self.handles.append(data.draw(st.sampled_from(self.handles)).share())

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), times=st.integers(1, 2))
    def release(self, data: st.DataObject, times: int) -> None:
        lease = self.handles.pop(data.draw(st.integers(0, len(self.handles) - 1)))
        _, fill = self.slices[lease.offset]
        assert bytes(lease.view) == bytes([fill]) * lease.length
        for _ in range(times):
            lease.release()
        if all(other.offset != lease.offset for other in self.handles):
            del self.slices[lease.offset]

    @invariant()
    def agrees(self) -> None:
        assert self.arena.used == sum(length for length, _ in self.slices.values())
        assert self.arena.leases == len(self.handles)
        assert len(self.arena._free_by_start) == len(self.gaps())
        for lease in self.handles:
            others = sum(other.offset == lease.offset for other in self.handles)
            assert lease.is_exclusive == (others == 1)

    def teardown(self) -> None:
        for lease in self.handles:
            lease.release()
        assert (self.arena.used, self.arena.leases, len(self.arena._free_by_start)) == (0, 0, 1)
        self.arena.close()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = hypothesis_settings(max_examples=60, stateful_step_count=50, deadline=None)
