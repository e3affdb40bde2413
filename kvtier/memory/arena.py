"""Shared memory region whose slices are leased.

The cache process creates the :class:`Arena` and owns the allocation; engines map the same memory with
:class:`ArenaMap`. The region is a memfd: it has no name, the bridge passes its descriptor to engines, and the
kernel frees it however the processes end. Its size is sealed, so that no holder of the descriptor can
truncate it. Normal pages are allocated shortly before first use, as 2 MiB pages if available
(docs/native.md); huge pages are reserved at creation. Nothing here blocks, except as noted, and nothing is
thread-safe; copies to and from leased slices may run in any thread.

memfd_create(2), fcntl(2), https://docs.kernel.org/admin-guide/mm/hugetlbpage.html
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import re
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import ArenaError
from kvtier.memory import large_pages
from kvtier.memory.large_pages import LARGE_PAGE_BYTES, LargePages
from kvtier.memory.large_pages_process import fill, map_shared, reserve_addresses, unmap
from kvtier.memory.slices import PAGE_BYTES, Lease, Leases, Slices, round_up

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("kvtier")

HUGE_PAGE_BYTES = LARGE_PAGE_BYTES
MIN_PREPARED_BYTES = 64 << 20
"""A smaller arena allocates all of its memory at creation instead of starting a process for it."""

OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HUGE_PAGE_COUNTS = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_MEMINFO = Path("/proc/meminfo")


def address_of(view: memoryview) -> int:
    """Return the address of a writable view. Does not keep a reference."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def has_strict_overcommit() -> bool:
    """Whether touching a page beyond the commit limit kills the process (SIGBUS)."""
    try:
        return OVERCOMMIT.read_text().strip() == "2"
    except OSError:
        return False


class _Mapping:
    """A memfd mapped into this process."""

    def __init__(self, fd: int, capacity: int) -> None:
        self.fd = fd
        self.capacity = capacity
        self._bytes = _map_shared(fd, capacity)

    def view(self, offset: int, length: int) -> memoryview:
        """Return ``length`` bytes starting at ``offset``."""
        return self._bytes[offset : offset + length]

    def close(self) -> None:
        """Unmap the memory, at the latest with the last view of it. Idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._bytes.release()


class Arena(_Mapping, Slices):
    """Shared memory that is leased in slices."""

    def __init__(self, fd: int, capacity: int, page_bytes: int) -> None:
        Slices.__init__(self, capacity)
        _Mapping.__init__(self, fd, capacity)
        self.page_bytes = page_bytes
        self.large_pages: LargePages | None = None
        """Prepares the memory that is leased next; ``None`` if that is too little, or of huge pages."""
        if page_bytes == PAGE_BYTES and capacity >= MIN_PREPARED_BYTES:
            self.large_pages = LargePages(fd, capacity)
        elif page_bytes == PAGE_BYTES:
            fill(fd, 0, capacity)
        self._strict = has_strict_overcommit()
        self._peak = 0

    def allocate_all(self, length: int, count: int) -> list[Lease]:
        """See :meth:`Slices.allocate_all`."""
        leases = super().allocate_all(length, count)
        if leases and not self._commit(max(lease.offset for lease in leases) + length):
            Leases.of(leases).release_all()
            return []
        return leases

    def close(self) -> None:
        """See :meth:`_Mapping.close`."""
        if self.large_pages is not None:
            self.large_pages.close()
            self.large_pages = None
        super().close()

    @property
    def large_page_bytes(self) -> int:
        """Bytes that are backed by 2 MiB pages so far."""
        if self.page_bytes == HUGE_PAGE_BYTES:
            return self.capacity
        return self.large_pages.large_bytes if self.large_pages is not None else 0

    def settle(self) -> None:
        """Block until the leased memory, and the memory leased next, is prepared. For benchmarks."""
        if self.large_pages is not None:
            self.large_pages.settle()
            large_pages.prepare_all(self.fd, self._peak)

    def _commit(self, stop: int) -> bool:
        """Record that memory is in use up to ``stop``. Return whether the system can provide it."""
        if stop <= self._peak:
            return True
        if self._strict:
            try:
                os.posix_fallocate(self.fd, self._peak, stop - self._peak)
            except OSError as error:
                logger.debug("cannot allocate arena memory beyond %d bytes: %s", self._peak, error)
                return False
        self._peak = stop
        if self.large_pages is not None:
            self.large_pages.note_used(stop)
        return True

    @classmethod
    def create(cls, capacity: int, *, huge: bool = False, fallback: bool = True) -> Arena:
        """Create a region of at least ``capacity`` bytes, of 2 MiB pages with ``huge``.

        If the system has too few huge pages, use normal pages and log a warning, or raise
        :class:`ArenaError` unless ``fallback``. Reserving huge pages clears them, which takes about 0.1 s per
        GiB.
        """
        if huge:
            try:
                return cls._create(round_up(capacity, HUGE_PAGE_BYTES), HUGE_PAGE_BYTES)
            except ArenaError as error:
                advice = _huge_page_advice(-(-capacity // HUGE_PAGE_BYTES))
                if not fallback:
                    raise ArenaError(f"{advice}, or allow normal pages with `fallback: true`") from error
                logger.warning("%s; using normal pages (%s)", advice, error)
        return cls._create(round_up(capacity, PAGE_BYTES), PAGE_BYTES)

    @classmethod
    def _create(cls, capacity: int, page_bytes: int) -> Arena:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if page_bytes == HUGE_PAGE_BYTES:
            flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
        fd = -1
        try:
            fd = os.memfd_create("kvtier-arena", flags)
            os.ftruncate(fd, capacity)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, capacity, page_bytes)
        except (OSError, ValueError, OverflowError) as error:
            if fd >= 0:
                os.close(fd)
            raise ArenaError(f"cannot allocate {capacity} bytes of shared memory: {error}") from error


class ArenaMap(_Mapping):
    """An engine's mapping of the arena. Takes ownership of the file descriptor."""

    def __init__(self, fd: int, capacity: int) -> None:
        try:
            super().__init__(fd, capacity)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise ArenaError(f"cannot map {capacity} bytes of shared memory: {error}") from error

    def take_large_pages(self) -> int:
        """Back the whole arena with 2 MiB pages, unless it is pinned. Return the number of bytes that are.

        Blocks for 0.2 s per GiB or more. Other threads of this process are not blocked.
        """
        return large_pages.prepare_all(self.fd, self.capacity)

    def tensor(self) -> torch.Tensor:
        """Return the whole arena as a one-dimensional uint8 tensor that shares its memory. Imports torch.

        The memory stays mapped while the tensor or a view of it exists, even after :meth:`close`.
        """
        import torch  # Imported here: the cache process runs without torch.

        # torch keeps a reference to the object it is given, not to its buffer: pass a new view.
        return torch.frombuffer(self._bytes[:], dtype=torch.uint8)


def _map_shared(fd: int, capacity: int) -> memoryview:
    """Map a memfd at a 2 MiB-aligned address, so that it can have 2 MiB pages.

    The memory is unmapped with the last view of it.

    Raises:
        OSError: the mapping failed.
        ValueError: the memfd is shorter than ``capacity``, so that reading its end would kill the process.

    """
    if capacity > (length := os.fstat(fd).st_size):
        raise ValueError(f"the file has {length} bytes")
    reserved = reserve_addresses(capacity + HUGE_PAGE_BYTES)
    address = round_up(reserved, HUGE_PAGE_BYTES)
    try:
        map_shared(address, capacity, fd, 0)
    except OSError:
        unmap(reserved, capacity + HUGE_PAGE_BYTES)
        raise
    stop = round_up(address + capacity, PAGE_BYTES)
    for start, surplus in (
        (reserved, address - reserved),
        (stop, HUGE_PAGE_BYTES - (stop - capacity - reserved)),
    ):
        if surplus:
            unmap(start, surplus)
    region = (ctypes.c_char * capacity).from_address(address)
    weakref.finalize(region, unmap, address, capacity).atexit = False
    return memoryview(region).cast("B")


def _huge_page_advice(needed: int) -> str:
    """Return the error text, with the command to run, if ``needed`` huge pages are not available."""
    try:
        total, free, reserved = (
            int((_HUGE_PAGE_COUNTS / name).read_text())
            for name in ("nr_hugepages", "free_hugepages", "resv_hugepages")
        )
    except OSError:
        return f"{needed} huge pages of 2 MiB are needed and this kernel does not support them"
    available = free - reserved
    target = total - available + needed
    # sysctl sets the number of pages of the default size, which may not be 2 MiB (hosts set up for DPDK).
    two_mib_is_default = re.search(r"^Hugepagesize:\s+2048 kB$", _MEMINFO.read_text(), re.MULTILINE)
    remedy = (
        f"sysctl -w vm.nr_hugepages={target}"
        if two_mib_is_default
        else f"echo {target} > {_HUGE_PAGE_COUNTS}/nr_hugepages"
    )
    return f"{needed} huge pages of 2 MiB are needed and {available} are free: run `{remedy}`"
