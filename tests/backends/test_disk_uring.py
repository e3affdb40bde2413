"""The disk backend with io_uring, and its fallback to threads."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from kvtier import native
from kvtier.backends.disk.backend import object_path
from kvtier.errors import TierError
from kvtier.memory.arena import Arena
from kvtier.testing.backend import blank, make_key, noise, same
from kvtier.tiers.seal import Seal
from tests.rigs.chunks import FAILED, MISS, OK, chunks, disk, disk_engines, filled, opened
from tests.rigs.composed_backends import SealedBackend
from tests.rigs.open_files import open_files

pytestmark = pytest.mark.anyio

PAGE = 4096

needs_ring = pytest.mark.skipif("uring" not in disk_engines(), reason="no io_uring here")


def refuse(number: int):
    def make(depth: int) -> None:
        raise OSError(number, os.strerror(number))

    return make


# Selection.


@needs_ring
async def test_auto_uses_io_uring_if_available(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvtier"):
        async with opened(disk(tmp_path)) as backend:
            assert (await backend.check()).startswith("io_uring, ")
    assert not caplog.records


async def test_uses_threads_if_configured(tmp_path: Path) -> None:
    async with opened(disk(tmp_path, io="threads", direct=False)) as backend:
        assert await backend.check() == "threads, through the page cache"
        names = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
        assert "kvtier-disk" not in names


@needs_ring
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP])
async def test_falls_back_to_threads_if_the_kernel_lacks_io_uring(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.core, "DiskEngine", refuse(number))
    with caplog.at_level(logging.INFO, "kvtier"):
        async with opened(disk(tmp_path)) as backend:
            assert (await backend.check()).startswith("threads, ")
            assert list(await backend.put([(make_key(1), filled(PAGE))])) == [OK]
            assert list(await backend.get([(make_key(1), blank(PAGE))])) == [OK]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"tier 'ssd': io_uring is unavailable ({os.strerror(number)}); using threads")
    ]


async def test_falls_back_to_threads_without_the_native_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_problem", "it was not built")
    async with opened(disk(tmp_path)) as backend:
        assert (await backend.check()).startswith("threads, ")


@needs_ring
async def test_io_uring_setting_fails_if_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.core, "DiskEngine", refuse(errno.EPERM))
    with pytest.raises(TierError) as refused:
        await disk(tmp_path, io="uring").open()
    assert str(refused.value) == (
        "tier 'ssd': io_uring is unavailable (Operation not permitted): enable it (`kvtier doctor` "
        "shows how), or set the tier's `io` to auto"
    )
    async with opened(disk(tmp_path, io="auto")):
        pass  # The failed open released the lock.


# Batches.


@needs_ring
async def test_event_loop_wakes_up_once_per_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wakeups = 0

    class Counted:
        def __init__(self, depth: int, engine: Any = native.core.DiskEngine) -> None:
            self.engine = engine(depth)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

        def finished(self) -> Any:
            nonlocal wakeups
            wakeups += 1
            return self.engine.finished()

    monkeypatch.setattr(native.core, "DiskEngine", Counted)
    async with opened(disk(tmp_path, concurrency=3)) as backend:
        items = [(make_key(number), filled(PAGE)) for number in range(20)]
        assert list(await backend.put(items)) == [OK] * 20
        assert wakeups == 1
        assert list(await backend.get(items)) == [OK] * 20
        assert wakeups == 2


@needs_ring
async def test_directory_in_place_of_a_file_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(disk(tmp_path)) as backend:
        object_path(tmp_path, make_key(1)).mkdir(parents=True)
        length = object_path(tmp_path, make_key(1)).stat().st_size
        assert list(await backend.put([(make_key(1), filled(PAGE)), (make_key(2), filled(PAGE))])) == [
            FAILED,
            OK,
        ]
        if length % PAGE == 0 and length:
            items = [(make_key(1), blank(length)), (make_key(2), blank(PAGE)), (make_key(3), blank(PAGE))]
            assert list(await backend.get(items)) == [FAILED, OK, MISS]
    assert "tier 'ssd' cannot write: [Errno 21] Is a directory" in caplog.text
    assert not list(tmp_path.rglob("*.tmp"))


# Memory during a transfer.


@needs_ring
async def test_buffer_is_held_until_the_call_returns(tmp_path: Path) -> None:
    async with opened(disk(tmp_path, concurrency=1)) as backend:
        view = blank(64 * PAGE)
        call = asyncio.ensure_future(backend.put([(make_key(1), view)]))
        await asyncio.sleep(0)
        with pytest.raises(BufferError):
            view.release()
        assert list(await call) == [OK]
        view.release()


@needs_ring
@pytest.mark.parametrize("direct", [True, False])
async def test_payloads_are_hashed_as_they_arrive(tmp_path: Path, direct: bool) -> None:
    items = chunks(range(4), 5 << 20)
    async with opened(disk(tmp_path, io="uring", direct=direct)) as backend:
        sealed = Seal(backend)
        assert list(await sealed.put(items)) == [OK] * 4
        with object_path(tmp_path, items[1][0]).open("r+b") as damaged:
            damaged.seek(5_000_000)
            damaged.write(bytes(8))
        blanks = [(key, blank(len(view))) for key, view in items]
        outcomes = [outcome.value for outcome in await backend.get(blanks)]
        assert outcomes == ["verified", "ok", "verified", "verified"]
        assert list(await sealed.get(blanks)) == [OK, MISS, OK, OK]
        assert all(same(blanks[at][1], items[at][1]) for at in (0, 2, 3))
        assert not object_path(tmp_path, items[1][0]).exists()


@needs_ring
@pytest.mark.parametrize("io", disk_engines())
async def test_objects_in_a_registered_arena(tmp_path: Path, io: str) -> None:
    arena = Arena.create(8 << 20)
    async with opened(disk(tmp_path, io=io)) as backend:
        await backend.register(arena)
        leases = [lease for _ in range(8) if (lease := arena.allocate(20 * PAGE)) is not None]
        for number, lease in enumerate(leases):
            lease.view[:] = noise(b"%d" % number, 20 * PAGE)
        items = [(make_key(number), lease.view) for number, lease in enumerate(leases)]
        assert list(await backend.put(items)) == [OK] * 8
        for lease in leases:
            lease.view[:] = bytes(20 * PAGE)
        assert list(await backend.get(items)) == [OK] * 8
        assert all(same(lease.view, noise(b"%d" % number, 20 * PAGE)) for number, lease in enumerate(leases))
    del items
    arena.close()


@needs_ring
async def test_cancelling_twice_still_waits_for_transfers(tmp_path: Path) -> None:
    async with opened(disk(tmp_path, concurrency=1)) as backend:
        # Retry, because all writes may finish before the cancellation if this process is delayed.
        for attempt in range(100):
            items = [(make_key(attempt * 100 + number), blank(16 * PAGE)) for number in range(32)]
            call = asyncio.ensure_future(backend.put(items))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            for _, view in items:
                view.release()  # Raises if it is still exported.
            assert not list(tmp_path.rglob("*.tmp"))
            if not all(await backend.contains([key for key, _ in items])):
                return
    pytest.fail("pending writes were not cancelled")


@needs_ring
async def test_close_waits_for_pending_calls(tmp_path: Path) -> None:
    backend = disk(tmp_path, concurrency=2)
    await backend.open()
    items = [(make_key(number), blank(64 * PAGE)) for number in range(8)]
    call = asyncio.ensure_future(backend.put(items))
    await asyncio.sleep(0)
    await backend.close()
    assert list(await call) == [OK] * 8


@needs_ring
async def test_repeated_open_and_close_leaks_no_descriptors(tmp_path: Path) -> None:
    counts = []
    for number in range(10):
        async with opened(SealedBackend(disk(tmp_path))) as backend:
            assert list(await backend.put(chunks([number]))) == [OK]
        del backend
        counts.append(len(open_files()))
    assert counts[-1] <= counts[1], counts
