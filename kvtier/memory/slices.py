"""Allocator and leases for slices of a memory region.

Nothing here accesses the memory, blocks or is thread-safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import takewhile

from sortedcontainers import SortedList

from kvtier import native
from kvtier.errors import ArenaError

PAGE_BYTES = 4096

_RELEASED = -1


class Lease:
    """A reference to a slice of the arena. The slice is freed when its last lease is released."""

    __slots__ = ("_arena", "_released", "length", "number", "offset")

    def __init__(self, arena: Slices, number: int, offset: int, length: int) -> None:
        """Takes over a handle on the slice."""
        self._arena = arena
        self._released = False
        self.number = number
        """Identifies the slice in its arena, until it is freed."""
        self.offset = offset
        """Where the slice begins in the arena, in bytes."""
        self.length = length
        """Bytes as requested, without padding."""

    @property
    def view(self) -> memoryview:
        """The bytes of the slice, with the requested length. Valid until the lease is released."""
        if self._released:
            raise ArenaError("the lease is released")
        return self._arena.view(self.offset, self.length)

    @property
    def is_exclusive(self) -> bool:
        """Whether this is the only handle on the slice."""
        return not self._released and self._arena.handles[self.number] == 1

    def share(self) -> Lease:
        """Return another lease on the same bytes."""
        if self._released:
            raise ArenaError("a released lease cannot be shared")
        self._arena.handles[self.number] += 1
        self._arena.leases += 1
        return Lease(self._arena, self.number, self.offset, self.length)

    def release(self) -> None:
        """Release the lease. Idempotent."""
        if self._released:
            return
        self._released = True
        self._arena.release((self.number,))


class Leases:
    """Leases on several slices of one arena, created and released in one batch.

    Created with :meth:`of` and :meth:`sharing`.
    """

    __slots__ = ("_arena", "_numbers", "offsets")

    def __init__(self, arena: Slices | None, numbers: list[int], offsets: list[int]) -> None:
        self._arena = arena
        """``None`` without slices."""
        self._numbers = numbers
        """Those of the slices, or :data:`_RELEASED`."""
        self.offsets = offsets
        """The offset of each slice, released or not."""

    @classmethod
    def of(cls, leases: Sequence[Lease]) -> Leases:
        """Take over ``leases``, which become released. Raises :class:`ArenaError` if one already is."""
        if True in [lease._released for lease in leases]:
            raise ArenaError("a released lease cannot be shared")
        for lease in leases:
            lease._released = True
        arena = leases[0]._arena if leases else None
        return cls(arena, [lease.number for lease in leases], [lease.offset for lease in leases])

    @classmethod
    def sharing(cls, arena: Slices, places: array[int], rows: Sequence[int]) -> Leases:
        """Return further leases on slices, up to the first row without one. 20 ns for each.

        ``places``: by row, the number of a slice plus 1, or 0. Raises ``IndexError``, and changes nothing, if
        there is no lease on a slice.
        """
        if native.available():
            numbers, offsets = native.core.share_slices(places, arena.handles, arena.offsets, rows)
        else:
            known = takewhile(bool, (places[row] if row < len(places) else 0 for row in rows))
            numbers = [place - 1 for place in known]
            offsets = [arena.offsets[number] for number in numbers]
            if not all(arena.handles[number] for number in numbers):
                raise IndexError("a slice has no handle")
            for number in numbers:
                arena.handles[number] += 1
        arena.leases += len(numbers)
        return cls(arena, numbers, offsets)

    def __len__(self) -> int:
        return len(self._numbers)

    def release(self, index: int) -> None:
        """Release one lease. Idempotent."""
        number, self._numbers[index] = self._numbers[index], _RELEASED
        if number != _RELEASED and self._arena is not None:
            self._arena.release((number,))

    def release_all(self) -> None:
        """Release all remaining leases. Idempotent."""
        remaining = self._take_all()
        if self._arena is not None:
            self._arena.release(remaining)

    def split(self) -> list[Lease]:
        """Return the remaining leases as single ones. Afterwards this object holds none."""
        arena = self._arena
        if arena is None:
            return []
        offsets, lengths = arena.offsets, arena.lengths
        return [Lease(arena, number, offsets[number], lengths[number]) for number in self._take_all()]

    def _take_all(self) -> list[int]:
        numbers, self._numbers = self._numbers, [_RELEASED] * len(self._numbers)
        return [number for number in numbers if number != _RELEASED] if _RELEASED in numbers else numbers


class Slices:
    """Best-fit allocator of slices aligned to 4 KiB. Does not access the memory."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        """Leased bytes, in whole pages of 4 KiB."""
        self.leases = 0
        """Number of open leases."""
        self.handles = array("i")
        """By the number of each slice: how many leases there are on it. 0 for a vacant number."""
        self.offsets = array("Q")
        self.lengths = array("Q")
        """In bytes, as requested."""
        self._vacant: list[int] = []
        self._free_by_size: SortedList[tuple[int, int]] = SortedList([(capacity, 0)])
        self._free_by_start: dict[int, int] = {0: capacity}
        self._free_by_stop: dict[int, int] = {capacity: 0}

    def view(self, offset: int, length: int) -> memoryview:
        """Return ``length`` bytes starting at ``offset``. Raises :class:`ArenaError` if not mapped."""
        raise ArenaError("this memory is not mapped into this process")

    def allocate(self, length: int) -> Lease | None:
        """Lease ``length`` bytes, best fit. Return ``None`` if no free run is large enough."""
        return next(iter(self.allocate_all(length, 1)), None)

    def allocate_all(self, length: int, count: int) -> list[Lease]:
        """Return up to ``count`` leases of ``length`` bytes, the same as repeated :meth:`allocate`."""
        rounded = _padded(length)
        leases: list[Lease] = []
        while len(leases) < count:
            at = self._free_by_size.bisect_left((rounded, 0))
            if at == len(self._free_by_size):
                break
            # The rest of the smallest sufficient run remains the smallest, until it is too small.
            size, offset = self._free_by_size[at]
            taken = min(count - len(leases), size // rounded) * rounded
            self._take_run(offset, size)
            if size > taken:
                self._add_run(offset + taken, size - taken)
            starts = range(offset, offset + taken, rounded)
            numbers = self._new(starts, length)
            new = zip(numbers, starts, strict=True)
            leases += [Lease(self, number, start, length) for number, start in new]
        self.used += len(leases) * rounded
        self.leases += len(leases)
        return leases

    def free(self, offset: int, length: int) -> None:
        """Free a run, and merge it with adjacent free runs."""
        self.used -= length
        before = self._free_by_stop.get(offset)
        if before is not None:
            self._take_run(before, offset - before)
            length += offset - before
            offset = before
        after = self._free_by_start.get(offset + length)
        if after is not None:
            self._take_run(offset + length, after)
            length += after
        self._add_run(offset, length)

    def release(self, numbers: Sequence[int]) -> None:
        """Take a handle from each slice, and free those without any other, merging adjacent ones first."""
        handles = self.handles
        if native.available() and len(numbers) > 1:
            free = native.core.release_slices(handles, numbers)
        else:
            free = []
            for number in numbers:
                handles[number] -= 1
                if not handles[number]:
                    free.append(number)
        self.leases -= len(numbers)
        start = stop = 0
        offsets, lengths = self.offsets, self.lengths
        for offset, length in sorted([(offsets[number], lengths[number]) for number in free]):
            if offset != stop:
                if stop > start:
                    self.free(start, stop - start)
                start = offset
            stop = offset + _padded(length)
        if stop > start:
            self.free(start, stop - start)
        self._vacant += free

    def _new(self, starts: Sequence[int], length: int) -> list[int]:
        """Return the numbers of new slices of one length, each with one handle."""
        numbers = self._vacant[-len(starts) :]
        del self._vacant[-len(starts) :]
        for number, start in zip(numbers, starts, strict=False):
            self.handles[number], self.offsets[number], self.lengths[number] = 1, start, length
        if more := starts[len(numbers) :]:
            known = len(self.handles)
            numbers += range(known, known + len(more))
            self.handles.extend([1] * len(more))
            self.offsets.extend(more)
            self.lengths.extend([length] * len(more))
        return numbers

    def _add_run(self, offset: int, length: int) -> None:
        self._free_by_size.add((length, offset))
        self._free_by_start[offset] = length
        self._free_by_stop[offset + length] = offset

    def _take_run(self, offset: int, length: int) -> None:
        self._free_by_size.remove((length, offset))
        del self._free_by_start[offset], self._free_by_stop[offset + length]


def _padded(length: int) -> int:
    return round_up(max(length, 1), PAGE_BYTES)


def round_up(length: int, unit: int) -> int:
    """Round ``length`` up to a multiple of ``unit``."""
    return -(-length // unit) * unit
