"""A separate process prepares large pages ahead of use, without blocking callers or leaking resources."""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.memory import large_pages, large_pages_process
from kvtier.memory.arena import MIN_PREPARED_BYTES, Arena, ArenaMap
from kvtier.memory.large_pages import LARGE_PAGE_BYTES, MIN_AHEAD_BYTES, LargePages, ahead_bytes, prepare_all
from kvtier.memory.large_pages_process import CALL_BYTES
from tests.rigs.waiting import wait_until

KERNEL = tuple(int(number) for number in platform.release().split(".")[:2])
MIB = 1 << 20
AHEAD_BYTES = MIN_AHEAD_BYTES
LONG_PAUSE = 3600.0

needs_collapse = pytest.mark.skipif(KERNEL < (6, 1), reason="this kernel has no MADV_COLLAPSE")


@pytest.fixture
def memfd() -> Iterator[Callable[[int], int]]:
    """Create memfds of a given size, and close them at the end."""
    descriptors = []

    def make(length: int) -> int:
        fd = os.memfd_create("kvtier-test", os.MFD_CLOEXEC)
        descriptors.append(fd)
        os.ftruncate(fd, length)
        return fd

    yield make
    for fd in descriptors:
        os.close(fd)


def allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def pages_of(arena: Arena) -> LargePages:
    assert arena.large_pages is not None
    return arena.large_pages


def process_of(pages: LargePages) -> int:
    assert pages._process is not None
    return pages._process.pid


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def settle(arena: Arena) -> None:
    """Block until the memory to be leased next is prepared."""
    pages_of(arena).settle()


def test_memory_is_prepared_only_ahead_of_use() -> None:
    with closing(Arena.create(2 * AHEAD_BYTES)) as arena:
        settle(arena)
        assert allocated_bytes(arena.fd) <= AHEAD_BYTES
        arena.allocate_all(64 * 1024, 1024)
        settle(arena)
        assert allocated_bytes(arena.fd) <= AHEAD_BYTES + 64 * MIB


@pytest.mark.parametrize(
    ("capacity", "ahead"), [(64 * MIB, 256 * MIB), (5 << 30, 640 * MIB), (1 << 40, 4 << 30)]
)
def test_larger_arena_is_prepared_further_ahead(capacity: int, ahead: int) -> None:
    assert ahead_bytes(capacity) == ahead


@needs_collapse
def test_settle_converts_memory_that_is_already_leased() -> None:
    with closing(Arena.create(MIN_PREPARED_BYTES)) as arena:
        pages_of(arena).close()  # As if nothing had been prepared yet.
        lease = arena.allocate(arena.capacity)
        assert lease is not None
        lease.view[:4096] = bytes(range(256)) * 16
        arena.large_pages = LargePages(arena.fd, arena.capacity)
        arena.settle()
        assert bytes(lease.view[:4096]) == bytes(range(256)) * 16
        assert min(large_sizes(arena)) > 0
        lease.release()


@needs_collapse
def test_leased_memory_is_mapped_with_large_pages() -> None:
    with closing(Arena.create(MIN_PREPARED_BYTES)) as arena:
        settle(arena)
        assert arena.large_page_bytes == arena.capacity
        lease = arena.allocate(arena.capacity)
        assert lease is not None
        lease.view[:: 1 << 16] = bytes(len(lease.view[:: 1 << 16]))
        with closing(ArenaMap(os.dup(arena.fd), arena.capacity)) as engine:
            engine.view(0, 1)[0] = 1
            # In both mappings: the addresses are aligned for large pages.
            assert min(large_sizes(arena)) > 0
        lease.release()


@needs_collapse
@pytest.mark.parametrize("together", [False, True])
def test_preparation_advances_with_use(*, together: bool) -> None:
    with closing(Arena.create(2 * AHEAD_BYTES)) as arena:
        settle(arena)
        assert arena.large_page_bytes == AHEAD_BYTES
        for _ in range(1 if together else 4):
            arena.allocate_all(8 * MIB, 4) if together else arena.allocate(8 * MIB)
        settle(arena)
        assert arena.large_page_bytes == AHEAD_BYTES + 32 * MIB


def test_memory_in_use_is_not_prepared(memfd: Callable[[int], int]) -> None:
    """A concurrent writer would have to wait for the pages."""
    fd = memfd(3 * CALL_BYTES)
    pages = LargePages(fd, 3 * CALL_BYTES, ahead=CALL_BYTES)
    os.kill(process_of(pages), signal.SIGSTOP)
    pages.note_used(2 * CALL_BYTES + 1)
    before = pages.large_bytes
    os.kill(process_of(pages), signal.SIGCONT)
    pages.settle()
    pages.close()
    # Below the mark, at most one call was in progress when the mark was set.
    assert before <= CALL_BYTES
    assert allocated_bytes(fd) <= CALL_BYTES + (CALL_BYTES - LARGE_PAGE_BYTES)


@needs_collapse
def test_contents_are_preserved(memfd: Callable[[int], int]) -> None:
    length = CALL_BYTES + 3 * LARGE_PAGE_BYTES + 4096
    fd = memfd(length)
    noise = os.urandom(length)
    os.pwrite(fd, noise, 0)
    assert prepare_all(fd, length) == CALL_BYTES + 3 * LARGE_PAGE_BYTES
    assert os.pread(fd, length, 0) == noise


def test_pages_are_prepared_in_another_process() -> None:
    """While it prepares pages, the kernel holds a lock that mmap needs."""
    with closing(Arena.create(4 * AHEAD_BYTES)) as arena:
        command = Path(f"/proc/{process_of(pages_of(arena))}/cmdline")
        wait_until(lambda: "large_pages_process" in command.read_text())


def test_close_does_not_wait(memfd: Callable[[int], int]) -> None:
    fd = memfd(4 * AHEAD_BYTES)
    pages = LargePages(fd, 4 * AHEAD_BYTES, ahead=4 * AHEAD_BYTES)
    pid = process_of(pages)
    os.kill(pid, signal.SIGSTOP)  # Simulates a call that never returns.
    pages.close()
    pages.close()
    pages.note_used(AHEAD_BYTES)
    pages.settle()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_settle_ends_if_no_progress_is_made(
    memfd: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_pages, "STALL_SECONDS", 0.1)
    pages = LargePages(memfd(AHEAD_BYTES), AHEAD_BYTES, ahead=AHEAD_BYTES)
    os.kill(process_of(pages), signal.SIGSTOP)
    pages.settle()
    assert pages.large_bytes < AHEAD_BYTES
    pages.close()


def test_process_exits_with_its_parent() -> None:
    program = (
        "import os, signal; from kvtier.memory.arena import Arena; arena = Arena.create(1 << 28)\n"
        "print(arena.large_pages._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGKILL
    wait_until(lambda: not is_running(int(result.stdout)))


def test_killed_process_disables_only_large_pages() -> None:
    with closing(Arena.create(2 * AHEAD_BYTES)) as arena:
        pid = process_of(pages_of(arena))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
        for _ in range(4):
            lease = arena.allocate(16 * MIB)
            assert lease is not None
            lease.view[:4096] = bytes(4096)
        arena.settle()


def test_process_that_cannot_start_disables_only_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages.sys, "executable", "/no/such/python")
    with closing(Arena.create(MIN_PREPARED_BYTES)) as arena:
        settle(arena)
        assert arena.large_page_bytes == 0
        assert arena.allocate(MIB) is not None


@pytest.mark.parametrize(
    ("error", "pause"),
    [(errno.EINVAL, None), (errno.ENOMEM, LONG_PAUSE)],
    ids=["a kernel before 6.1", "no large page is free"],
)
def test_without_large_pages_it_allocates_normal_ones_and_retries_rarely(
    error: int, pause: float | None, memfd: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt is a long search that costs CPU time."""
    requests, waits = [], []
    # On a busy machine a second may pass meanwhile.
    monkeypatch.setattr(large_pages_process, "FIRST_PAUSE_SECONDS", LONG_PAUSE)
    monkeypatch.setattr(large_pages_process, "prepare", lambda *range_: requests.append(range_) or error)
    monkeypatch.setattr(large_pages_process.os, "nice", lambda _: 0)

    def closed(_wake: int, seconds: float | None) -> bool:
        waits.append(seconds)
        return seconds != 0  # The parent closes the pipe during the first blocking wait.

    monkeypatch.setattr(large_pages_process, "_closed", closed)
    old, memory = signal.getsignal(signal.SIGINT), memfd(AHEAD_BYTES)
    try:
        large_pages_process.main(memory, memfd(4096), -1, AHEAD_BYTES, AHEAD_BYTES)
    finally:
        signal.signal(signal.SIGINT, old)
    assert len(requests) == 1
    assert (waits[-1] is None) if pause is None else (0 < waits[-1] <= pause)
    assert allocated_bytes(memory) == AHEAD_BYTES


def test_small_arena_is_allocated_immediately() -> None:
    """Otherwise the first write of an engine would wait for page allocation."""
    with closing(Arena.create(MIB)) as arena:
        assert allocated_bytes(arena.fd) == MIB


def test_descriptors_above_1023_are_polled() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    read, write = os.pipe()
    high = os.dup2(read, 3000)
    try:
        assert not large_pages_process._closed(high, 0)
        os.close(write)
        assert large_pages_process._closed(high, None)
    finally:
        os.close(high)
        os.close(read)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def large_sizes(arena: Arena) -> list[int]:
    """Return how many bytes each mapping of an arena in this process maps with large pages."""
    inode, sizes, is_arena = str(os.fstat(arena.fd).st_ino), [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_arena = line.split()[4] == inode
        elif is_arena and line.startswith("ShmemPmdMapped:"):
            sizes.append(int(line.split()[1]) * 1024)
    return sizes
