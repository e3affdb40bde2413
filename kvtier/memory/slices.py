"""Allocator and leases for slices of a memory region.

Nothing here accesses the memory, blocks or is thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from sortedcontainers import SortedList

from kvtier.errors import ArenaError

PAGE_BYTES = 4096

_offset_of = attrgetter("offset")


class _Extent:
    """A leased run of bytes and the number of handles on it."""

    __slots__ = ("handles", "length", "offset")

    def __init__(self, offset: int, length: int) -> None:
        self.offset = offset
        self.length = length
        self.handles = 1


class Lease:
    """A reference to a slice of the arena. The slice is freed when its last lease is released."""

    __slots__ = ("_arena", "_extent", "_released", "length", "offset")

    def __init__(self, arena: Slices, extent: _Extent, length: int) -> None:
        self._arena = arena
        self._extent = extent
        self._released = False
        self.offset = extent.offset
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
        return self._extent.handles == 1

    def share(self) -> Lease:
        """Return another lease on the same bytes."""
        if self._released:
            raise ArenaError("a released lease cannot be shared")
        self._extent.handles += 1
        self._arena.leases += 1
        return Lease(self._arena, self._extent, self.length)

    def release(self) -> None:
        """Release the lease. Idempotent."""
        if self._released:
            return
        self._released = True
        self._arena.leases -= 1
        self._extent.handles -= 1
        if not self._extent.handles:
            self._arena.free(self._extent.offset, self._extent.length)


def _check_held(leases: Sequence[Lease]) -> None:
    if True in [lease._released for lease in leases]:
        raise ArenaError("a released lease cannot be shared")


class Leases:
    """Leases on several slices of one arena, created and released in one batch.

    Created with :meth:`of` and :meth:`sharing`.
    """

    __slots__ = ("_extents", "_leases", "offsets")

    def __init__(self, leases: Sequence[Lease]) -> None:
        self._leases = leases
        """The source leases, owned by other code."""
        self._extents: list[_Extent | None] = [lease._extent for lease in leases]
        self.offsets = [lease.offset for lease in leases]
        """The offset of each slice, released or not."""

    @classmethod
    def of(cls, leases: Sequence[Lease]) -> Leases:
        """Take over ``leases``, which become released. Raises :class:`ArenaError` if one already is."""
        _check_held(leases)
        for lease in leases:
            lease._released = True
        return cls(leases)

    @classmethod
    def sharing(cls, leases: Sequence[Lease]) -> Leases:
        """Return further leases on the same slices. Raises :class:`ArenaError` if one is released."""
        _check_held(leases)
        for lease in leases:
            lease._extent.handles += 1
        if leases:
            leases[0]._arena.leases += len(leases)
        return cls(leases)

    def __len__(self) -> int:
        return len(self._extents)

    def release(self, index: int) -> None:
        """Release one lease. Idempotent."""
        extent, self._extents[index] = self._extents[index], None
        if extent is not None:
            arena = self._leases[index]._arena
            arena.leases -= 1
            extent.handles -= 1
            if not extent.handles:
                arena.free(extent.offset, extent.length)

    def release_all(self) -> None:
        """Release all remaining leases. Idempotent."""
        extents = [extent for extent in self._extents if extent is not None]
        if not extents:
            return
        self._extents = [None] * len(self._extents)
        for extent in extents:
            extent.handles -= 1
        arena = self._leases[0]._arena
        arena.leases -= len(extents)
        arena.free_all([extent for extent in extents if not extent.handles])

    def split(self) -> list[Lease]:
        """Return the remaining leases as single ones. Afterwards this object holds none."""
        remaining = zip(self._leases, self._extents, strict=True)
        self._extents = [None] * len(self._extents)
        return [
            Lease(lease._arena, extent, lease.length) for lease, extent in remaining if extent is not None
        ]


class Slices:
    """Best-fit allocator of slices aligned to 4 KiB. Does not access the memory."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        """Leased bytes, in whole pages of 4 KiB."""
        self.leases = 0
        """Number of open leases."""
        self._free_by_size: SortedList[tuple[int, int]] = SortedList([(capacity, 0)])
        self._free_by_start: dict[int, int] = {0: capacity}
        self._free_by_stop: dict[int, int] = {capacity: 0}

    def view(self, offset: int, length: int) -> memoryview:
        """Return ``length`` bytes starting at ``offset``. Raises :class:`ArenaError` if not mapped."""
        raise ArenaError("this memory is not mapped into this process")

    def allocate(self, length: int) -> Lease | None:
        """Lease ``length`` bytes, best fit. Return ``None`` if no free run is large enough."""
        rounded = round_up(max(length, 1), PAGE_BYTES)
        at = self._free_by_size.bisect_left((rounded, 0))
        if at == len(self._free_by_size):
            return None
        size, offset = self._free_by_size[at]
        self._take_run(offset, size)
        if size > rounded:
            self._add_run(offset + rounded, size - rounded)
        self.used += rounded
        self.leases += 1
        return Lease(self, _Extent(offset, rounded), length)

    def allocate_all(self, length: int, count: int) -> list[Lease]:
        """Return up to ``count`` leases of ``length`` bytes, the same as repeated :meth:`allocate`."""
        rounded = round_up(max(length, 1), PAGE_BYTES)
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
            leases += [Lease(self, _Extent(start, rounded), length) for start in starts]
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

    def free_all(self, extents: Iterable[_Extent]) -> None:
        """Free many runs, merging adjacent ones first."""
        start = stop = 0
        for extent in sorted(extents, key=_offset_of):
            if extent.offset != stop:
                if stop > start:
                    self.free(start, stop - start)
                start = extent.offset
            stop = extent.offset + extent.length
        if stop > start:
            self.free(start, stop - start)

    def _add_run(self, offset: int, length: int) -> None:
        self._free_by_size.add((length, offset))
        self._free_by_start[offset] = length
        self._free_by_stop[offset + length] = offset

    def _take_run(self, offset: int, length: int) -> None:
        self._free_by_size.remove((length, offset))
        del self._free_by_start[offset], self._free_by_stop[offset + length]


def round_up(length: int, unit: int) -> int:
    """Round ``length`` up to a multiple of ``unit``."""
    return -(-length // unit) * unit
