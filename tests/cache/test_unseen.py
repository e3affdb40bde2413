"""A disk tier of which a part cannot be listed at the start: it keeps the rest, and its capacity."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier import Settings, TieredCache
from kvtier.backends.disk.backend import lock_holder
from kvtier.pipeline import held
from tests.backends.chunks import disk, opened
from tests.waiting import until

from .conftest import CHUNK_OBJECT_BYTES
from .faulty_sources import BUILT_IN
from .test_sealing import store

pytestmark = pytest.mark.anyio

CAPACITY = 64


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Folders that cannot be listed. No file system fails on demand, and root may list everything."""
    folders: set[Path] = set()
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path) in folders:
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


@pytest.mark.parametrize("everything", [False, True], ids=["one-folder", "everything"])
async def test_what_cannot_be_listed_counts_as_used(
    tmp_path: Path,
    settings: Callable[..., Settings],
    prompt: Callable[..., list[int]],
    failing: set[Path],
    monkeypatch: pytest.MonkeyPatch,
    everything: bool,
) -> None:
    configured, folder = settings(ssd=CAPACITY), tmp_path / "ssd"
    async with TieredCache.open(configured, plugins=BUILT_IN) as cache:
        store(cache, prompt(256 * 48, 1))
        assert await cache.drain(30)
    assert bytes_on_disk(folder) == 48 * CHUNK_OBJECT_BYTES

    lost = folder if everything else next(path for path in sorted(folder.iterdir()) if path.is_dir())
    inside = sum(path.suffix == ".kv" for path in lost.iterdir())
    failing.add(lost)
    monkeypatch.setattr(held, "RETRY_SECONDS", 0.05)
    async with TieredCache.open(configured, plugins=BUILT_IN) as cache:
        tier = cache.hierarchy.lower[0]
        status = tier.status()
        assert f"such as {lost} (Input/output error)" in str(status["error"])
        assert tier.count == (0 if everything else 48 - inside)
        assert tier.used_bytes >= 48 * CHUNK_OBJECT_BYTES
        for seed in range(2, 6):
            store(cache, prompt(256 * 16, seed))
            assert await cache.drain(30)
        assert bytes_on_disk(folder) <= CAPACITY * CHUNK_OBJECT_BYTES

        failing.clear()
        with anyio.fail_after(60):
            await until(lambda: tier.unseen is None)
        assert tier.status()["unseen_bytes"] == 0
        assert tier.used_bytes == bytes_on_disk(folder)


async def test_folder_that_is_removed_while_in_use(
    tmp_path: Path,
    settings: Callable[..., Settings],
    prompt: Callable[..., list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No chunk is written to a folder that is not locked, and none is reported that is gone."""
    configured, folder = settings(ssd=CAPACITY), tmp_path / "ssd"
    async with TieredCache.open(configured, plugins=BUILT_IN) as cache:
        tier = cache.hierarchy.lower[0]
        store(cache, prompt(256 * 8, 1))
        assert await cache.drain(30)
        assert tier.count == 8
        shutil.rmtree(folder)
        folder.mkdir()
        # The first batch finds out. Another process could have the new folder until then.
        store(cache, prompt(256 * 4, 2))
        assert await cache.drain(30)
        await until(lambda: not tier.count)
        assert f"{folder} was removed while in use" in caplog.text
        keys = store(cache, prompt(256 * 4, 3))
        assert await cache.drain(30)
        assert tier.count == 4
        assert lock_holder(folder) is not None
    async with TieredCache.open(configured, plugins=BUILT_IN) as cache:
        assert all(key in cache.hierarchy.catalog for key in keys)


async def test_folder_that_another_process_has_taken(
    tmp_path: Path,
    settings: Callable[..., Settings],
    prompt: Callable[..., list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    configured, folder = settings(ssd=CAPACITY), tmp_path / "ssd"
    async with TieredCache.open(configured, plugins=BUILT_IN) as cache:
        store(cache, prompt(256 * 8, 1))
        assert await cache.drain(30)
        shutil.rmtree(folder)
        async with opened(disk(folder)):
            store(cache, prompt(256 * 4, 2))
            assert await cache.drain(30)
            assert f"path {folder} is in use by process" in caplog.text
            assert not list(folder.glob("*/*.kv"))
            assert "is in use by" in str(cache.hierarchy.lower[0].status()["error"])
