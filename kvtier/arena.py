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
import mmap
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier import native
from kvtier.errors import ArenaError
from kvtier.slices import PAGE_BYTES, Lease, Slices, round_up

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("kvtier")

HUGE_PAGE_BYTES = 2 << 20

_MAP_NORESERVE = 0x4000
"""``mmap`` has a name for it from Python 3.13 on (asm-generic/mman.h)."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HUGE_PAGE_COUNTS = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_MEMINFO = Path("/proc/meminfo")


def address_of(view: memoryview) -> int:
    """Where writable memory begins. Keeps no hold of it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class _Mapping:
    """A memfd mapped into this process."""

    def __init__(self, fd: int, capacity: int) -> None:
        self.fd = fd
        self.capacity = capacity
        self._map, start = _map_shared(fd, capacity)
        self._range = slice(start, start + capacity)
        self._bytes = memoryview(self._map)[self._range]

    def view(self, offset: int, length: int) -> memoryview:
        """``length`` bytes from ``offset`` on."""
        return self._bytes[offset : offset + length]

    def close(self) -> None:
        """Let go of the mapping, or leave it to the last view on it. Harmless when repeated."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._bytes.release()
        try:
            self._map.close()
        except BufferError:
            logger.debug("an arena is closed while a view of it is held")


class Arena(_Mapping, Slices):
    """Shared memory that is leased out in slices."""

    def __init__(self, fd: int, capacity: int, page_bytes: int) -> None:
        Slices.__init__(self, capacity)
        _Mapping.__init__(self, fd, capacity)
        self.page_bytes = page_bytes
        self._large_pages: native.core.LargePages | None = None
        if page_bytes == PAGE_BYTES and capacity >= HUGE_PAGE_BYTES and native.available():
            self._large_pages = native.core.LargePages(fd, capacity)
            self._large_pages.reach(0)
        self._peak = 0

    def allocate(self, length: int) -> Lease | None:
        """See :meth:`Slices.allocate`."""
        lease = super().allocate(length)
        if lease is not None:
            self._reach(lease.offset + lease.length)
        return lease

    def allocate_all(self, length: int, count: int) -> list[Lease]:
        """See :meth:`Slices.allocate_all`."""
        leases = super().allocate_all(length, count)
        if leases:
            self._reach(max(lease.offset for lease in leases) + length)
        return leases

    def close(self) -> None:
        """See :meth:`_Mapping.close`. Blocks for some milliseconds at worst."""
        if self._large_pages is not None:
            self._large_pages.close()
            self._large_pages = None
        super().close()

    @property
    def large_page_bytes(self) -> int:
        """How much is in pages of 2 MiB by now."""
        if self.page_bytes == HUGE_PAGE_BYTES:
            return self.capacity
        return self._large_pages.taken if self._large_pages is not None else 0

    def settle(self) -> None:
        """Block until what is leased is in the pages in which it will stay, before anything is measured."""
        if self._large_pages is not None:
            self._large_pages.wait()

    def _reach(self, stop: int) -> None:
        if stop > self._peak and self._large_pages is not None:
            self._peak = stop
            self._large_pages.reach(stop)

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
        """Have all of it in pages of 2 MiB, as long as it is not pinned; how many bytes are.

        Blocks, for 0.2 s a GiB or more.
        """
        if not native.available():
            return 0
        pages = native.core.LargePages(self.fd, self.capacity)
        pages.reach(self.capacity)
        pages.wait()
        return pages.taken

    def tensor(self) -> torch.Tensor:
        """The whole arena as a one-dimensional tensor of bytes, sharing its memory. Imports torch.

        The memory stays mapped as long as the tensor or a view of it lives, past :meth:`close` too.
        """
        import torch  # Here alone: the cache process runs without torch.

        # torch keeps the object that it was given, not the buffer: only a view of its own keeps the mapping.
        return torch.frombuffer(memoryview(self._map)[self._range], dtype=torch.uint8)


def _map_shared(fd: int, capacity: int) -> tuple[mmap.mmap, int]:
    """A mapping, and where the memfd begins in it: at an address where a page of 2 MiB may be."""
    if not native.available() or capacity < HUGE_PAGE_BYTES:
        return mmap.mmap(fd, capacity, flags=mmap.MAP_SHARED), 0
    if capacity > (length := os.fstat(fd).st_size):
        raise ValueError(f"there are {length} bytes")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = mmap.mmap(-1, capacity + HUGE_PAGE_BYTES, flags=flags)
    address = address_of(memoryview(reserved))
    start = -address % HUGE_PAGE_BYTES
    native.core.map_over(address + start, fd, capacity)
    return reserved, start


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
