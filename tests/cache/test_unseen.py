"""A disk tier of which a part cannot be listed at the start: it keeps the rest, and its capacity."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier import Settings, TieredCache
from kvtier.backends.disk import folder as disk_folder
from kvtier.backends.disk.backend import lock_holder
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline import held
from tests.rigs.chunks import FAILED, disk, opened
from tests.rigs.faulty_sources import BUILT_IN
from tests.rigs.small_disk import mounted
from tests.rigs.waiting import until

from .conftest import CHUNK_OBJECT_BYTES, store

pytestmark = pytest.mark.anyio

CAPACITY = 64


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Folders that cannot be listed. No file system fails on demand, and root may list everything."""
    folders: set[Path] = set()
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).resolve() in folders:  # It is listed through its descriptor.
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return folders


def bytes_on_disk(folder: Path) -> int:
    total = 0
    for name in os.listdir(folder):  # noqa: PTH208 - os.scandir fails here
        if (folder / name).is_dir():
            files = os.listdir(folder / name)  # noqa: PTH208
            total += sum((folder / name / file).stat().st_size for file in files)
    return total


Open = Callable[[], AbstractAsyncContextManager[TieredCache]]
Write = Callable[[TieredCache, int, int], Awaitable[list[ChunkKey]]]


@pytest.fixture
def open_cache(settings: Callable[..., Settings]) -> Open:
    # Whatever the disk takes, memory has room. What a scan has found is not evicted at once.
    configured = settings(ram=256, ssd=CAPACITY, disk={"high_watermark": 1.0})
    return lambda: TieredCache.open(configured, plugins=BUILT_IN)


@pytest.fixture
def write(prompt: Callable[..., list[int]]) -> Write:
    """Store a prompt of some chunks, and wait until they are written or given up."""

    async def write_chunks(cache: TieredCache, chunks: int, seed: int) -> list[ChunkKey]:
        keys = store(cache, prompt(256 * chunks, seed))
        assert await cache.drain(30)
        return keys

    return write_chunks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.mark.parametrize("everything", [False, True], ids=["one-folder", "everything"])
async def test_what_cannot_be_listed_counts_as_used(
    open_cache: Open,
    write: Write,
    folder: Path,
    failing: set[Path],
    monkeypatch: pytest.MonkeyPatch,
    everything: bool,
) -> None:
    async with open_cache() as cache:
        await write(cache, 48, 1)
    assert bytes_on_disk(folder) == 48 * CHUNK_OBJECT_BYTES

    lost = folder if everything else next(path for path in sorted(folder.iterdir()) if path.is_dir())
    inside = sum(path.suffix == ".kv" for path in lost.iterdir())
    failing.add(lost)
    monkeypatch.setattr(held, "RETRY_SECONDS", 0.05)
    async with open_cache() as cache:
        tier = cache.lower[0]
        status = tier.status()
        assert f"such as {lost} (Input/output error)" in str(status["error"])
        assert tier.count == (0 if everything else 48 - inside)
        assert tier.used_bytes >= 48 * CHUNK_OBJECT_BYTES
        for seed in range(2, 6):
            await write(cache, 16, seed)
        assert bytes_on_disk(folder) <= CAPACITY * CHUNK_OBJECT_BYTES

        failing.clear()
        await until(lambda: tier.unseen is None)
        assert tier.status()["unseen_bytes"] == 0
        assert tier.used_bytes == bytes_on_disk(folder)


async def test_what_cannot_be_deleted_counts_as_used(
    open_cache: Open, write: Write, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A medium that turns read-only in part keeps what is evicted."""
    real, kept = os.unlink, True

    def unlink(path: Any, **options: Any) -> None:
        if kept and str(path).endswith(".kv"):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        real(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(held, "RETRY_SECONDS", 2.0)
    async with open_cache() as cache:
        tier = cache.lower[0]
        for seed in range(8):
            await write(cache, 16, seed)
        assert bytes_on_disk(folder) <= CAPACITY * CHUNK_OBJECT_BYTES
        assert "(Read-only file system)" in str(tier.status()["error"])
        assert tier.count > CAPACITY // 2, "no more is evicted as long as nothing is deleted"
        # They are still there, so they are found again.
        await until(lambda: tier.unseen is None)
        assert tier.used_bytes == bytes_on_disk(folder)
        kept = False
        keys = await write(cache, 16, 9)
        assert all(key in cache.catalog for key in keys)
        assert tier.used_bytes == bytes_on_disk(folder) <= CAPACITY * CHUNK_OBJECT_BYTES


async def test_folder_that_is_removed_while_in_use(
    open_cache: Open, write: Write, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No chunk is written to a folder that is not locked, and none is reported that is gone."""
    async with open_cache() as cache:
        tier = cache.lower[0]
        await write(cache, 8, 1)
        assert tier.count == 8
        shutil.rmtree(folder)
        folder.mkdir()
        await write(cache, 4, 2)  # The first batch finds out.
        # Until the new folder is listed, nothing is written to it.
        await until(lambda: not tier.count and not tier.unseen_bytes)
        assert f"{folder} was removed or moved while in use" in caplog.text
        keys = await write(cache, 4, 3)
        assert tier.count == 4
        assert lock_holder(folder) is not None
    async with open_cache() as cache:
        assert all(key in cache.catalog for key in keys)


async def test_folder_that_another_process_has_taken(
    open_cache: Open, write: Write, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_cache() as cache:
        await write(cache, 8, 1)
        shutil.rmtree(folder)
        async with opened(disk(folder)):
            await write(cache, 4, 2)
            assert f"path {folder} is in use by process" in caplog.text
            assert not list(folder.glob("*/*.kv"))
            assert "is in use by" in str(cache.lower[0].status()["error"])


async def test_chunks_in_the_folder_that_takes_the_place_of_another(
    open_cache: Open, write: Write, folder: Path
) -> None:
    """Another process has used it meanwhile."""
    async with open_cache() as cache:
        tier = cache.lower[0]
        await write(cache, 8, 1)
        shutil.rmtree(folder)
        async with open_cache() as other:
            theirs = await write(other, 48, 2)
        await write(cache, 4, 3)
        await until(lambda: tier.count == 48 and not tier.unseen_bytes)
        assert all(key in cache.catalog for key in theirs)
        for seed in range(4, 7):
            await write(cache, 16, seed)
        assert tier.used_bytes == bytes_on_disk(folder) <= CAPACITY * CHUNK_OBJECT_BYTES


async def test_folder_that_is_moved_while_in_use(
    open_cache: Open, write: Write, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No write fails, and the next process would find nothing."""
    monkeypatch.setattr(disk_folder, "LOOK_SECONDS", 0.0)
    async with open_cache() as cache:
        tier = cache.lower[0]
        await write(cache, 8, 1)
        folder.rename(folder.with_name("moved"))
        await write(cache, 4, 2)
        await until(lambda: not tier.count and not tier.unseen_bytes)
        await write(cache, 4, 3)
        assert tier.used_bytes == bytes_on_disk(folder) == 4 * CHUNK_OBJECT_BYTES


async def test_folder_whose_file_system_is_unmounted_while_in_use(
    open_cache: Open,
    write: Write,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is used as long as it works: nothing is written to the mount point."""
    monkeypatch.setattr(disk_folder, "LOOK_SECONDS", 0.0)
    with mounted(folder, 64):
        async with open_cache() as cache:
            tier = cache.lower[0]
            await write(cache, 8, 1)
            await anyio.run_process(["umount", "--lazy", str(folder)])
            try:
                await write(cache, 4, 2)
                assert tier.count == 12
                assert not list(folder.iterdir())
                assert f"the file system of {folder} is not mounted there any more" in caplog.text
            finally:
                await anyio.run_process(["mount", "-t", "tmpfs", "kvtier-test", str(folder)])


async def test_folder_that_is_emptied_while_in_use(open_cache: Open, write: Write, folder: Path) -> None:
    """It is still this process's folder, and goes on being used."""
    async with open_cache() as cache:
        tier = cache.lower[0]
        await write(cache, 8, 1)
        for prefix in folder.glob("???"):
            shutil.rmtree(prefix)
        used = tier.backend._folder  # type: ignore[attr-defined]
        # As when a folder is removed between a write and its rename.
        assert used.write_failed(FileNotFoundError(errno.ENOENT, "No such file")) is FAILED
        await write(cache, 4, 2)
        assert tier.status()["error"] is None
        assert bytes_on_disk(folder) == 4 * CHUNK_OBJECT_BYTES
