"""Loads that make a machine busy, each in processes of its own that end with the benchmark.

Each leads a process group, which is killed at the end; and the kernel kills each process whose benchmark is
killed. Nothing but the standard library is imported, so that a load starts quickly on a saturated machine.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

MIB, GIB = 1 << 20, 1 << 30
PAGE_BYTES = mmap.PAGESIZE
WRITE_BYTES, FILE_BYTES = 4 * MIB, 256 * MIB
READ_BYTES, FREE_BYTES = 16 * MIB, 256 * MIB
LEAVE_BYTES = 4 * GIB
"""So much memory stays available, whatever a load takes."""
PR_SET_PDEATHSIG = 1


@contextmanager
def saturated(processes_a_core: int = 3) -> Iterator[None]:
    """Every core is wanted by so many processes that never sleep."""
    with ExitStack() as stack:
        for _ in range(processes_a_core * len(os.sched_getaffinity(0))):
            stack.enter_context(_running("spin"))
        yield


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Another process overwrites one file of 256 MiB there, again and again, past the page cache."""
    with tempfile.TemporaryDirectory(dir=folder) as own, _running("write", str(Path(own, "written"))):
        yield


@contextmanager
def fragmented(folder: Path, most_bytes: int) -> Iterator[None]:
    """Another process holds every other page of at most ``most_bytes``, and the page cache takes the rest.

    Raises :class:`MemoryError` where there is not enough memory to do so.
    """
    with (
        tempfile.TemporaryDirectory(dir=folder) as own,
        _running("fragment", str(Path(own, "sparse")), str(most_bytes)),
    ):
        yield


@contextmanager
def _running(*words: str) -> Iterator[None]:
    command = [sys.executable, "-S", __file__, str(os.getpid()), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != b"ready\n":
            raise MemoryError(f"the load {words[0]} did not start")
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def spin() -> None:
    """Compute for ever."""
    while True:
        pass


def write(path: str) -> None:
    """Overwrite one file for ever, with O_DIRECT."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    with mmap.mmap(-1, WRITE_BYTES) as data:
        data[:] = os.urandom(WRITE_BYTES)
        while True:
            for offset in range(0, FILE_BYTES, WRITE_BYTES):
                os.pwrite(fd, data, offset)


def fragment(path: str, most_bytes: str) -> None:
    """Hold every other page of some memory, and let the page cache take what is free.

    The file is sparse, so that nothing is written; read at random, its pages come one by one. Ends as soon as
    so little memory is available that others need it.
    """
    taken = min(int(most_bytes), available_bytes() - LEAVE_BYTES) // PAGE_BYTES * PAGE_BYTES
    if taken <= 0:
        sys.exit("there is too little memory to fragment")
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, min(int(most_bytes), memory_bytes("MemFree")))
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    fill_page_cache(fd)
    memory = mmap.mmap(-1, taken)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for offset in range(0, taken, PAGE_BYTES):
        memory[offset] = 1
    for offset in range(0, taken, 2 * PAGE_BYTES):
        memory.madvise(mmap.MADV_DONTNEED, offset, PAGE_BYTES)
    fill_page_cache(fd)
    print("ready", flush=True)
    while available_bytes() > LEAVE_BYTES // 2:
        time.sleep(0.2)


def fill_page_cache(fd: int) -> None:
    """Read a file until all of it is in the page cache, or no memory is free."""
    with mmap.mmap(-1, READ_BYTES) as buffer:
        for offset in range(0, os.fstat(fd).st_size, READ_BYTES):
            if memory_bytes("MemFree") < FREE_BYTES:
                return
            os.preadv(fd, [buffer], offset)


def available_bytes() -> int:
    """How much memory a process may still take before others lose theirs."""
    return memory_bytes("MemAvailable")


def end_with(parent: int) -> None:
    """Have the kernel kill this process when that one, its parent, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the benchmark has ended")


def memory_bytes(field: str) -> int:
    """A line of /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    if sys.argv[2] != "fragment":
        print("ready", flush=True)
    {"spin": spin, "write": write, "fragment": fragment}[sys.argv[2]](*sys.argv[3:])
