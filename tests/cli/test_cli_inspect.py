from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.backends.disk.backend import object_path
from kvtier.cli import cache_process, inspect, inspect_files
from kvtier.memory.header import HEADER_BYTES, StoredHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.tiers.codec import CodecSettings
from kvtier.tiers.encryption import Keys
from kvtier.tiers.lossless import LosslessCodec

from .conftest import Kvtier, fork, held, store

OBJECT_BYTES = 8192
TIMEOUT_SECONDS = 60


def chunks(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_ls_lists_the_most_recently_used_first(kvtier: Kvtier, folder: Path) -> None:
    lines = kvtier("inspect", "ls", folder).output.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == [
        "0002" + "0" * 12,
        "0001" + "0" * 12,
        "0000" + "0" * 12,
    ]
    assert "2001-09-09T01:46:42+00:00" in lines[1]
    assert "02" * 8 in lines[1]
    assert lines[4] == "3 chunks, 24KiB. In use by no process."


def test_ls_is_limited(kvtier: Kvtier, folder: Path) -> None:
    result = kvtier("inspect", "ls", folder, "--limit", 1)
    assert "3 chunks, 24KiB (2 not listed: --limit 0)" in result.output
    assert "0001000" not in result.output
    assert "0001000" in kvtier("inspect", "ls", folder, "--limit", 0).output


def test_ls_as_json(kvtier: Kvtier, folder: Path) -> None:
    with held(folder) as holder:
        shown = json.loads(kvtier("inspect", "ls", folder, "--json").output)
    assert (shown["chunks"], shown["bytes"], shown["holder"]) == (3, 3 * OBJECT_BYTES, holder)
    assert shown["listed"][0] == {
        "key": "0002" + "00" * 30,
        "bytes": OBJECT_BYTES,
        "last_used": "2001-09-09T01:46:42+00:00",
        "payload_bytes": 5000,
        "codec": "identity",
        "encrypted_with": None,
        "parent": "00" * 32,
        "namespace": "02" * 32,
    }


@pytest.fixture
def encoded(folder: Path) -> Path:
    """The file of a chunk whose payload of zeros was encoded."""
    file = chunks(folder)[0]
    chunk = StoredHeader.parse(file.read_bytes()).chunk
    codec, target = LosslessCodec(CodecSettings(type="lossless")), memoryview(bytearray(1 << 20))
    length = codec.encode(chunk, None, memoryview(bytes(chunk.payload_bytes)), target[HEADER_BYTES:])
    stored = target[: object_bytes(length)]
    StoredHeader.seal(stored, chunk, codec.code, length, checksum=True)
    file.write_bytes(stored)
    return file


def test_ls_names_the_codec(kvtier: Kvtier, folder: Path, encoded: Path) -> None:
    listed = json.loads(kvtier("inspect", "ls", folder, "--json").output)["listed"]
    codecs = {facts["key"]: (facts["codec"], facts["bytes"], facts["payload_bytes"]) for facts in listed}
    assert codecs.pop(encoded.stem) == ("lossless", 4096, 5000)
    assert set(codecs.values()) == {("identity", OBJECT_BYTES, 5000)}
    [line] = [line for line in kvtier("inspect", "ls", folder).output.splitlines() if "lossless" in line]
    assert line.split()[1:4] == ["4096", "5000", "lossless"]


def test_verify_decodes(kvtier: Kvtier, folder: Path, encoded: Path) -> None:
    """What has a valid checksum and cannot be decoded was not written by the codec."""
    assert "0 corrupt" in kvtier("inspect", "verify", folder).output
    stored = memoryview(bytearray(encoded.read_bytes()))
    header = StoredHeader.parse(stored)
    stored[HEADER_BYTES] ^= 1
    StoredHeader.seal(stored, header.chunk, header.codec, header.stored_bytes, checksum=True)
    encoded.write_bytes(stored)
    result = kvtier("inspect", "verify", folder)
    assert result.status == 1
    assert "cannot be decoded" in result.output
    StoredHeader.seal(stored, header.chunk, 40_000, header.stored_bytes, checksum=True)
    encoded.write_bytes(stored)
    assert "0 corrupt" in kvtier("inspect", "verify", folder).output, "a plugin's"
    assert "code 40000" in kvtier("inspect", "ls", folder, "--json").output


def test_ls_describes_an_invalid_header(kvtier: Kvtier, folder: Path) -> None:
    chunks(folder)[0].write_bytes(b"torn")
    assert "is 4 bytes, shorter than a header" in kvtier("inspect", "ls", folder).output


def test_ls_of_an_empty_folder(kvtier: Kvtier, tmp_path: Path) -> None:
    assert kvtier("inspect", "ls", tmp_path).output == "0 chunks, 0B. In use by no process.\n"


def test_ls_names_the_holder_of_the_folder(kvtier: Kvtier, folder: Path) -> None:
    with held(folder) as holder:
        assert f"In use by {holder}." in kvtier("inspect", "ls", folder).output


@pytest.mark.parametrize("command", ["ls", "verify", "purge"])
def test_missing_folder(kvtier: Kvtier, tmp_path: Path, command: str) -> None:
    result = kvtier("inspect", command, tmp_path / "none")
    assert result.status == 2
    assert "does not exist" in result.message
    assert not (tmp_path / "none").exists()


def test_verify_of_valid_chunks(kvtier: Kvtier, folder: Path) -> None:
    result = kvtier("inspect", "verify", folder)
    assert (result.status, result.output) == (0, "3 chunks, 24KiB read, 0 corrupt.\n")


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[1000] ^= 1
    elif how == "truncated":
        del content[4096:]
    elif how == "empty":
        content.clear()
    else:
        content = bytearray(store(path.parents[2] / "other", 9).read_bytes())
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("flipped", "has a payload that does not match its checksum"),
        ("truncated", "is 4096 bytes for a payload of 5000"),
        ("empty", "is 0 bytes, shorter than a header"),
        ("another's", "holds chunk 0009000000000000, not 0001000000000000"),
    ],
)
def test_verify_finds_corrupt_chunks(kvtier: Kvtier, folder: Path, how: str, problem: str) -> None:
    path = chunks(folder)[1]
    damage(path, how)
    result = kvtier("inspect", "verify", folder)
    assert result.status == 1
    assert f"corrupt {path}: {problem}" in result.output
    assert "3 chunks" in result.output
    assert "1 corrupt." in result.output
    assert path.exists()


def test_verify_with_delete_removes_corrupt_chunks(kvtier: Kvtier, folder: Path) -> None:
    before = chunks(folder)
    damage(before[1], "flipped")
    result = kvtier("inspect", "verify", folder, "--delete")
    assert result.status == 1
    assert "1 corrupt and removed." in result.output
    assert chunks(folder) == [before[0], before[2]]
    assert kvtier("inspect", "verify", folder).status == 0


def test_verify_while_a_cache_process_runs(kvtier: Kvtier, folder: Path) -> None:
    damage(chunks(folder)[1], "flipped")
    with held(folder) as holder:
        assert "1 corrupt." in kvtier("inspect", "verify", folder).output
        result = kvtier("inspect", "verify", folder, "--delete")
    assert f"is in use by {holder}: stop that process first" in result.errors
    assert len(chunks(folder)) == 3


def test_chunk_removed_during_verify_is_not_corrupt(
    kvtier: Kvtier, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, real = chunks(folder)[1], inspect_files.aiofiles.open

    def open_late(*arguments: Any, **named: Any) -> Any:
        removed.unlink(missing_ok=True)
        return real(*arguments, **named)

    monkeypatch.setattr(inspect_files.aiofiles, "open", open_late)
    result = kvtier("inspect", "verify", folder)
    assert (result.status, result.output) == (0, "2 chunks, 16KiB read, 0 corrupt.\n")


def test_purge_removes_only_chunks_and_temporary_files(kvtier: Kvtier, folder: Path) -> None:
    path = chunks(folder)[0]
    temporary = path.with_name(f"{path.stem}.0011aabb-0.tmp")
    temporary.write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    result = kvtier("inspect", "purge", folder, "--yes")
    assert (result.status, result.output) == (0, "3 chunks removed, 24KiB freed.\n")
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "notes.txt"]


def test_purge_asks_for_confirmation(kvtier: Kvtier, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = []

    def refuse(question: str, **_: object) -> bool:
        questions.append(question)
        raise inspect.typer.Abort

    monkeypatch.setattr(inspect.typer, "confirm", refuse)
    assert kvtier("inspect", "purge", folder).status == 1
    assert questions == [f"Remove 3 chunks, 24KiB, from {folder}?"]
    assert len(chunks(folder)) == 3


def test_purge_is_refused_while_the_folder_is_in_use(kvtier: Kvtier, folder: Path) -> None:
    with held(folder) as holder:
        result = kvtier("inspect", "purge", folder, "--yes")
    assert result.status == 1
    assert f"is in use by {holder}: stop that process first" in result.errors
    assert len(chunks(folder)) == 3


@pytest.mark.parametrize("arguments", [["ls"], ["verify"], ["verify", "--delete"], ["purge", "--yes"]])
def test_what_is_no_file_is_no_chunk(folder: Path, arguments: list[str]) -> None:
    pipe, other = (object_path(folder, ChunkKey(bytes([0, number]) + bytes(30))) for number in (7, 8))
    os.mkfifo(pipe)
    other.mkdir()
    process = fork("inspect", arguments[0], folder, *arguments[1:])
    try:
        output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "3 chunks" in output
    assert pipe.is_fifo()
    assert other.is_dir()


@pytest.mark.parametrize(("command", "status"), [("ls", 0), ("verify", 1)])
def test_what_cannot_be_listed_is_named(
    kvtier: Kvtier, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, status: int
) -> None:
    lost = chunks(folder)[0].parent
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path) == lost:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    result = kvtier("inspect", command, folder)
    assert result.status == status
    assert "0 chunks" in result.output  # All are in this folder.
    assert f"cannot read {lost}: Input/output error" in result.errors.replace("\n", "")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"1 {'ab' * 32}")
    file.chmod(0o600)
    return file


def payloads(folder: Path, keys: Keys) -> dict[str, bytes]:
    """Return the decrypted payload of each chunk."""
    found = {}
    for file in chunks(folder):
        stored = memoryview(bytearray(file.read_bytes()))
        header = StoredHeader.verify(stored, ChunkKey(bytes.fromhex(file.stem)))
        payload = stored[HEADER_BYTES : HEADER_BYTES + header.stored_bytes]
        keys.decrypt(header, payload, payload)
        found[file.stem] = bytes(payload)
    return found


def test_rekey(kvtier: Kvtier, folder: Path, key_file: Path) -> None:
    """First what was not encrypted, then with a new key: each time the payload and the time of use remain."""
    before = {file.stem: file.read_bytes()[HEADER_BYTES : HEADER_BYTES + 5000] for file in chunks(folder)}
    used = [file.stat().st_mtime for file in chunks(folder)]
    assert "3 chunks, 3 encrypted" in kvtier("inspect", "rekey", folder, "--key-file", key_file).output
    assert payloads(folder, Keys.load(key_file, "here")) == before
    assert "3 chunks, 0 encrypted" in kvtier("inspect", "rekey", folder, "--key-file", key_file).output
    key_file.write_text(f"2 {'cd' * 32}\n{key_file.read_text()}")
    assert "3 chunks, 3 encrypted" in kvtier("inspect", "rekey", folder, "--key-file", key_file).output
    key_file.write_text(f"2 {'cd' * 32}")
    assert payloads(folder, Keys.load(key_file, "here")) == before
    assert [file.stat().st_mtime for file in chunks(folder)] == used
    listed = json.loads(kvtier("inspect", "ls", folder, "--json").output)["listed"]
    assert {facts["encrypted_with"] for facts in listed} == {2}
    assert "0 corrupt" in kvtier("inspect", "verify", folder).output


def test_rekey_without_the_old_key(kvtier: Kvtier, folder: Path, key_file: Path) -> None:
    """What cannot be read is named, and stays as it is."""
    kvtier("inspect", "rekey", folder, "--key-file", key_file)
    before = [file.read_bytes() for file in chunks(folder)]
    key_file.write_text(f"2 {'cd' * 32}")
    result = kvtier("inspect", "rekey", folder, "--key-file", key_file)
    assert result.status == 1
    assert result.output.count("is encrypted with key 1, which the key file does not have") == 3
    assert [file.read_bytes() for file in chunks(folder)] == before


KILLED = """
import os, signal, sys, anyio
from pathlib import Path
from kvtier.cli import inspect_files

replace = Path.replace

def replaced(path, target):
    replace(path, target)
    os.kill(os.getpid(), signal.SIGKILL)

Path.replace = replaced
anyio.run(inspect_files.rekey, Path(sys.argv[1]), Path(sys.argv[2]), lambda done, total: None)
"""


def test_rekey_that_is_killed(kvtier: Kvtier, folder: Path, key_file: Path) -> None:
    """Each file is the old one or the new one, and the next run changes the rest."""
    before = {file.stem: file.read_bytes()[HEADER_BYTES : HEADER_BYTES + 5000] for file in chunks(folder)}
    for _ in range(2):
        command = [sys.executable, "-c", KILLED, str(folder), str(key_file)]
        assert subprocess.run(command, timeout=TIMEOUT_SECONDS).returncode == -signal.SIGKILL
    encrypted = [StoredHeader.parse(file.read_bytes()).encryption is not None for file in chunks(folder)]
    assert encrypted.count(True) == 2
    assert "3 chunks, 1 encrypted" in kvtier("inspect", "rekey", folder, "--key-file", key_file).output
    assert payloads(folder, Keys.load(key_file, "here")) == before


@pytest.mark.parametrize(
    ("tier", "shown"),
    [
        ({}, ""),
        ({"codec": "lossless", "ratio": 1.414}, " (lossless 1.41)"),
        ({"codec": "identity", "ratio": 1.0, "encrypted": True}, " (encrypted)"),
        ({"codec": "lossless", "ratio": 1.414, "encrypted": True}, " (lossless 1.41, encrypted)"),
    ],
)
def test_status_shows_how_a_tier_stores(tier: dict[str, Any], shown: str) -> None:
    assert cache_process._encoding(tier) == shown
