"""The slice allocator: leases never overlap, and all memory is returned."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import ArenaError
from kvtier.memory.arena import Arena
from kvtier.memory.slices import PAGE_BYTES, Lease, Leases
from tests.memory.leases import allocate


@pytest.mark.parametrize(("requested", "pages"), [(1, 1), (4095, 1), (4096, 1), (4097, 2), (12288, 3)])
def test_lease_is_whole_pages_and_its_view_has_the_requested_length(
    arena: Arena, requested: int, pages: int
) -> None:
    first, second = arena.allocate(requested), arena.allocate(1)
    assert first is not None
    assert second is not None
    assert (first.offset, first.length, len(first.view)) == (0, requested, requested)
    assert second.offset == pages * PAGE_BYTES
    assert arena.used == (pages + 1) * PAGE_BYTES


def test_new_arena_is_one_free_run() -> None:
    arena = Arena.create(PAGE_BYTES + 1)
    assert (arena.capacity, arena.page_bytes) == (2 * PAGE_BYTES, PAGE_BYTES)
    assert (arena.used, arena.leases, arena.fragments) == (0, 0, 1)
    arena.close()


def test_allocation_is_best_fit(arena: Arena) -> None:
    runs = [allocate(arena, pages) for pages in (4, 1, 2, 1, 3, 1)]
    holes = {run.length // PAGE_BYTES: run.offset for run in runs[::2]}
    for run in runs[::2]:
        run.release()
    assert allocate(arena, 2).offset == holes[2]
    assert allocate(arena, 3).offset == holes[3]
    assert allocate(arena, 1).offset == holes[4]


def test_separate_holes_are_not_combined(arena: Arena) -> None:
    runs = [allocate(arena, 1) for _ in range(16)]
    for run in runs[::2]:
        run.release()
    assert arena.capacity - arena.used == 8 * PAGE_BYTES
    assert arena.allocate(2 * PAGE_BYTES) is None
    runs[1].release()
    assert allocate(arena, 3).offset == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_freed_runs_are_merged_in_any_order(arena: Arena, order: tuple[int, ...]) -> None:
    runs = [allocate(arena, 4) for _ in range(4)]
    assert arena.fragments == 0
    assert arena.allocate(1) is None
    for index in order:
        runs[index].release()
    assert (arena.fragments, arena.used, arena.leases) == (1, 0, 0)
    assert allocate(arena, 16).offset == 0


def test_memory_is_freed_with_the_last_handle(arena: Arena) -> None:
    lease = allocate(arena, 16)
    shared = lease.share()
    again = shared.share()
    assert (arena.leases, arena.used, lease.is_exclusive) == (3, arena.capacity, False)
    lease.release()
    shared.release()
    assert (arena.leases, arena.used, again.is_exclusive) == (1, arena.capacity, True)
    assert arena.allocate(1) is None
    again.release()
    assert (arena.leases, arena.used) == (0, 0)


def test_releasing_a_handle_twice_frees_once(arena: Arena) -> None:
    lease = allocate(arena, 1)
    shared = lease.share()
    lease.release()
    lease.release()
    assert (arena.leases, arena.used) == (1, PAGE_BYTES)
    shared.release()
    reallocated = allocate(arena, 1)
    shared.release()
    lease.release()
    assert (arena.leases, arena.used, reallocated.offset) == (1, PAGE_BYTES, 0)


def test_released_lease_has_no_view_and_cannot_be_shared(arena: Arena) -> None:
    lease = allocate(arena, 1)
    lease.release()
    with pytest.raises(ArenaError, match="released"):
        _ = lease.view
    with pytest.raises(ArenaError, match="released"):
        lease.share()
    assert arena.leases == 0


def test_batch_counts_as_separate_leases(arena: Arena) -> None:
    own = [allocate(arena, pages) for pages in (1, 2, 3)]
    used = arena.used
    together = Leases.sharing(own)
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


def test_memory_is_freed_with_the_last_lease_of_a_batch(arena: Arena) -> None:
    own = [allocate(arena, 1) for _ in range(16)]
    together = Leases.sharing(own)
    for lease in own:
        lease.release()
    assert arena.used == 16 * PAGE_BYTES
    for index in (3, 9):
        together.release(index)
    assert (arena.fragments, arena.used) == (2, 14 * PAGE_BYTES)
    together.release_all()
    assert (arena.fragments, arena.used, arena.leases) == (1, 0, 0)


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


def test_leases_moved_into_a_batch_are_released(arena: Arena) -> None:
    own = [allocate(arena, 1), allocate(arena, 1)]
    together = Leases.of(own)
    for lease in own:
        lease.release()
    assert arena.leases == 2
    for make in (Leases.of, Leases.sharing):
        with pytest.raises(ArenaError, match="released"):
            make(own)
    together.release_all()
    assert arena.leases == 0


def test_empty_batch_holds_nothing() -> None:
    for make in (Leases.of, Leases.sharing):
        together = make([])
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
        assert self.arena.fragments == len(self.gaps())
        for lease in self.handles:
            others = sum(other.offset == lease.offset for other in self.handles)
            assert lease.is_exclusive == (others == 1)

    def teardown(self) -> None:
        for lease in self.handles:
            lease.release()
        assert (self.arena.used, self.arena.leases, self.arena.fragments) == (0, 0, 1)
        self.arena.close()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = hypothesis_settings(max_examples=60, stateful_step_count=50, deadline=None)
