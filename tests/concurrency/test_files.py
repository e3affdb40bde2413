"""Lock files: exclusive, private, named after their holder, and released in every case."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvtier.concurrency.files import FileLocked, LockFile, holder_of
from kvtier.testing.cancelling import cancelled_at

pytestmark = pytest.mark.anyio


async def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert holder_of(path) is None
    lock = await LockFile.acquire(path, "the first one")
    assert holder_of(path) == path.read_text() == "the first one"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileLocked) as refused:
        await LockFile.acquire(path, "another")
    assert refused.value.holder == "the first one"
    await lock.release()
    assert holder_of(path) is None
    lock = await LockFile.acquire(path, "another")
    assert path.read_text() == "another"
    await lock.release()


async def test_holder_without_a_name_is_another_process(tmp_path: Path) -> None:
    lock = await LockFile.acquire(tmp_path / "lock", "")
    assert holder_of(tmp_path / "lock") == "another process"
    with pytest.raises(FileLocked, match="another process"):
        await LockFile.acquire(tmp_path / "lock", "me")
    await lock.release()


async def test_lock_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await LockFile.acquire(tmp_path / "none" / "lock", "me")
    assert holder_of(tmp_path / "none" / "lock") is None


@pytest.mark.parametrize("step", range(1, 9))
async def test_cancelled_acquire_does_not_leave_the_file_locked(tmp_path: Path, step: int) -> None:
    async def acquire_and_release() -> None:
        await (await LockFile.acquire(tmp_path / "lock", "me")).release()

    await cancelled_at(step, acquire_and_release, through="scope")
    assert holder_of(tmp_path / "lock") is None
