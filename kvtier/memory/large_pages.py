"""2 MiB pages for shared memory, without reserving huge pages.

By default a memfd is backed by scattered 4 KiB pages. On a fragmented host this means small disk requests and
a TLB miss every 4 KiB of a copy. Since Linux 6.1, madvise(2) with MADV_COLLAPSE replaces them by a 2 MiB page
on request, whatever the system's setting for transparent huge pages.

The call may take seconds on a busy host, and blocks every mmap and munmap of the calling process. Therefore a
separate process (:mod:`kvtier.memory.large_pages_process`) makes it, shortly ahead of use and never for
memory in use.
"""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
import threading
import time

from kvtier.concurrency import processes
from kvtier.memory import large_pages_process
from kvtier.memory.large_pages_process import LARGE, LARGE_PAGE_BYTES, PAGE_BYTES, PREPARED, USED

__all__ = ["LARGE_PAGE_BYTES", "LargePages", "ahead_bytes", "prepare_all"]

logger = logging.getLogger("kvtier")

MIN_AHEAD_BYTES, MAX_AHEAD_BYTES = 256 << 20, 4 << 30
"""Bounds of the memory prepared ahead of use, by default an eighth of the capacity, for large prompts."""
STALL_SECONDS = 10.0
"""How long to wait for the next large page. A call takes 0.7 s on a saturated host."""
WAKE_BYTES = 4 << 20
"""The process is woken once per this many newly used bytes."""


class LargePages:
    """Backs the part of a memfd that is used next with large pages. Not thread-safe.

    Has no effect if the system does not support it. Only :meth:`settle` blocks.
    """

    def __init__(self, fd: int, capacity: int, ahead: int | None = None) -> None:
        """Start the process for the first ``capacity`` bytes of ``fd``. Takes about 2 ms."""
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
            self._process = processes.start(
                [sys.executable, "-I", "-S", large_pages_process.__file__, *numbers],
                pass_fds=[fd, state, wake],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            os.close(self._wake)
            logger.info("large pages disabled: cannot start their process: %s", error)
        finally:
            os.close(state)
            os.close(wake)

    def note_used(self, stop: int) -> None:
        """Record that everything before ``stop`` is in use, or about to be."""
        if self._process is None:
            return
        self._words[USED] = stop
        if stop - self._reported >= WAKE_BYTES:
            self._reported = stop
            try:
                os.write(self._wake, b"\0")
            except BlockingIOError:
                pass  # Earlier wakeups are still pending.
            except OSError as error:
                logger.debug("the large pages process has exited: %s", error)
                self.close()

    @property
    def large_bytes(self) -> int:
        """Bytes backed by large pages."""
        return int(self._words[LARGE])

    def settle(self) -> None:
        """Block until the memory ahead of use is prepared, or :data:`STALL_SECONDS` pass without progress.

        Progress stops when the process exits, and is slow if the system has no free large pages.
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
        """Kill the process, without waiting for it. Idempotent."""
        if self._process is None:
            return
        process, self._process = self._process, None
        os.close(self._wake)
        process.kill()
        # A killed process stays in the kernel until its last call returns.
        threading.Thread(target=process.wait, name="kvtier-reap", daemon=True).start()


def ahead_bytes(capacity: int) -> int:
    """Return how many bytes of a memfd of this size are prepared beyond the part in use."""
    return min(max(capacity // 8, MIN_AHEAD_BYTES), MAX_AHEAD_BYTES)


def prepare_all(fd: int, capacity: int) -> int:
    """Back a whole memfd with large pages. Return the number of bytes that are.

    Blocks for 0.2 s per GiB or more. Gives up if the system has no more large pages.
    """
    pages = LargePages(fd, capacity, ahead=capacity)
    pages.settle()
    pages.close()
    return pages.large_bytes
