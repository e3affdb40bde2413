"""One region of shared memory, of which slices are leased.

The cache process makes the :class:`Arena` and alone decides who has which slice; engines map the same
memory with :class:`ArenaMap`. The region is a memfd: it has no name, its file descriptor travels over the
bridge, and nothing of it is left behind however its processes end. Its size is sealed, so that nobody who
has the descriptor can cut it short under the others. Normal pages are taken from the system a little before
they are first used, 2 MiB at a time where the system has as much in one place (docs/native.md); huge pages
are set aside at once. Nothing here blocks or is thread-safe, but for the copies that others make.

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

from kvtier import large_pages
from kvtier.errors import ArenaError
from kvtier.large_pages import LARGE_PAGE_BYTES, LargePages
from kvtier.large_pages_process import fill, map_shared, reserve_addresses, unmap
from kvtier.slices import PAGE_BYTES, Lease, Leases, Slices, round_up

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("kvtier")

HUGE_PAGE_BYTES = LARGE_PAGE_BYTES
MIN_PREPARED_BYTES = 64 << 20
"""A smaller arena is not worth a process that prepares its memory: it takes all of it at once."""

OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HUGE_PAGE_COUNTS = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_MEMINFO = Path("/proc/meminfo")


def address_of(view: memoryview) -> int:
    """Where writable memory begins. Keeps no hold of it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def has_strict_overcommit() -> bool:
    """Whether touching a page beyond what the system has promised ends the process (SIGBUS)."""
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
        """``length`` bytes from ``offset`` on."""
        return self._bytes[offset : offset + length]

    def close(self) -> None:
        """Unmap the memory, now or together with the last view of it. Harmless when repeated."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._bytes.release()


class Arena(_Mapping, Slices):
    """Shared memory that is leased out in slices."""

    def __init__(self, fd: int, capacity: int, page_bytes: int) -> None:
        Slices.__init__(self, capacity)
        _Mapping.__init__(self, fd, capacity)
        self.page_bytes = page_bytes
        self._large_pages: LargePages | None = None
        if page_bytes == PAGE_BYTES and capacity >= MIN_PREPARED_BYTES:
            self._large_pages = LargePages(fd, capacity)
        elif page_bytes == PAGE_BYTES:
            fill(fd, 0, capacity)
        self._strict = has_strict_overcommit()
        self._peak = 0

    def allocate(self, length: int) -> Lease | None:
        """See :meth:`Slices.allocate`."""
        lease = super().allocate(length)
        if lease is not None and not self._reach(lease.offset + lease.length):
            lease.release()
            return None
        return lease

    def allocate_all(self, length: int, count: int) -> list[Lease]:
        """See :meth:`Slices.allocate_all`."""
        leases = super().allocate_all(length, count)
        if leases and not self._reach(max(lease.offset for lease in leases) + length):
            Leases.of(leases).release_all()
            return []
        return leases

    def close(self) -> None:
        """See :meth:`_Mapping.close`."""
        if self._large_pages is not None:
            self._large_pages.close()
            self._large_pages = None
        super().close()

    @property
    def large_page_bytes(self) -> int:
        """How much is in pages of 2 MiB by now."""
        if self.page_bytes == HUGE_PAGE_BYTES:
            return self.capacity
        return self._large_pages.large_bytes if self._large_pages is not None else 0

    def settle(self) -> None:
        """Block until what is leased, and what will be leased next, is prepared, before it is measured."""
        if self._large_pages is not None:
            self._large_pages.settle()
            large_pages.prepare_all(self.fd, self._peak)

    def _reach(self, stop: int) -> bool:
        """Note that memory is used up to ``stop``; whether the system gives as much."""
        if stop <= self._peak:
            return True
        if self._strict:
            try:
                os.posix_fallocate(self.fd, self._peak, stop - self._peak)
            except OSError as error:
                logger.debug("the arena gets no memory beyond %d bytes: %s", self._peak, error)
                return False
        self._peak = stop
        if self._large_pages is not None:
            self._large_pages.reach(stop)
        return True

    @classmethod
    def create(cls, capacity: int, *, huge: bool = False, fallback: bool = True) -> Arena:
        """Make a region of at least ``capacity`` bytes.

        With ``huge`` of 2 MiB pages; where the system has too few of them, of normal ones with a warning,
        or :class:`ArenaError` unless ``fallback``. Setting huge pages aside clears them: about 0.1 s a GiB.
        """
        if huge:
            try:
                return cls._make(round_up(capacity, HUGE_PAGE_BYTES), HUGE_PAGE_BYTES)
            except ArenaError as error:
                advice = _huge_page_advice(-(-capacity // HUGE_PAGE_BYTES))
                if not fallback:
                    raise ArenaError(f"{advice}, or allow normal pages with `fallback: true`") from error
                logger.warning("%s; going on with normal pages (%s)", advice, error)
        return cls._make(round_up(capacity, PAGE_BYTES), PAGE_BYTES)

    @classmethod
    def _make(cls, capacity: int, page_bytes: int) -> Arena:
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
            raise ArenaError(f"cannot get {capacity} bytes of shared memory: {error}") from error


class ArenaMap(_Mapping):
    """An engine's view of the arena. Takes over the file descriptor."""

    def __init__(self, fd: int, capacity: int) -> None:
        try:
            super().__init__(fd, capacity)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise ArenaError(f"cannot map {capacity} bytes of shared memory: {error}") from error

    def take_large_pages(self) -> int:
        """Have all of it in pages of 2 MiB, unless it is pinned; the number of bytes that are.

        Blocks, for 0.2 s a GiB or more. Nothing else in this process waits.
        """
        return large_pages.prepare_all(self.fd, self.capacity)

    def tensor(self) -> torch.Tensor:
        """The whole arena as a one-dimensional tensor of bytes, sharing its memory. Imports torch.

        The memory stays mapped as long as the tensor or a view of it lives, past :meth:`close` too.
        """
        import torch  # Here alone: the cache process runs without torch.

        # torch keeps the object that it was given, not the buffer: only a view of its own keeps the mapping.
        return torch.frombuffer(self._bytes[:], dtype=torch.uint8)


def _map_shared(fd: int, capacity: int) -> memoryview:
    """Map a memfd at an address where it can have pages of 2 MiB. Unmapped when the last view of it is gone.

    Raises:
        OSError: the system does not map as much.
        ValueError: the memfd is shorter, so that reading its end would kill the process.

    """
    if capacity > (length := os.fstat(fd).st_size):
        raise ValueError(f"there are {length} bytes")
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
    """What to say and type where ``needed`` huge pages could not be had."""
    try:
        total, free, reserved = (
            int((_HUGE_PAGE_COUNTS / name).read_text())
            for name in ("nr_hugepages", "free_hugepages", "resv_hugepages")
        )
    except OSError:
        return f"{needed} huge pages of 2 MiB are needed and this kernel has none"
    available = free - reserved
    target = total - available + needed
    # Where the default size is another, as on hosts set up for DPDK, sysctl would make pages of that size.
    two_mib_is_default = re.search(r"^Hugepagesize:\s+2048 kB$", _MEMINFO.read_text(), re.MULTILINE)
    remedy = (
        f"sysctl -w vm.nr_hugepages={target}"
        if two_mib_is_default
        else f"echo {target} > {_HUGE_PAGE_COUNTS}/nr_hugepages"
    )
    return f"{needed} huge pages of 2 MiB are needed and {available} are free: type `{remedy}`"
