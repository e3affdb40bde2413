"""The disk backend hashes chunk objects while it copies them to the page cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import native
from kvtier.backends.disk.backend import object_path
from kvtier.memory import header
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, is_sealed
from kvtier.testing.backend import make_key
from kvtier.testing.faults import WrapperBackend
from kvtier.tiers.seal import Seal
from kvtier.tiers.sealer import Sealer
from tests.rigs.chunks import FULL, MISS, OK, blanks, chunk, chunks, disk, disk_engines, opened
from tests.rigs.small_disk import mounted

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not native.available(), reason="needs the native core"),
]

LENGTHS = [100, 3648, 3649, 4095, 4096, 20_001, (512 << 10) - HEADER_BYTES, 3_000_003]
"""Of payloads: in one page, exactly one page, with and without a native checksum, of some pieces."""


@pytest.fixture(params=disk_engines())
def io(request: pytest.FixtureRequest) -> str:
    return request.param


def stored(folder: Path, number: int) -> bytes:
    return object_path(folder, make_key(number)).read_bytes()


async def test_files_are_those_of_chunks_that_were_sealed_before(tmp_path: Path, io: str) -> None:
    items = [(make_key(number), chunk(make_key(number), length)) for number, length in enumerate(LENGTHS)]
    expected = [bytes(chunk(make_key(number), length)) for number, length in enumerate(LENGTHS)]
    for number, view in enumerate(map(bytearray, expected)):
        ChunkHeader.parse(view[:HEADER_BYTES]).seal(memoryview(view))
        expected[number] = bytes(view)
    async with opened(disk(tmp_path, io=io, direct=False)) as backend:
        assert list(await Seal(backend).put(items)) == [OK] * len(items)
        assert [stored(tmp_path, number) for number in range(len(items))] == expected
        assert [bytes(view) for _, view in items] == expected, "memory has the checksums as well"
        empty = [(key, memoryview(bytearray(len(view)))) for key, view in items]
        assert list(await Seal(backend).get(empty)) == [OK] * len(items)


async def test_each_payload_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> bytes:
        raise AssertionError("hashed again")

    items = chunks([1, 2], 50_000)
    sealer = Sealer()
    async with opened(disk(tmp_path, direct=False)) as backend:
        assert list(await Seal(backend, sealer).put(items[:1])) == [OK]
        [first] = await sealer.seal(items[:1])
        await sealer.seal(items[1:])
        monkeypatch.setattr(header, "_checksum", refuse)
        monkeypatch.setattr(native.core, "write_hashed", refuse)
        assert list(await Seal(backend, sealer).put(items)) == [OK, OK]
        assert (await sealer.seal(items))[0] == first
        assert list(await Seal(backend).get(blanks([1, 2], 50_000))) == [OK, OK]


async def test_without_checksums_nothing_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(native.core, "write_hashed")
    items = chunks([1], 3_000_000)
    async with opened(disk(tmp_path, direct=False)) as backend:
        assert list(await Seal(backend, Sealer(checksum=False)).put(items)) == [OK]
    assert not is_sealed(memoryview(stored(tmp_path, 1)))
    assert stored(tmp_path, 1) == bytes(items[0][1])


async def test_corrupt_headers_are_not_stored(tmp_path: Path) -> None:
    items = chunks([1, 2, 3], 600_000)
    items[1][1][100] ^= 1
    async with opened(disk(tmp_path, direct=False)) as backend:
        sealer = Sealer()
        assert list(await Seal(backend, sealer).put(items)) == [OK, MISS, OK]
        assert sealer.corrupt == 1
        assert not object_path(tmp_path, make_key(2)).exists()
        assert not is_sealed(items[1][1])


async def test_only_what_is_copied_is_hashed_by_the_backend(tmp_path: Path) -> None:
    async with opened(disk(tmp_path / "cached", direct=False)) as backend:
        assert backend.capabilities().sealing is backend
        assert WrapperBackend(backend).capabilities().sealing is None
    async with opened(disk(tmp_path / "direct")) as backend:
        if "O_DIRECT" not in await backend.check():
            pytest.skip("the file system of the temporary folder has no O_DIRECT")
        assert backend.capabilities().sealing is None


async def test_without_the_native_core_chunks_are_sealed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_problem", "it was not built")
    async with opened(disk(tmp_path, direct=False)) as backend:
        assert backend.capabilities().sealing is None
        assert list(await Seal(backend).put(chunks([1], 3_000_000))) == [OK]
        assert list(await Seal(backend).get(blanks([1], 3_000_000))) == [OK]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", 8) as path:
        yield path


async def test_full_disk_keeps_neither_a_file_nor_a_checksum(small_disk: Path) -> None:
    items = chunks([1, 2], 6_000_000)
    async with opened(disk(small_disk, direct=False)) as backend:
        assert list(await Seal(backend).put(items[:1])) == [OK]
        assert list(await Seal(backend).put(items[1:])) == [FULL]
        names = [path.name for path in small_disk.rglob("*") if path.is_file() and path.name != ".lock"]
        assert names == [f"{make_key(1).hex()}.kv"]
        assert [is_sealed(view) for _, view in items] == [True, False]
        await backend.delete([make_key(1)])
        assert list(await Seal(backend).put(items[1:])) == [OK]
        assert list(await Seal(backend).get(blanks([2], 6_000_000))) == [OK]


def test_native_errors(tmp_path: Path) -> None:
    view = memoryview(bytearray(8192))
    with (tmp_path / "file").open("wb") as file:
        for start, length in [(448, 8000), (9000, 0), (448, 240)]:
            with pytest.raises(ValueError, match=r"payload exceeds|too short"):
                native.core.write_hashed(file.fileno(), view, start, length)
    reader = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        native.core.write_hashed(reader, view, 448, 7000)
    os.close(reader)
