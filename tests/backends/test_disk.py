"""The disk backend beyond the conformance suite: its folder, its lock and its errors."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import stat
import sys
import threading
from pathlib import Path

import anyio
import pytest
from aiofiles.threadpool.binary import AsyncFileIO

from kvtier.backends.disk import folder
from kvtier.backends.disk.backend import lock_holder, object_path, walk
from kvtier.backends.disk.folder import ObjectFolder
from kvtier.backends.disk.scan import FolderScan
from kvtier.concurrency.threads import WORKER_NAME, WorkerThreads
from kvtier.errors import IncompleteScan, TierError
from kvtier.memory.keys import ChunkKey
from kvtier.testing.backend import blank, make_key, same
from tests.rigs.chunks import FAILED, FULL, MISS, OK, chunks, disk, disk_engines, filled, opened
from tests.rigs.composed_backends import SealedBackend
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

PAGE = 4096


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.fixture(params=disk_engines())
def io(request: pytest.FixtureRequest) -> str:
    return request.param


# Files.


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, 3 * PAGE, 3 * PAGE + 5])
async def test_each_object_is_one_file(tmp_path: Path, length: int, direct: bool, io: str) -> None:
    async with opened(disk(tmp_path, direct=direct, io=io)) as backend:
        key, value = make_key(1), filled(length)
        assert list(await backend.put([(key, value)])) == [OK]
        path = tmp_path / key.hex()[:3] / f"{key.hex()}.kv"
        assert path == object_path(tmp_path, key)
        assert path.read_bytes() == value
        assert files(tmp_path) == sorted([".lock", str(path.relative_to(tmp_path))])
        assert list(walk(tmp_path)) == [path]


async def test_files_are_private_to_the_user(tmp_path: Path, io: str) -> None:
    async with opened(disk(tmp_path / "made", io=io)) as backend:
        await backend.put([(make_key(1), filled(PAGE))])
        for path in [tmp_path / "made", *(tmp_path / "made").rglob("*")]:
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


async def test_get_updates_mtime(tmp_path: Path, io: str) -> None:
    async with opened(disk(tmp_path, io=io)) as backend:
        key = make_key(1)
        await backend.put([(key, filled(PAGE))])
        os.utime(object_path(tmp_path, key), (1e9, 1e9))
        ((stored,),) = [batch async for batch in backend.scan()]
        assert stored.last_used == 1e9
        await backend.get([(key, blank(PAGE))])
        assert object_path(tmp_path, key).stat().st_mtime > 1.6e9


async def test_batch_is_one_executor_call_per_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(disk(tmp_path, io="threads", concurrency=3)) as backend:
        calls = 0
        real = WorkerThreads.__call__

        def counted(threads: WorkerThreads, function) -> asyncio.Future[None]:
            nonlocal calls
            calls += 1
            return real(threads, function)

        with monkeypatch.context() as patched:
            patched.setattr(WorkerThreads, "__call__", counted)
            items = [(make_key(number), filled(PAGE)) for number in range(20)]
            assert list(await backend.put(items)) == [OK] * 20
            assert calls == 3
            assert list(await backend.contains([key for key, _ in items])) == [True] * 20
            assert calls == 4


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == WORKER_NAME}


@pytest.fixture(autouse=True)
def _keep_idle_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.concurrency.threads.IDLE_SECONDS", 300.0)


async def wait_until_ended(threads: set[threading.Thread]) -> None:
    await until(lambda: not any(thread.is_alive() for thread in threads))


async def test_threads_end_with_the_backend(tmp_path: Path, io: str) -> None:
    before = workers()
    async with opened(disk(tmp_path, concurrency=5, io=io)) as backend:
        items = [(make_key(number), filled(PAGE)) for number in range(20)]
        await backend.put(items)
        await backend.contains([key for key, _ in items])
        threads = workers() - before
        assert 1 <= len(threads) <= (1 if io == "uring" else 5)  # An idle thread takes the next call.
    await wait_until_ended(threads)


# O_DIRECT.


def record_open_flags(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    recorded_flags: list[int] = []
    real = os.open

    def recording_open(path, flags, *more, **named) -> int:
        if str(path).endswith((".kv", ".tmp")):
            recorded_flags.append(flags & os.O_DIRECT)
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", recording_open)
    return recorded_flags


@pytest.mark.parametrize(
    ("direct", "length", "shift", "expected"),
    [
        (True, 2 * PAGE, 0, True),
        (True, 2 * PAGE, 512, False),
        (True, 2 * PAGE + 512, 0, False),
        (False, 2 * PAGE, 0, False),
    ],
)
async def test_aligned_objects_bypass_the_page_cache(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    direct: bool,
    length: int,
    shift: int,
    expected: bool,
) -> None:
    async with opened(disk(tmp_path, io="threads", direct=direct)) as backend:
        if direct and "O_DIRECT" not in await backend.check():
            pytest.skip("the file system of the temporary folder has no O_DIRECT")
        recorded_flags = record_open_flags(monkeypatch)
        view = blank(length + shift)[shift:]
        assert list(await backend.put([(make_key(1), view)])) == [OK]
        assert list(await backend.get([(make_key(1), view)])) == [OK]
        assert [bool(flag) for flag in recorded_flags if recorded_flags] == [expected, expected] or (
            # The first open fails because the folder does not exist yet.
            [bool(flag) for flag in recorded_flags] == [expected] * 3
        )


async def test_falls_back_to_the_page_cache_without_o_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(path, flags, *more, **named) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    async with opened(disk(tmp_path, io="threads")) as backend:
        items = [(make_key(number), filled(PAGE)) for number in range(3)]
        assert list(await backend.put(items)) == [OK] * 3
        assert list(await backend.get([(make_key(0), blank(PAGE))])) == [OK]
    assert caplog.messages == [
        f"tier 'ssd': the file system of {tmp_path} does not support O_DIRECT; using the page cache"
    ]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("step", [1000, PAGE])
async def test_short_reads_and_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, step: int
) -> None:
    calls = []

    def shortened(real):
        def move(descriptor, views, offset):
            calls.append(offset)
            aligned = offset % PAGE == 0 and step % PAGE == 0
            if folder.fcntl.fcntl(descriptor, folder.fcntl.F_GETFL) & os.O_DIRECT and not aligned:
                # An almost full medium accepts part of a page, and the call succeeds.
                head = bytes(views[0][:step])
                flags = folder.fcntl.fcntl(descriptor, folder.fcntl.F_GETFL)
                folder.fcntl.fcntl(descriptor, folder.fcntl.F_SETFL, flags & ~os.O_DIRECT)
                try:
                    return real(descriptor, [head if real is os_pwritev else views[0][:step]], offset)
                finally:
                    folder.fcntl.fcntl(descriptor, folder.fcntl.F_SETFL, flags)
            return real(descriptor, [views[0][:step]], offset)

        return move

    os_pwritev = os.pwritev
    async with opened(disk(tmp_path, io="threads", direct=direct)) as backend:
        monkeypatch.setattr(os, "pwritev", shortened(os.pwritev))
        monkeypatch.setattr(os, "preadv", shortened(os.preadv))
        key, value, view = make_key(1), filled(3 * PAGE), blank(3 * PAGE)
        assert list(await backend.put([(key, value)])) == [OK]
        assert list(await backend.get([(key, view)])) == [OK]
        assert same(view, value)
    assert len(calls) > 4


# The lock.


async def open_and_close(path: Path) -> None:
    await (await ObjectFolder.open("ssd", path, direct=True)).close()


async def test_lock_holder_is_none_for_an_unused_folder(tmp_path: Path) -> None:
    assert lock_holder(tmp_path) is None
    await open_and_close(tmp_path)
    assert (tmp_path / ".lock").exists()
    assert lock_holder(tmp_path) is None


async def test_second_open_fails_and_names_the_lock_holder(tmp_path: Path) -> None:
    async with opened(disk(tmp_path)):
        holder = lock_holder(tmp_path)
        assert holder is not None
        assert re.fullmatch(
            rf"process {os.getpid()} on host {re.escape(socket.gethostname())} "
            r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC",
            holder,
        )
        with pytest.raises(TierError) as refused:
            await disk(tmp_path).open()
        assert str(refused.value) == (
            f"tier 'ssd': path {tmp_path} is in use by {holder}: stop that process, or set this tier's "
            "`path` to a folder of its own"
        )
        assert lock_holder(tmp_path) == holder, "the failed open released the lock"
    async with opened(disk(tmp_path)):
        pass


OPEN = """
import os, sys
from pathlib import Path
import aiofiles.os, anyio
from kvtier.backends.disk.folder import ObjectFolder

async def main():
    await aiofiles.os.stat("/")  # Import everything as this user.
    if sys.argv[2:]:
        os.setuid(int(sys.argv[2]))
    await ObjectFolder.open("ssd", Path(sys.argv[1]), direct=True)

anyio.run(main)
"""
"""A program that opens a folder, optionally as another user."""


async def test_open_fails_if_another_process_holds_the_lock(tmp_path: Path) -> None:
    async with opened(disk(tmp_path)):
        result = await anyio.run_process([sys.executable, "-c", OPEN, str(tmp_path)], check=False)
    assert result.returncode
    assert f"is in use by process {os.getpid()} on host".encode() in result.stderr


async def test_lock_holder_does_not_block_open(tmp_path: Path) -> None:
    stop = threading.Event()
    holders = set()

    def inspect() -> None:
        while not stop.is_set():
            holders.add(lock_holder(tmp_path))

    await open_and_close(tmp_path)
    thread = threading.Thread(target=inspect)
    thread.start()
    try:
        for _ in range(50):
            await open_and_close(tmp_path)
    finally:
        stop.set()
        thread.join()
    assert holders, "it was asked meanwhile"
    assert lock_holder(tmp_path) is None


async def test_lock_holder_without_a_name(tmp_path: Path) -> None:
    async with opened(disk(tmp_path)):
        (tmp_path / ".lock").write_text("")
        assert lock_holder(tmp_path) == "another process"


# Invalid paths.


async def open_error(path: Path) -> str:
    before = workers()
    with pytest.raises(TierError) as refused:
        await disk(path).open()
    await wait_until_ended(workers() - before)
    return str(refused.value)


async def test_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        message = await open_error(path)
        assert message.startswith(f"tier 'ssd': path {path} cannot be used (")
        assert message.endswith("set the tier's `path` to a folder that this user can write to")


async def test_path_without_write_permission_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        for parent in tmp_path.parents[:3]:
            parent.chmod(0o755)
        command = [sys.executable, "-c", OPEN, str(tmp_path), "65534"]
        result = await anyio.run_process(command, check=False)
        assert (
            f"TierError: tier 'ssd': path {tmp_path} cannot be used (Permission denied)"
            in result.stderr.decode()
        )
    else:
        tmp_path.chmod(0o500)
        assert "cannot be used (Permission denied)" in await open_error(tmp_path)


async def test_read_only_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The lock file exists already; only the trial write fails.
    await open_and_close(tmp_path)

    async def refuse(file, data) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(AsyncFileIO, "write", refuse)
    assert "cannot be used (Read-only file system)" in await open_error(tmp_path)
    monkeypatch.undo()
    assert lock_holder(tmp_path) is None, "the lock was not released"


async def test_opens_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(disk(tmp_path)) as backend:
        await backend.put([(make_key(1), filled(PAGE))])

    async def refuse(file, data) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(AsyncFileIO, "write", refuse)
    async with opened(disk(tmp_path)) as backend:
        assert list(await backend.get([(make_key(1), blank(PAGE))])) == [OK]
    assert not (tmp_path / ".probe").exists()


# Errors of the medium.


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (errno.ENOSPC, FULL),
        (errno.EDQUOT, FULL),
        (errno.EIO, FAILED),
        (errno.EROFS, FAILED),
        (errno.EFBIG, FAILED),
    ],
)
@pytest.mark.parametrize("after", [0, 1])
async def test_failed_write_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, outcome: object, after: int
) -> None:
    async with opened(disk(tmp_path, io="threads")) as backend:
        key, old = make_key(1), filled(4 * PAGE, b"old")
        assert list(await backend.put([(key, old)])) == [OK]
        real, calls = os.pwritev, 0

        def write(descriptor, views, offset) -> int:
            nonlocal calls
            calls += 1
            if calls > after:
                raise OSError(number, os.strerror(number))
            return real(descriptor, [views[0][:PAGE]], offset)

        monkeypatch.setattr(os, "pwritev", write)
        assert list(await backend.put([(key, filled(4 * PAGE, b"new"))])) == [outcome]
        view = blank(4 * PAGE)
        assert list(await backend.get([(key, view)])) == [OK]
        assert same(view, old)
        assert len(files(tmp_path)) == 2


async def test_failed_read_fails_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    async with opened(disk(tmp_path, io="threads")) as backend:
        items = [(make_key(number), filled(PAGE)) for number in range(3)]
        await backend.put(items)

        def fail(descriptor, views, offset) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
        assert list(await backend.get(items)) == [FAILED] * 3
    assert caplog.messages == ["tier 'ssd' cannot read: [Errno 5] Input/output error"]


async def test_truncated_file_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(disk(tmp_path, io="threads")) as backend:
        await backend.put([(make_key(1), filled(4 * PAGE))])
        monkeypatch.setattr(os, "preadv", lambda descriptor, views, offset: 0 if offset else PAGE)
        assert list(await backend.get([(make_key(1), blank(4 * PAGE))])) == [MISS]


async def test_get_succeeds_if_mtime_cannot_be_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(disk(tmp_path, io="threads")) as backend:
        await backend.put([(make_key(1), filled(PAGE))])

        def refuse(descriptor) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(os, "utime", refuse)
        assert list(await backend.get([(make_key(1), blank(PAGE))])) == [OK]


async def test_failed_delete_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(disk(tmp_path)) as backend:
        object_path(tmp_path, make_key(1)).mkdir(parents=True)
        await backend.delete([make_key(1)])
    assert "tier 'ssd' cannot delete" in caplog.text


# Other files in the folder.


async def test_foreign_files_are_kept_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = make_key(1)
    name = key.hex()
    foreign = [
        "README",
        "notes/inner.kv",
        f"{name[:3]}/{name[:60]}.kv",
        f"{name[:3]}/{name}.kv.bak",
        f"{name[:3]}/{name.upper()}.kv" if name.upper() != name else "X",
        f"{'fff' if name[:3] != 'fff' else '000'}/{name}.kv",
        f"{name[:3]}/something.tmp",
    ]
    async with opened(disk(tmp_path)) as backend:
        await backend.put([(key, filled(PAGE))])
        for path in foreign:
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text("not kvtier's")
        for number, make in ((2, os.mkfifo), (3, os.mkdir)):
            path_of_other = object_path(tmp_path, make_key(number))
            path_of_other.parent.mkdir(exist_ok=True)
            make(path_of_other)
        before = files(tmp_path)
        result = [stored.key async for batch in backend.scan() for stored in batch]
        assert result == [key]
        assert files(tmp_path) == before
        assert list(walk(tmp_path)) == [object_path(tmp_path, key)]
    (record,) = caplog.records
    assert "9 files in" in record.getMessage()


async def test_scan_deletes_leftover_temporary_files_but_not_active_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = make_key(1)
    folder = tmp_path / key.hex()[:3]
    folder.mkdir()
    leftover = folder / f"{key.hex()}.0badc0de-7.tmp"
    leftover.write_text("half a chu")
    resume = threading.Event()
    real = os.pwritev

    def slowly(descriptor, views, offset) -> int:
        assert resume.wait(60)
        return real(descriptor, views, offset)

    async with opened(disk(tmp_path, io="threads")) as backend:
        monkeypatch.setattr(os, "pwritev", slowly)
        async with anyio.create_task_group() as group:
            outcomes = []

            async def put() -> None:
                outcomes.extend(await backend.put([(key, filled(PAGE))]))

            group.start_soon(put)
            await until(lambda: len(list(folder.iterdir())) >= 2)
            assert [batch async for batch in backend.scan()] == []
            assert not leftover.exists()
            resume.set()
        assert outcomes == [OK]
        assert files(tmp_path) == sorted([".lock", str(object_path(tmp_path, key).relative_to(tmp_path))])


async def test_scan_lists_many_objects_in_batches(tmp_path: Path, io: str) -> None:
    async with opened(disk(tmp_path, io=io)) as backend:
        items = [(make_key(number), memoryview(b"x" * (number % 7 + 1))) for number in range(2500)]
        assert set(await backend.put(items)) == {OK}
        batches = [batch async for batch in backend.scan()]
        assert len(batches) == 3
        assert {stored.key: stored.length for batch in batches for stored in batch} == {
            key: len(value) for key, value in items
        }


async def test_scan_leaves_out_what_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(disk(tmp_path)) as backend:
        items = [(make_key(number), filled(PAGE)) for number in range(10)]
        await backend.put(items)
        describe = FolderScan.describe

        def delete_first(scan: FolderScan, path: Path):
            path.unlink()
            return describe(scan, path)

        monkeypatch.setattr(FolderScan, "describe", delete_first)
        assert [stored async for batch in backend.scan() for stored in batch] == []


async def test_unreadable_files_are_skipped_by_scan_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = SealedBackend(disk(tmp_path))
    async with opened(sealed):
        await sealed.put(chunks(range(2)))
        real = os.pread

        def fail(descriptor, length, offset) -> bytes:
            head = real(descriptor, length, offset)
            if make_key(1) in head:
                raise OSError(errno.EIO, "Input/output error")
            return head

        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", fail)
            scanned: list[ChunkKey] = []

            async def scan() -> None:
                async for batch in sealed.scan():
                    scanned.extend(stored.key for stored in batch)

            with pytest.raises(IncompleteScan, match=r"1 files in .* \(Input/output error\)") as incomplete:
                await scan()
            assert scanned == [make_key(0)]
            assert incomplete.value.unseen_bytes == object_path(tmp_path, make_key(1)).stat().st_size
        scanned += [stored.key async for batch in sealed.scan() for stored in batch]
        assert sorted(scanned) == sorted([make_key(0), make_key(1)])
