"""Shared memory in pages of 2 MiB that nobody has to set aside.

A memfd gets its memory 4 KiB at a time, from wherever the system has some left. On a machine that has been up
for a while, a disk then moves less with each request, and every copy looks up an address each 4 KiB. Since
Linux 6.1 the kernel puts a large page in their place on request (madvise(2), MADV_COLLAPSE), whatever the
system's setting of transparent huge pages.

The request may take seconds on a busy machine, and whatever maps or unmaps memory in the same process waits
meanwhile. So a small process of its own makes it (:mod:`kvtier.large_pages_process`), a little ahead of use,
and never for memory that is in use.
"""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
import threading
import time

from kvtier import large_pages_process
from kvtier.large_pages_process import LARGE, LARGE_PAGE_BYTES, PAGE_BYTES, PREPARED, USED

__all__ = ["LARGE_PAGE_BYTES", "LargePages", "ahead_bytes", "prepare_all"]

logger = logging.getLogger("kvtier")

MIN_AHEAD_BYTES, MAX_AHEAD_BYTES = 256 << 20, 4 << 30
"""An eighth of the memory is prepared beyond what is in use, within these bounds: a prompt may take much."""
STALL_SECONDS = 10.0
"""How long who waits for large pages waits for the next. A call takes 0.7 s on a saturated machine."""
REACH_BYTES = 4 << 20
"""The process is woken once for each so many bytes that come into use."""


class LargePages:
    """Puts large pages into the part of a memfd that will be used next. Not thread-safe.

    Has no effect where the system cannot. Nothing here blocks but :meth:`settle`.
    """

    def __init__(self, fd: int, capacity: int, ahead: int | None = None) -> None:
        """Start the process for the first ``capacity`` bytes of ``fd``: takes about 2 ms."""
        self._capacity = capacity
        self._ahead = ahead_bytes(capacity) if ahead is None else ahead
        self._reported = 0
        self._process: subprocess.Popen[bytes] | None = None
        state = os.memfd_create("kvtier-large-pages", os.MFD_CLOEXEC)
        wake, self._wake = os.pipe()
        try:
            os.ftruncate(state, PAGE_BYTES)
            self._state = mmap.mmap(state, PAGE_BYTES)
            self._words = memoryview(self._state).cast("Q")
            os.set_blocking(self._wake, False)
            numbers = map(str, (fd, state, wake, capacity, self._ahead))
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", large_pages_process.__file__, *numbers],
                pass_fds=[fd, state, wake],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            os.close(self._wake)
            logger.info("no large pages, since their process does not start: %s", error)
        finally:
            os.close(state)
            os.close(wake)

    def reach(self, stop: int) -> None:
        """Note that all before ``stop`` is in use, or about to be."""
        if self._process is None:
            return
        self._words[USED] = stop
        if stop - self._reported >= REACH_BYTES:
            self._reported = stop
            try:
                os.write(self._wake, b"\0")
            except BlockingIOError:
                pass  # It has not even taken notice of the last one.
            except OSError as error:
                logger.debug("the process that prepares large pages has ended: %s", error)
                self.close()

    @property
    def large_bytes(self) -> int:
        """Bytes that have been put into large pages."""
        return int(self._words[LARGE])

    def settle(self) -> None:
        """Block until the memory ahead of use is prepared, or :data:`STALL_SECONDS` go by without progress.

        There is none once the process has ended, and little where the system has no free large pages.
        """
        prepared, deadline = 0, time.monotonic() + STALL_SECONDS
        target = min(self._capacity, self._words[USED] + self._ahead) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
        while self._process is not None and self._process.poll() is None and time.monotonic() < deadline:
            before, prepared = prepared, self._words[PREPARED]
            if prepared >= target:
                return
            if prepared > before:
                deadline = time.monotonic() + STALL_SECONDS
            time.sleep(0.001)

    def close(self) -> None:
        """End the process, without waiting for it. Harmless when repeated."""
        if self._process is None:
            return
        process, self._process = self._process, None
        os.close(self._wake)
        process.kill()
        # A killed process may stay in the kernel for as long as its last request takes.
        threading.Thread(target=process.wait, name="kvtier-reap", daemon=True).start()


def ahead_bytes(capacity: int) -> int:
    """How much of a memfd of this size is prepared beyond what is in use."""
    return min(max(capacity // 8, MIN_AHEAD_BYTES), MAX_AHEAD_BYTES)


def prepare_all(fd: int, capacity: int) -> int:
    """Have a whole memfd in large pages; the number of bytes that are. Blocks, for 0.2 s a GiB or more.

    Gives up where the system has no more of them.
    """
    pages = LargePages(fd, capacity, ahead=capacity)
    pages.settle()
    pages.close()
    return pages.large_bytes
