"""No page is unmapped under a view, and pages are as large as the system has them."""

from __future__ import annotations

import gc
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvtier import arena as arena_module
from kvtier import native
from kvtier.arena import HUGE_PAGE_BYTES, Arena, ArenaMap
from kvtier.errors import ArenaError
from kvtier.slices import PAGE_BYTES
from tests.core.leases import allocate
from tests.open_files import open_files

KERNEL = tuple(int(number) for number in platform.release().split(".")[:2])
HUGE_PAGE_COUNTS = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


def mappings() -> int:
    """How many arenas are mapped into this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:kvtier-arena")


def descriptors() -> int:
    return len(open_files())


def taken(arena: Arena) -> int:
    arena.settle()
    return os.fstat(arena.fd).st_blocks * 512


@pytest.mark.usefixtures("way")
def test_memory_is_taken_a_little_before_it_is_used() -> None:
    arena = Arena.create(1 << 40)
    ahead = native.core.LargePages.ahead if native.available() else 0
    assert taken(arena) <= ahead
    allocate(arena, 1).view[0] = 1
    assert 0 < taken(arena) <= HUGE_PAGE_BYTES + ahead
    arena.allocate_all(16 * PAGE_BYTES, 1024)
    assert taken(arena) <= 32 * HUGE_PAGE_BYTES + HUGE_PAGE_BYTES + ahead
    arena.close()


@pytest.mark.skipif(not native.available(), reason=native.summary())
@pytest.mark.skipif(KERNEL < (6, 1), reason="this kernel has no MADV_COLLAPSE")
def test_memory_comes_in_large_pages_and_keeps_what_lies_in_it() -> None:
    arena = Arena.create(64 << 20)
    lease = arena.allocate(arena.capacity)
    assert lease is not None
    noise = os.urandom(1 << 20)
    for start in range(0, arena.capacity, len(noise)):
        lease.view[start : start + len(noise)] = noise
    arena.settle()
    assert 0 < arena.large_page_bytes <= arena.capacity
    with closing(ArenaMap(os.dup(arena.fd), arena.capacity)) as engine:
        for start in range(0, arena.capacity, len(noise)):
            assert engine.view(start, len(noise)) == noise
        assert 0 < engine.take_large_pages() <= arena.capacity
        # Mapped by large pages, in either process: the addresses are such that they can be.
        assert min(sizes_in_maps("ShmemPmdMapped")) > 0
    lease.release()
    arena.close()


@pytest.mark.skipif(not native.available(), reason=native.summary())
@pytest.mark.skipif(KERNEL < (6, 1), reason="this kernel has no MADV_COLLAPSE")
@pytest.mark.parametrize("together", [False, True])
def test_what_is_used_later_comes_in_large_pages_too(*, together: bool) -> None:
    ahead = native.core.LargePages.ahead
    with closing(Arena.create(2 * ahead)) as arena:
        arena.settle()
        at_first = arena.large_page_bytes
        assert at_first <= ahead
        for _ in range(1 if together else 4):
            arena.allocate_all(8 << 20, 4) if together else arena.allocate(8 << 20)
        arena.settle()
        assert at_first < arena.large_page_bytes <= ahead + (32 << 20)


def sizes_in_maps(what: str) -> list[int]:
    """One of the sizes of each arena that is mapped into this process."""
    sizes, is_arena = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_arena = "memfd:kvtier-arena" in line
        elif is_arena and line.startswith(f"{what}:"):
            sizes.append(int(line.split()[1]) * 1024)
    return sizes


@pytest.mark.parametrize("capacity", [0, -4096, 1 << 62, 1 << 80])
def test_a_capacity_that_cannot_be_had_is_refused(capacity: int) -> None:
    before = descriptors()
    with pytest.raises(ArenaError, match=f"cannot get {capacity} bytes"):
        Arena.create(capacity)
    assert descriptors() == before


def test_another_process_writes_what_we_read(arena: Arena) -> None:
    lease = allocate(arena, 2)
    program = (
        "import sys; from kvtier.arena import ArenaMap\n"
        "fd, capacity, offset, length = map(int, sys.argv[1:])\n"
        "ArenaMap(fd, capacity).view(offset, length)[:] = bytes([7]) * length"
    )
    numbers = [arena.fd, arena.capacity, lease.offset + 5, 4096]
    subprocess.run([sys.executable, "-c", program, *map(str, numbers)], pass_fds=[arena.fd], check=True)
    assert bytes(lease.view) == bytes(5) + bytes([7]) * 4096 + bytes(4096 - 5)


@pytest.mark.parametrize("capacity", [0, 15 * PAGE_BYTES, 17 * PAGE_BYTES])
def test_nobody_can_cut_or_stretch_it(arena: Arena, capacity: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, capacity)
    allocate(arena, 16).view[-1] = 1


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("more", [PAGE_BYTES, 2 * HUGE_PAGE_BYTES])
def test_mapping_more_than_there_is_is_refused(arena: Arena, more: int) -> None:
    descriptor = os.dup(arena.fd)
    with pytest.raises(ArenaError, match="cannot map"):
        ArenaMap(descriptor, arena.capacity + more)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("capacity", [PAGE_BYTES, 2 * HUGE_PAGE_BYTES])
def test_closing_unmaps_and_may_be_repeated(capacity: int) -> None:
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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("capacity", [PAGE_BYTES, 2 * HUGE_PAGE_BYTES])
def test_a_view_keeps_the_closed_arena_mapped(capacity: int) -> None:
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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("capacity", [4 * PAGE_BYTES, 2 * HUGE_PAGE_BYTES])
def test_a_tensor_shares_the_memory_and_keeps_it_mapped(capacity: int) -> None:
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
    # Asked before it is touched: reading a page that is gone would end the tests, not fail this one.
    assert mappings() == before + 1
    assert int(page.sum()) == 9 * PAGE_BYTES
    del page, engine, arena
    assert mappings() == before


# Huge pages.


@pytest.fixture
def huge_pages() -> Iterator[int]:
    """Eight huge pages beyond those that are in use."""
    count = HUGE_PAGE_COUNTS / "nr_hugepages"
    try:
        before = int(count.read_text())
        count.write_text(str(before + 8))
    except OSError as error:
        pytest.skip(f"the number of huge pages cannot be set here: {error}")
    try:
        if available_huge_pages() < 8:
            pytest.skip("the system finds no eight huge pages")
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


def test_huge_pages_are_huge(huge_pages: int) -> None:
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


def test_huge_pages_set_aside_for_another_are_not_free(huge_pages: int) -> None:
    first = Arena.create(huge_pages * HUGE_PAGE_BYTES, huge=True, fallback=False)
    with pytest.raises(ArenaError, match="1 huge pages of 2 MiB are needed and 0 are free"):
        Arena.create(1, huge=True, fallback=False)
    first.close()


def test_without_huge_pages_normal_ones_are_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    needed = available_huge_pages() + 4096
    with caplog.at_level(logging.WARNING, "kvtier"):
        arena = Arena.create(needed * HUGE_PAGE_BYTES, huge=True)
    assert (arena.page_bytes, arena.capacity) == (PAGE_BYTES, needed * HUGE_PAGE_BYTES)
    assert f"{needed} huge pages of 2 MiB are needed" in caplog.text
    assert "going on with normal pages" in caplog.text
    allocate(arena, 1).view[0] = 1
    arena.close()


def test_without_huge_pages_and_fallback_it_says_what_to_type() -> None:
    needed = available_huge_pages() + 4096
    with pytest.raises(ArenaError) as refused:
        Arena.create(needed * HUGE_PAGE_BYTES, huge=True, fallback=False)
    assert f"{needed} huge pages of 2 MiB are needed" in str(refused.value)
    assert "fallback: true" in str(refused.value)


@pytest.fixture
def huge_page_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten huge pages, three of them in use and two set aside."""
    for name, count in (("nr_hugepages", 10), ("free_hugepages", 7), ("resv_hugepages", 2)):
        (tmp_path / name).write_text(f"{count}\n")
    monkeypatch.setattr(arena_module, "_HUGE_PAGE_COUNTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("default_kib", [2048, 1048576])
def test_what_to_type_leaves_others_what_they_have(
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
    assert f"type `{remedy}`" in str(refused.value)


def test_a_kernel_without_huge_pages_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_HUGE_PAGE_COUNTS", tmp_path / "absent")
    needed = available_huge_pages() + 4096
    with pytest.raises(ArenaError, match="this kernel has none"):
        Arena.create(needed * HUGE_PAGE_BYTES, huge=True, fallback=False)
