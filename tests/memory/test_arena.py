"""The arena: mappings outlive views, limits of the system, and huge pages."""

from __future__ import annotations

import errno
import gc
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ArenaError
from kvtier.memory import arena as arena_module
from kvtier.memory.arena import HUGE_PAGE_BYTES, MIN_PREPARED_BYTES, Arena, ArenaMap, address_of
from kvtier.memory.slices import PAGE_BYTES
from tests.rigs.mapped import flags_at
from tests.rigs.open_files import open_files

from .conftest import allocate

HUGE_PAGE_COUNTS = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


def mappings() -> int:
    """Return the number of arenas mapped into this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:kvtier-arena")


def descriptors() -> int:
    return len(open_files())


@pytest.mark.parametrize("capacity", [0, -4096, 1 << 62, 1 << 80])
def test_impossible_capacity_is_rejected(capacity: int) -> None:
    before = descriptors()
    with pytest.raises(ArenaError, match=f"cannot allocate {capacity} bytes"):
        Arena.create(capacity)
    assert descriptors() == before


def test_memory_is_shared_with_another_process(arena: Arena) -> None:
    lease = allocate(arena, 2)
    program = (
        "import sys; from kvtier.memory.arena import ArenaMap\n"
        "fd, capacity, offset, length = map(int, sys.argv[1:])\n"
        "ArenaMap(fd, capacity).view(offset, length)[:] = bytes([7]) * length"
    )
    numbers = [arena.fd, arena.capacity, lease.offset + 5, 4096]
    subprocess.run([sys.executable, "-c", program, *map(str, numbers)], pass_fds=[arena.fd], check=True)
    assert bytes(lease.view) == bytes(5) + bytes([7]) * 4096 + bytes(4096 - 5)


@pytest.mark.parametrize("capacity", [PAGE_BYTES, 2 * MIN_PREPARED_BYTES])
def test_core_dumps_do_not_contain_the_arena(capacity: int) -> None:
    arena = Arena.create(capacity)
    engine = ArenaMap(os.dup(arena.fd), capacity)
    for mapped in (arena, engine):
        for offset in (0, capacity - 1):
            assert "dd" in flags_at(address_of(mapped.view(offset, 1)))
        mapped.close()


@pytest.mark.parametrize("capacity", [0, 15 * PAGE_BYTES, 17 * PAGE_BYTES])
def test_arena_cannot_be_resized(arena: Arena, capacity: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, capacity)
    allocate(arena, 16).view[-1] = 1


@pytest.mark.parametrize("more", [PAGE_BYTES, 2 * HUGE_PAGE_BYTES])
def test_mapping_beyond_the_end_is_rejected(arena: Arena, more: int) -> None:
    descriptor = os.dup(arena.fd)
    with pytest.raises(ArenaError, match="cannot map"):
        ArenaMap(descriptor, arena.capacity + more)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("capacity", [PAGE_BYTES, 2 * HUGE_PAGE_BYTES])
def test_close_unmaps_and_is_idempotent(capacity: int) -> None:
    before, open_before = mappings(), descriptors()
    arena = Arena.create(capacity)
    engine = ArenaMap(os.dup(arena.fd), arena.capacity)
    closed = [arena.fd, engine.fd]
    assert mappings() == before + 2
    for mapped in (arena, engine, arena, engine):
        mapped.close()
    assert mappings() == before
    assert descriptors() == open_before
    for descriptor in closed:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize("capacity", [PAGE_BYTES, 2 * HUGE_PAGE_BYTES])
def test_view_keeps_a_closed_arena_mapped(capacity: int) -> None:
    before = mappings()
    arena = Arena.create(capacity)
    lease = allocate(arena, 1)
    view = lease.view
    arena.close()
    view[:3] = b"kvt"
    assert (bytes(view[:3]), mappings()) == (b"kvt", before + 1)
    lease.release()
    del view, lease, arena
    assert mappings() == before


@pytest.mark.parametrize("capacity", [4 * PAGE_BYTES, 2 * HUGE_PAGE_BYTES])
def test_tensor_shares_the_memory_and_keeps_it_mapped(capacity: int) -> None:
    torch = pytest.importorskip("torch")
    before = mappings()
    arena = Arena.create(capacity)
    engine = ArenaMap(os.dup(arena.fd), arena.capacity)
    page = engine.tensor()[PAGE_BYTES : 2 * PAGE_BYTES]
    page.fill_(9)
    assert page.dtype == torch.uint8
    assert bytes(arena.view(PAGE_BYTES, PAGE_BYTES)) == bytes([9]) * PAGE_BYTES
    arena.close()
    engine.close()
    # Check before reading: reading an unmapped page would crash the test process.
    assert mappings() == before + 1
    assert int(page.sum()) == 9 * PAGE_BYTES
    del page, engine, arena
    assert mappings() == before


# Limits.


@pytest.fixture
def strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the arena see strict overcommit accounting."""
    setting = tmp_path / "overcommit_memory"
    setting.write_text("2\n")
    monkeypatch.setattr(arena_module, "OVERCOMMIT", setting)


@pytest.mark.usefixtures("strict")
def test_strict_overcommit_allocates_memory_before_leasing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # No memory is available when the arena is created.
    monkeypatch.setattr("kvtier.memory.arena.fill", lambda *_: None)
    arena = Arena.create(16 * PAGE_BYTES)
    first, second = arena.allocate(PAGE_BYTES), arena.allocate_all(PAGE_BYTES, 3)
    assert os.fstat(arena.fd).st_blocks * 512 == 4 * PAGE_BYTES
    for lease in (first, *second):
        assert lease is not None
        lease.release()
    arena.allocate(2 * PAGE_BYTES)
    assert os.fstat(arena.fd).st_blocks * 512 == 4 * PAGE_BYTES
    arena.close()


@pytest.mark.usefixtures("strict")
def test_no_lease_if_memory_cannot_be_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    arena = Arena.create(16 * PAGE_BYTES)
    held = allocate(arena, 1)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert arena.allocate(PAGE_BYTES) is None
    assert arena.allocate_all(PAGE_BYTES, 3) == []
    assert (arena.used, arena.leases) == (PAGE_BYTES, 1)
    held.release()
    assert arena.allocate(PAGE_BYTES) is not None  # This page is allocated already.
    arena.close()


def test_unused_capacity_is_not_committed() -> None:
    before = _committed()
    arena = Arena.create(1 << 40)
    assert _committed() - before < 1 << 36
    arena.close()


def _committed() -> int:
    """Return the memory committed by the system, in bytes."""
    match = re.search(r"^Committed_AS:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


# Huge pages.


@pytest.fixture
def huge_pages() -> Iterator[int]:
    """Reserve eight more huge pages. Return the number of available ones."""
    count = HUGE_PAGE_COUNTS / "nr_hugepages"
    try:
        before = int(count.read_text())
        count.write_text(str(before + 8))
    except OSError as error:
        pytest.skip(f"cannot set the number of huge pages: {error}")
    try:
        if available_huge_pages() < 8:
            pytest.skip("the system has no eight free huge pages")
        yield available_huge_pages()
    finally:
        count.write_text(str(before))


def available_huge_pages() -> int:
    try:
        free, reserved = (
            int((HUGE_PAGE_COUNTS / name).read_text()) for name in ("free_hugepages", "resv_hugepages")
        )
    except OSError:
        return 0
    return free - reserved


def test_arena_uses_huge_pages(huge_pages: int) -> None:
    arena = Arena.create(HUGE_PAGE_BYTES + 1, huge=True, fallback=False)
    assert (arena.capacity, arena.page_bytes) == (2 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
    lease = allocate(arena, 1)
    lease.view[:] = bytes([3]) * PAGE_BYTES
    engine = ArenaMap(os.dup(arena.fd), arena.capacity)
    assert bytes(engine.view(0, PAGE_BYTES)) == bytes(lease.view)
    smaps = Path("/proc/self/smaps").read_text()
    page_sizes = re.findall(r"memfd:kvtier-arena(?:.*\n)+?KernelPageSize:\s+(\d+) kB", smaps)
    assert page_sizes == ["2048", "2048"]
    assert available_huge_pages() == huge_pages - 2
    engine.close()
    arena.close()
    assert available_huge_pages() == huge_pages


def test_huge_pages_reserved_by_others_are_not_available(huge_pages: int) -> None:
    first = Arena.create(huge_pages * HUGE_PAGE_BYTES, huge=True, fallback=False)
    with pytest.raises(ArenaError, match="1 huge pages of 2 MiB are needed and 0 are free"):
        Arena.create(1, huge=True, fallback=False)
    first.close()


def test_falls_back_to_normal_pages_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    needed = available_huge_pages() + 4096
    with caplog.at_level(logging.WARNING, "kvtier"):
        arena = Arena.create(needed * HUGE_PAGE_BYTES, huge=True)
    assert (arena.page_bytes, arena.capacity) == (PAGE_BYTES, needed * HUGE_PAGE_BYTES)
    assert f"{needed} huge pages of 2 MiB are needed" in caplog.text
    assert "using normal pages" in caplog.text
    allocate(arena, 1).view[0] = 1
    arena.close()


def test_error_without_huge_pages_and_fallback() -> None:
    needed = available_huge_pages() + 4096
    with pytest.raises(ArenaError) as refused:
        Arena.create(needed * HUGE_PAGE_BYTES, huge=True, fallback=False)
    assert f"{needed} huge pages of 2 MiB are needed" in str(refused.value)
    assert "fallback: true" in str(refused.value)


@pytest.fixture
def huge_page_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten huge pages: three in use, two reserved."""
    for name, count in (("nr_hugepages", 10), ("free_hugepages", 7), ("resv_hugepages", 2)):
        (tmp_path / name).write_text(f"{count}\n")
    monkeypatch.setattr(arena_module, "_HUGE_PAGE_COUNTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("default_kib", [2048, 1048576])
def test_suggested_command_keeps_pages_of_others(
    huge_page_counts: Path, monkeypatch: pytest.MonkeyPatch, default_kib: int
) -> None:
    meminfo = huge_page_counts / "meminfo"
    meminfo.write_text(f"MemTotal: 1 kB\nHugepagesize:    {default_kib:>7} kB\n")
    monkeypatch.setattr(arena_module, "_MEMINFO", meminfo)
    remedy = (
        "sysctl -w vm.nr_hugepages=4101"
        if default_kib == 2048
        else f"echo 4101 > {huge_page_counts}/nr_hugepages"
    )
    with pytest.raises(ArenaError) as refused:
        Arena.create(4096 * HUGE_PAGE_BYTES, huge=True, fallback=False)
    assert "4096 huge pages of 2 MiB are needed and 5 are free" in str(refused.value)
    assert f"run `{remedy}`" in str(refused.value)


def test_error_on_a_kernel_without_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_HUGE_PAGE_COUNTS", tmp_path / "absent")
    needed = available_huge_pages() + 4096
    with pytest.raises(ArenaError, match="this kernel does not support them"):
        Arena.create(needed * HUGE_PAGE_BYTES, huge=True, fallback=False)
