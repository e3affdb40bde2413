"""Folders and files that cannot be listed or read: the rest is found, and what they may hold is known."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier.backends.base import StoredObject
from kvtier.backends.disk.backend import DiskBackend, object_path
from kvtier.errors import IncompleteScan
from kvtier.testing.backend import make_key
from tests.rigs.chunks import OK, disk, opened

pytestmark = pytest.mark.anyio

NUMBERS = range(40)
LENGTH = 5000
NOBODY = 65534


async def fill(backend: DiskBackend) -> None:
    items = [(make_key(number), memoryview(bytearray(LENGTH))) for number in NUMBERS]
    assert set(await backend.put(items)) == {OK}


async def scan(backend: DiskBackend) -> tuple[list[StoredObject], IncompleteScan | None]:
    found: list[StoredObject] = []
    try:
        async for batch in backend.scan():
            found += batch
    except IncompleteScan as error:
        return found, error
    return found, None


ERRORS = [errno.EIO, errno.ESTALE, errno.EACCES, errno.ENAMETOOLONG]


@pytest.fixture(params=ERRORS, ids=errno.errorcode.__getitem__)
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Folders that cannot be listed. No file system fails on demand, and root may list everything."""
    folders: set[Path] = set()
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).resolve() in folders:  # It is listed through its descriptor.
            raise OSError(request.param, os.strerror(request.param), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return folders


async def test_one_folder_that_cannot_be_listed(tmp_path: Path, failing: set[Path]) -> None:
    async with opened(disk(tmp_path)) as backend:
        await fill(backend)
        lost = object_path(tmp_path, make_key(0)).parent
        failing.add(lost)
        found, error = await scan(backend)
        inside = {
            make_key(number) for number in NUMBERS if object_path(tmp_path, make_key(number)).parent == lost
        }
        assert {stored.key for stored in found} == {make_key(number) for number in NUMBERS} - inside
        assert error is not None
        assert f"1 folders and 0 files in {tmp_path} cannot be read or deleted, such as {lost} (" in str(
            error
        )
        assert error.unseen_bytes is not None
        assert error.unseen_bytes >= LENGTH

        failing.clear()
        again, error = await scan(backend)
        assert error is None
        assert {stored.key for stored in again} == inside


async def test_nothing_can_be_listed(tmp_path: Path, failing: set[Path]) -> None:
    async with opened(disk(tmp_path)) as backend:
        await fill(backend)
        failing.add(tmp_path)
        found, error = await scan(backend)
        assert not found
        assert error is not None
        assert error.unseen_bytes is not None
        assert error.unseen_bytes >= LENGTH * len(NUMBERS)
        failing.clear()
        found, error = await scan(backend)
        assert len(found) == len(NUMBERS)
        assert error is None


async def test_paths_of_objects_are_longer_than_the_system_allows(tmp_path: Path) -> None:
    """They are written through the folder's descriptor, and found in the same way."""
    folder = tmp_path
    while (missing := os.pathconf("/", "PC_PATH_MAX") - 40 - len(str(folder))) > 1:
        folder /= "x" * min(200, missing - 1)
    async with opened(disk(folder)) as backend:
        await fill(backend)
        found, error = await scan(backend)
        assert error is None
        assert len(found) == len(NUMBERS)


async def test_links_are_no_objects_and_no_folders(tmp_path: Path) -> None:
    async with opened(disk(tmp_path)) as backend:
        await fill(backend)
        for loop in (object_path(tmp_path, make_key(1000)), tmp_path / "000"):
            loop.parent.mkdir(exist_ok=True)
            loop.symlink_to(loop)
        found, error = await scan(backend)
        assert len(found) == len(NUMBERS)
        assert error is None


SCAN = """
import os, sys
from pathlib import Path
import aiofiles.os, anyio
from tests.backends import test_disk_unreadable as tests
from tests.rigs.chunks import disk

async def main():
    await aiofiles.os.stat("/")  # Import everything as this user.
    backend = disk(Path(sys.argv[1]))
    os.setuid(int(sys.argv[2]))
    await backend.open()
    found, error = await tests.scan(backend)
    print(len(found), error.unseen_bytes, error)

anyio.run(main)
"""
"""A program that scans a folder as another user."""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_files_and_folders_of_another_user(tmp_path: Path) -> None:
    folder = Path("/tmp") / f"kvtier-unreadable-{os.getpid()}"
    async with opened(disk(folder)) as backend:
        await fill(backend)
    try:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        file = object_path(folder, make_key(0))
        os.chown(file, 0, 0)
        hidden = next(path for path in sorted(folder.iterdir()) if path.is_dir() and path != file.parent)
        os.chown(hidden, 0, 0)
        inside = len(list(hidden.iterdir()))
        result = await anyio.run_process([sys.executable, "-c", SCAN, str(folder), str(NOBODY)])
        count, unseen, message = result.stdout.decode().split(maxsplit=2)
        assert int(count) == len(NUMBERS) - 1 - inside
        assert int(unseen) >= LENGTH * (1 + inside)
        assert "1 folders and 1 files" in message
        assert "(Permission denied)" in message
    finally:
        await anyio.run_process(["rm", "-r", str(folder)])
