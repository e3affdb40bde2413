"""Back a memfd with 2 MiB pages ahead of use: the program started by :mod:`kvtier.memory.large_pages`.

Run as ``python -I -S memory/large_pages_process.py FD STATE WAKE BYTES AHEAD``: three descriptors and two
sizes. It imports only the standard library, to start within about 30 ms, and runs at low priority. It exits
when the write end of the pipe ``WAKE`` is closed, at the latest with its parent.

If the system has no free large pages, it allocates normal pages, so that this process waits for memory
reclaim and not the engine that first writes there.

madvise(2) MADV_COLLAPSE, Linux 6.1. Each call waits until a worker has run on every CPU
(``lru_add_drain_all`` in mm/khugepaged.c), which takes 20 ms or more on saturated CPUs. Hence few calls, each
for a large range.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import select
import signal
import sys
import time

PAGE_BYTES = 4096
LARGE_PAGE_BYTES = 2 << 20
CALL_BYTES = 32 << 20
"""Size of one call. Bounds how long the first use of memory in that range may wait for the call."""
MAX_TRIES = 3
SLOW_CALL_SECONDS = 0.1
"""A slower call (the kernel had to compact memory) is followed by a pause of the same length."""
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 60.0
"""Back-off if the system had no free large page, because each search for one takes long."""
NICE = 10

USED, PREPARED, LARGE = range(3)
"""Indexes of the shared words: bytes in use (set by the parent), bytes processed, bytes in large pages."""

MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
"""Not in ``mmap``, or only since Python 3.13 (MAP_NORESERVE). Values of asm-generic/mman.h."""
_MADV_COLLAPSE = 25
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
unmap = _libc.munmap


def main(fd: int, state: int, wake: int, length: int, ahead: int) -> None:
    """Prepare memory until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C in the terminal.
    os.nice(NICE)
    words = memoryview(mmap.mmap(state, PAGE_BYTES)).cast("Q")
    preparation = Preparation(fd, words, length - length % LARGE_PAGE_BYTES, ahead)
    while not _closed(wake, preparation.step()):
        pass


class Preparation:
    """Prepares memory ahead of use, range by range."""

    def __init__(self, fd: int, words: memoryview, length: int, ahead: int) -> None:
        self._fd = fd
        self._words = words
        self._length = length
        self._ahead = ahead
        self._can_collapse = True
        self._scarce = False
        """Whether the last call found no free large page."""
        self._filled = 0
        """End of the range that has at least normal pages."""
        self._pause = FIRST_PAUSE_SECONDS
        self._idle_until = 0.0

    def step(self) -> float | None:
        """Prepare one range. Return the seconds to wait afterwards; ``None``: until more memory is used."""
        # Skip memory in use: preparing it would block its users.
        used = self._words[USED]
        start = max(self._words[PREPARED], -(-used // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES)
        stop = min(self._length, (used + self._ahead) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES)
        unfilled = max(start, self._filled)
        if self._scarce and unfilled < stop:
            self._fill(unfilled, min(stop, unfilled + CALL_BYTES))
            return 0
        left = self._idle_until - time.monotonic()
        if start >= stop or left > 0:
            self._words[PREPARED] = max(self._words[PREPARED], min(start, stop))
            return left if start < stop else None
        self._collapse(start, min(stop, start + CALL_BYTES))
        return 0

    def _fill(self, start: int, stop: int) -> None:
        self._filled = stop
        fill(self._fd, start, stop)
        if not self._can_collapse:
            self._words[PREPARED] = stop

    def _collapse(self, start: int, stop: int) -> None:
        began = time.monotonic()
        error = prepare(self._fd, start, stop)
        seconds = time.monotonic() - began
        # EINVAL: a kernel without MADV_COLLAPSE.
        self._scarce, self._can_collapse = error != 0, error != errno.EINVAL
        if error:
            fill(self._fd, start, stop)
            self._idle_until = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)
        else:
            self._words[LARGE] += stop - start
            self._pause = FIRST_PAUSE_SECONDS
            if seconds > SLOW_CALL_SECONDS:
                self._idle_until = time.monotonic() + seconds
        self._words[PREPARED] = stop


def prepare(fd: int, start: int, stop: int) -> int:
    """Back ``[start, stop)`` of a memfd with large pages. Return 0 or an errno. Content is preserved."""
    length = stop - start
    try:
        reserved = reserve_addresses(length + LARGE_PAGE_BYTES)
    except OSError as error:
        return error.errno or errno.ENOMEM
    try:
        address = -(-reserved // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        map_shared(address, length, fd, start)
        for page in range(start, stop, LARGE_PAGE_BYTES):
            # MADV_COLLAPSE needs at least one page in the range.
            os.posix_fallocate(fd, page, PAGE_BYTES)
        for _ in range(MAX_TRIES):
            if _libc.madvise(address, length, _MADV_COLLAPSE) == 0:
                return 0
            if (code := ctypes.get_errno()) != errno.EAGAIN:
                return code
            time.sleep(0.001)  # A page was temporarily in use.
        return errno.EAGAIN
    except OSError as error:
        return error.errno or errno.ENOMEM
    finally:
        unmap(reserved, length + LARGE_PAGE_BYTES)


def fill(fd: int, start: int, stop: int) -> None:
    """Allocate pages of any size for ``[start, stop)`` of a memfd, as far as the system has memory."""
    with contextlib.suppress(OSError):
        os.posix_fallocate(fd, start, stop - start)


def reserve_addresses(length: int) -> int:
    """Reserve addresses for ``length`` bytes, to be mapped over or unmapped. Raises ``OSError``.

    The mapping is not writable, so that it does not count toward the limit of vm.overcommit_memory=2.
    """
    return _map(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)


def map_shared(address: int, length: int, fd: int, offset: int) -> None:
    """Map a file at an address that the caller has reserved, replacing the mapping. Raises ``OSError``.

    Core dumps leave it out: they would have the size of the arena, and contain what users have sent.
    """
    _map(address, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd, offset)
    _libc.madvise(address, length, mmap.MADV_DONTDUMP)


def _map(address: int | None, length: int, access: int, flags: int, fd: int, offset: int) -> int:
    mapped = _libc.mmap(address, length, access, flags, fd, offset)
    if mapped == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(mapped)


def _closed(wake: int, seconds: float | None) -> bool:
    """Wait for a wakeup from the parent. Return whether it has closed the pipe."""
    poll = select.poll()  # Not select(2): descriptors keep the parent's numbers, which may exceed 1023.
    poll.register(wake, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1e3)) and not os.read(wake, 4096)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
