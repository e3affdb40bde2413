"""Kills, full disks and damaged files: a read returns the correct object or a miss."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from anyio import to_thread

from kvtier.backends.base import StoredObject
from kvtier.backends.disk.backend import lock_holder, object_path
from kvtier.memory.header import HEADER_BYTES, object_bytes
from kvtier.testing.backend import blank, make_key, noise
from tests.rigs.chunks import FAILED, FULL, MISS, OK, blanks, chunks, disk, disk_engines, opened
from tests.rigs.composed_backends import SealedBackend
from tests.rigs.disk_writer import KEYS
from tests.rigs.forks import python
from tests.rigs.small_disk import mounted

pytestmark = pytest.mark.anyio


async def scanned(backend: SealedBackend) -> list[StoredObject]:
    return [stored async for batch in backend.scan() for stored in batch]


@pytest.fixture(params=disk_engines())
def io(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def killed(tmp_path: Path, io: str, way: str, request: pytest.FixtureRequest) -> Path:
    """The folder of a process that was killed while writing, several times."""
    folder = tmp_path / "ssd"
    delays = random.Random(request.node.name)
    for _ in range(3):
        process = python("tests.rigs.disk_writer", str(folder), io, way, stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline(), "the writer exited before its first write"
            time.sleep(delays.uniform(0, 0.25))
            assert lock_holder(folder) == (folder / ".lock").read_text()
            process.kill()
            process.wait()
        assert lock_holder(folder) is None
    return folder


@pytest.mark.parametrize("run", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["direct", "cached"])
async def test_kill_during_writes_leaves_whole_objects_only(killed: Path, io: str, run: int) -> None:
    async with opened(SealedBackend(disk(killed, io=io))) as backend:
        found = await scanned(backend)
        assert found, "no object survived"
        assert backend.corrupt == 0, "a torn object was published"
        files = [path for path in killed.rglob("*") if path.is_file() and path.name != ".lock"]
        assert all(path.suffix == ".kv" for path in files), "temporary files remain"
        assert len(files) == len(found)
        assert sum(stored.length for stored in found) == sum(path.stat().st_size for path in files)
        assert {stored.key for stored in found} <= set(KEYS)
        for stored in found:
            view = blank(stored.length)
            assert list(await backend.get([(stored.key, view)])) == [OK]
            payload_bytes = int.from_bytes(view[16:24], "little")
            payload = bytes(view[HEADER_BYTES : HEADER_BYTES + payload_bytes])
            # The round that wrote it is unknown, but the object must be whole.
            assert any(
                noise(b"%d" % round_ + stored.key, 64) == payload[:64]
                and noise(b"%d" % round_ + stored.key, payload_bytes) == payload
                for round_ in range(5000)
            )


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x04
    path.write_bytes(content)


DAMAGES = {
    "truncated": lambda path: os.truncate(path, 8192),
    "truncated within a page": lambda path: os.truncate(path, 5000),
    "truncated within the header": lambda path: os.truncate(path, 100),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, 1 << 20),
    "zeros, as after a power failure": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flipped in the header": lambda path: flip(path, 33),
    "foreign": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
}
DETECTED_ON_READ = {
    "flipped in the payload": lambda path: flip(path, 7777),
    "zeros behind the header": lambda path: path.write_bytes(
        path.read_bytes()[:4096] + bytes(path.stat().st_size - 4096)
    ),
}


@pytest.mark.parametrize("damage", [*DAMAGES, *DETECTED_ON_READ])
@pytest.mark.parametrize("direct", [True, False])
async def test_damage_while_the_backend_is_open(tmp_path: Path, damage: str, direct: bool, io: str) -> None:
    async with opened(SealedBackend(disk(tmp_path, direct=direct, io=io))) as backend:
        await backend.put(chunks(range(3)))
        (DAMAGES | DETECTED_ON_READ)[damage](object_path(tmp_path, make_key(1)))
        assert list(await backend.get(blanks(range(3)))) == [OK, MISS, OK]
        assert list(await backend.put(chunks([1]))) == [OK]
        assert list(await backend.get(blanks([1]))) == [OK]


@pytest.mark.parametrize("damage", [*DAMAGES, *DETECTED_ON_READ])
async def test_damage_while_the_backend_is_closed(tmp_path: Path, damage: str) -> None:
    async with opened(SealedBackend(disk(tmp_path))) as backend:
        await backend.put(chunks(range(3)))
    (DAMAGES | DETECTED_ON_READ)[damage](object_path(tmp_path, make_key(1)))
    async with opened(SealedBackend(disk(tmp_path))) as backend:
        found = await scanned(backend)
        scanned_keys = sorted(stored.key for stored in found)
        assert scanned_keys == sorted(
            make_key(number) for number in ([0, 2] if damage in DAMAGES else range(3))
        )
        assert list(await backend.get(blanks(range(3)))) == [OK, MISS, OK]
        assert backend.corrupt == 1
        assert not object_path(tmp_path, make_key(1)).exists()


async def test_file_renamed_to_another_key_is_a_miss(tmp_path: Path) -> None:
    async with opened(SealedBackend(disk(tmp_path))) as backend:
        await backend.put(chunks(range(2)))
        object_path(tmp_path, make_key(0)).rename(object_path(tmp_path, make_key(1)))
        assert list(await backend.get(blanks([0, 1]))) == [MISS, MISS]
        assert backend.corrupt == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    with mounted(tmp_path / "small", 8) as path:
        yield path


@pytest.mark.parametrize("direct", [True, False])
async def test_full_disk_refuses_chunks_and_keeps_the_others(
    small_disk: Path, io: str, direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    payload = 2_000_000
    async with opened(SealedBackend(disk(small_disk, io=io, direct=direct))) as backend:
        outcomes = list(await backend.put(chunks(range(6), payload)))
        assert set(outcomes) == {OK, FULL}
        message = f"tier 'ssd': no space left in {small_disk} (No space left on device); chunks"
        assert f"{message} are not stored: lower the tier's capacity" in caplog.text
        # Concurrent writes that compete for the last space may all fail. Writes one at a time use all of it.
        for number in range(6):
            if outcomes[number] is FULL:
                [outcomes[number]] = await backend.put(chunks([number], payload))
        kept = [number for number in range(6) if outcomes[number] is OK]
        lost = [number for number in range(6) if outcomes[number] is FULL]
        assert list(await backend.get(blanks(kept, payload))) == [OK] * len(kept)
        assert list(await backend.get(blanks(lost, payload))) == [MISS] * len(lost)
        files = [path for path in small_disk.rglob("*") if path.is_file() and path.name != ".lock"]
        assert sum(path.stat().st_size for path in files) == len(kept) * object_bytes(payload)
        # A failed replacement keeps the old object.
        assert list(await backend.put(chunks(kept[:1], payload + 2_000_000))) == [FULL]
        assert list(await backend.get(blanks(kept, payload))) == [OK] * len(kept)
        await backend.delete([make_key(number) for number in kept[:2]])
        assert list(await backend.put(chunks(lost[:1], payload))) == [OK]
    async with opened(SealedBackend(disk(small_disk, io=io))) as backend:
        assert len(await scanned(backend)) == len(kept) - 1
        assert backend.corrupt == 0


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A file system on an image of 64 MiB, and the image. Truncating the image makes reads fail."""
    mount, image = tmp_path / "failing", tmp_path / "image"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)

    def run(*command: str) -> str:
        try:
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot mount an image here: {error}")

    with ExitStack() as stack:
        run("mkfs.ext4", "-q", "-E", "lazy_itable_init=1", str(image))
        loop = run("losetup", "--find", "--show", "--direct-io=on", str(image))
        stack.callback(subprocess.run, ["losetup", "--detach", loop], check=True)
        run("mount", loop, str(mount))
        # Not a skip: it fails if a backend has left a file open.
        stack.callback(subprocess.run, ["umount", str(mount)], check=True)
        yield mount, image


async def test_read_error_is_a_failure(
    failing_disk: tuple[Path, Path], io: str, caplog: pytest.LogCaptureFixture
) -> None:
    mount, image = failing_disk
    payload = 1_000_000
    async with opened(SealedBackend(disk(mount / "ssd", io=io))) as backend:
        assert list(await backend.put(chunks(range(3), payload))) == [OK] * 3
        await to_thread.run_sync(os.sync)  # Other tests may have written much.
        os.truncate(image, 1 << 20)
        assert list(await backend.get(blanks(range(3), payload))) == [FAILED] * 3
        assert backend.corrupt == 0
    assert "tier 'ssd' cannot read: [Errno 5] Input/output error" in caplog.text


async def test_write_beyond_the_file_size_limit_fails_that_key_only(tmp_path: Path, io: str) -> None:
    async with opened(disk(tmp_path, io=io)) as backend:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
            items = [(make_key(1), blank(4096)), (make_key(2), blank(2 << 20))]
            assert list(await backend.put(items)) == [OK, FAILED]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [path.name for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"] == [
            f"{make_key(1).hex()}.kv"
        ]
