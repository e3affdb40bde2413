"""Fingerprints depend on what is in files, and on nothing else."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
from pathlib import Path

import pytest

from kvtier.memory import fingerprint as module
from kvtier.memory.fingerprint import fingerprint, signature

TENSORS, TENSOR_BYTES = 32, 1 << 20


def make_weights(path: Path, *, tensors: int = TENSORS) -> Path:
    """Write a safetensors file of zeros."""
    entries = {
        f"layer.{at}": {
            "dtype": "U8",
            "shape": [TENSOR_BYTES],
            "data_offsets": [at * TENSOR_BYTES, (at + 1) * TENSOR_BYTES],
        }
        for at in range(tensors)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + tensors * TENSOR_BYTES)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that is too large to be hashed whole."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    for shard in range(3):
        make_weights(folder / f"model-{shard}.safetensors")
    (folder / "pytorch_model.bin").write_bytes(bytes(4 << 20))
    return folder


def read(folder: Path) -> str:
    return fingerprint(folder, signature(folder, lambda _: True))


def write(path: Path, offset: int, data: bytes) -> None:
    """Change a file in place."""
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        file.write(data)


def test_each_kind_of_change_is_seen(folder: Path) -> None:
    seen = [read(folder)]
    shard = folder / "model-1.safetensors"
    header = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
    for change in (
        lambda: (folder / "config.json").write_text('{"hidden_size": 9}'),
        lambda: write(shard, 12, b"F"),
        *(
            lambda at=at: write(shard, header + at * TENSOR_BYTES, b"\1" * TENSOR_BYTES)
            for at in (0, 17, TENSORS - 1)
        ),
        lambda: write(folder / "pytorch_model.bin", -1, b"\1"),
        lambda: write(folder / "pytorch_model.bin", 2 << 20, b"\1" * (1 << 20)),
        lambda: shard.rename(folder / "model-9.safetensors"),
        lambda: (folder / "model-2.safetensors").unlink(),
        lambda: (folder / "more.json").write_text("{}"),
    ):
        change()
        seen.append(read(folder))
    assert len(set(seen)) == len(seen)


def test_change_between_samples_of_a_large_file_is_seen(folder: Path) -> None:
    """Such as an embedding of one token that was trained."""
    before = read(folder)
    shard = folder / "model-1.safetensors"
    times = shard.stat()
    write(shard, -1, b"\1")
    after = read(folder)
    assert after != before
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert read(folder) == before, "only its time shows it"


def test_copies_and_links_and_times_of_small_files_make_no_difference(folder: Path, tmp_path: Path) -> None:
    before, states = read(folder), signature(folder, lambda _: True)
    copy = shutil.copytree(folder, tmp_path / "copy")
    os.utime(folder / "config.json", (1, 1))
    links = tmp_path / "links"
    links.mkdir()
    for file in copy.iterdir():
        (links / file.name).symlink_to(file)
    assert read(folder) == read(copy) == read(links) == before
    assert signature(folder, lambda _: True) != states, "whether it is the same has to be read again"


def test_one_byte_of_a_small_model_is_seen(tmp_path: Path) -> None:
    file = make_weights(tmp_path / "adapter_model.safetensors")
    before = read(tmp_path)
    write(file, -12345, b"\1")
    assert read(tmp_path) != before
    assert fingerprint(file, signature(file, lambda _: True)), "a single file"


def test_reads_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shard in range(3):
        make_weights(tmp_path / f"{shard}.safetensors", tensors=200)
    reads: list[int] = []
    pread = os.pread
    monkeypatch.setattr(
        module.os, "pread", lambda file, size, at: (reads.append(size), pread(file, size, at))[1]
    )
    monkeypatch.setattr(module, "MAX_SAMPLES", 60)
    read(tmp_path)
    assert len(reads) <= 60 + 3 * 4
    assert sum(reads) < 1 << 20


def test_ranges_of_a_file_are_read_in_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read of a network file system takes milliseconds."""
    readers, enough, pread = set(), threading.Event(), os.pread

    def wait_for_others(descriptor: int, size: int, offset: int) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            readers.add(threading.get_ident())
            if len(readers) >= 8:
                enough.set()
            enough.wait(10)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(module.os, "pread", wait_for_others)
    path = make_weights(tmp_path / "model.safetensors")
    fingerprint(path, signature(path, lambda _: True), whole_bytes=0)
    assert enough.is_set()


def test_file_with_a_malformed_header_has_a_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for content in (b"", b"1234", b"\xff" * 8 + bytes(3 << 20), struct.pack("<Q", 10) + bytes(3 << 20)):
        file.write_bytes(content)
        files = signature(tmp_path, lambda _: True)
        assert fingerprint(tmp_path, files, 0)


def test_files_that_are_missing_or_changing_are_an_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        signature(tmp_path / "none", lambda _: True)
    with pytest.raises(FileNotFoundError, match="0 files"):
        signature(folder, lambda _: False)
    files = signature(folder, lambda _: True)
    write(folder / "config.json", 0, b"[")
    with pytest.raises(OSError, match="changed while it was read"):
        fingerprint(folder, files)
