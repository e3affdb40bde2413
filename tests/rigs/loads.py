"""Loads that make a machine busy, in separate processes that end with the test or benchmark.

Each load leads a process group, which is killed at the end. If the benchmark is killed, the kernel kills its
loads. Imports only the standard library, so that a load starts quickly on a saturated machine.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

MIB, GIB = 1 << 20, 1 << 30
PAGE_BYTES = mmap.PAGESIZE
WRITE_BYTES, FILE_BYTES = 4 * MIB, 256 * MIB
READ_BYTES, FREE_BYTES = 16 * MIB, 256 * MIB
LEAVE_BYTES = 4 * GIB
"""Memory that every load leaves available."""
PR_SET_PDEATHSIG = 1


@contextmanager
def saturated(processes_per_core: int = 3) -> Iterator[set[int]]:
    """Run that many CPU-bound processes per core; yield their ids."""
    with ExitStack() as stack:
        count = processes_per_core * len(os.sched_getaffinity(0))
        yield {stack.enter_context(_running("spin")) for _ in range(count)}


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Run a process that overwrites one file of 256 MiB in ``folder`` repeatedly, with O_DIRECT."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as subfolder,
        _running("write", str(Path(subfolder, "written"))),
    ):
        yield


@contextmanager
def fragmented(folder: Path, max_bytes: int) -> Iterator[None]:
    """Run a process that holds every other page of at most ``max_bytes``, and fills the page cache.

    Raises :class:`MemoryError` if there is too little memory.
    """
    with (
        tempfile.TemporaryDirectory(dir=folder) as subfolder,
        _running("fragment", str(Path(subfolder, "sparse")), str(max_bytes)),
    ):
        yield


@contextmanager
def _running(*arguments: str) -> Iterator[int]:
    command = [sys.executable, "-S", __file__, str(os.getpid()), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != b"ready\n":
            raise MemoryError(f"the load {arguments[0]} did not start")
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def spin() -> None:
    """Use a core forever."""
    while True:
        pass


def write(path: str) -> None:
    """Overwrite one file forever, with O_DIRECT."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    with mmap.mmap(-1, WRITE_BYTES) as data:
        data[:] = os.urandom(WRITE_BYTES)
        while True:
            for offset in range(0, FILE_BYTES, WRITE_BYTES):
                os.pwrite(fd, data, offset)


def fragment(path: str, max_bytes: str) -> None:
    """Hold every other page of a range of memory, and fill the remaining memory with page cache.

    The file is sparse, so that nothing is written, and advised as random, so that its pages are read one by
    one. Ends when available memory runs low.
    """
    length = min(int(max_bytes), available_bytes() - LEAVE_BYTES) // PAGE_BYTES * PAGE_BYTES
    if length <= 0:
        sys.exit("too little memory to fragment")
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, min(int(max_bytes), memory_bytes("MemFree")))
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    fill_page_cache(fd)
    memory = mmap.mmap(-1, length)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for offset in range(0, length, PAGE_BYTES):
        memory[offset] = 1
    for offset in range(0, length, 2 * PAGE_BYTES):
        memory.madvise(mmap.MADV_DONTNEED, offset, PAGE_BYTES)
    fill_page_cache(fd)
    print("ready", flush=True)
    while available_bytes() > LEAVE_BYTES // 2:
        time.sleep(0.2)


def fill_page_cache(fd: int) -> None:
    """Read a file until it is in the page cache or memory is full."""
    with mmap.mmap(-1, READ_BYTES) as buffer:
        for offset in range(0, os.fstat(fd).st_size, READ_BYTES):
            if memory_bytes("MemFree") < FREE_BYTES:
                return
            os.preadv(fd, [buffer], offset)


def available_bytes() -> int:
    """Return the memory that can be allocated without reclaiming it from other processes."""
    return memory_bytes("MemAvailable")


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the benchmark exited")


def memory_bytes(field: str) -> int:
    """Return a field of /proc/meminfo in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    if sys.argv[2] != "fragment":
        print("ready", flush=True)
    loads: dict[str, Callable[..., None]] = {"spin": spin, "write": write, "fragment": fragment}
    loads[sys.argv[2]](*sys.argv[3:])
