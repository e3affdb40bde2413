"""Put pages of 2 MiB into a memfd, ahead of its use: the program of the process of :mod:`kvtier.large_pages`.

Run as ``python -I -S large_pages_process.py FD STATE WAKE BYTES AHEAD``, three descriptors and two sizes.
It imports the standard library alone, so that it is up within some 30 ms, and runs at a low priority. It ends
when the other end of the pipe ``WAKE`` is closed: with its parent at the latest.

Where the system has no large pages to give, it gets ordinary ones: searching for memory that is short is then
this process's wait, not that of an engine which writes there first.

madvise(2) MADV_COLLAPSE, Linux 6.1. In each call the kernel waits until a worker has run on every CPU
(``lru_add_drain_all`` in mm/khugepaged.c), which takes 20 ms and more where CPUs are saturated. Hence few
calls, each for a large range.
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
"""The range of one call. Also what memory that comes into use meanwhile may have to wait for at most."""
MAX_TRIES = 3
SLOW_CALL_SECONDS = 0.1
"""A call that took longer (the kernel had to move pages out of the way) is followed by as long a pause."""
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 60.0
"""How long to wait where the system had no free large page: each time it searches for one for long."""
NICE = 10

USED, PREPARED, LARGE = range(3)
"""What the shared words say: bytes in use (written by the parent), bytes dealt with, bytes in large pages."""

MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
"""``mmap`` has no name for the first, and one for the second from Python 3.13 on (asm-generic/mman.h)."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is meant for the parent.
    os.nice(NICE)
    words = memoryview(mmap.mmap(state, PAGE_BYTES)).cast("Q")
    preparation = Preparation(fd, words, length - length % LARGE_PAGE_BYTES, ahead)
    while not _closed(wake, preparation.step()):
        pass


class Preparation:
    """Memory that is made ready ahead of its use, range after range."""

    def __init__(self, fd: int, words: memoryview, length: int, ahead: int) -> None:
        self._fd = fd
        self._words = words
        self._length = length
        self._ahead = ahead
        self._can_collapse = True
        self._scarce = False
        """Whether the system had no large page when it was last asked."""
        self._filled = 0
        """Up to where there are ordinary pages at least."""
        self._pause = FIRST_PAUSE_SECONDS
        self._idle_until = 0.0

    def step(self) -> float | None:
        """Prepare one range; how many seconds to wait after it, ``None`` for as long as nothing is used."""
        # What is in use is left alone: preparing it would make its users wait.
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
    """Have ``[start, stop)`` of a memfd in large pages; 0 or an error number. What lies there stays."""
    length = stop - start
    try:
        reserved = reserve_addresses(length + LARGE_PAGE_BYTES)
    except OSError as error:
        return error.errno or errno.ENOMEM
    try:
        address = -(-reserved // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        map_shared(address, length, fd, start)
        for page in range(start, stop, LARGE_PAGE_BYTES):
            # The kernel collapses nothing where there is not a single page.
            os.posix_fallocate(fd, page, PAGE_BYTES)
        for _ in range(MAX_TRIES):
            if _libc.madvise(address, length, _MADV_COLLAPSE) == 0:
                return 0
            if (code := ctypes.get_errno()) != errno.EAGAIN:
                return code
            time.sleep(0.001)  # A page is in use at this moment.
        return errno.EAGAIN
    except OSError as error:
        return error.errno or errno.ENOMEM
    finally:
        unmap(reserved, length + LARGE_PAGE_BYTES)


def fill(fd: int, start: int, stop: int) -> None:
    """Have ``[start, stop)`` of a memfd in pages of whatever size, as far as the system has any left."""
    with contextlib.suppress(OSError):
        os.posix_fallocate(fd, start, stop - start)


def reserve_addresses(length: int) -> int:
    """Addresses for ``length`` bytes, to be mapped over or unmapped. Raises ``OSError``.

    Addresses alone count towards no limit on memory: vm.overcommit_memory=2 has one on what is writable.
    """
    return _map(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)


def map_shared(address: int, length: int, fd: int, offset: int) -> None:
    """Map a file over what is mapped at an address, which must be the caller's. Raises ``OSError``."""
    _map(address, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd, offset)


def _map(address: int | None, length: int, access: int, flags: int, fd: int, offset: int) -> int:
    mapped = _libc.mmap(address, length, access, flags, fd, offset)
    if mapped == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(mapped)


def _closed(wake: int, seconds: float | None) -> bool:
    """Wait for news from the parent; whether it has closed the pipe."""
    poll = select.poll()  # Not select(2), which takes no descriptor above 1023: it has its parent's number.
    poll.register(wake, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1e3)) and not os.read(wake, 4096)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
