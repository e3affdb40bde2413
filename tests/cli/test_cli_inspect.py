from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest

from kvtier.backends.disk.backend import object_path
from kvtier.cli import cache_process, inspect, inspect_files
from kvtier.hookmarkers import hookimpl
from kvtier.memory.header import HEADER_BYTES, StoredHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.plugins import Plugins
from kvtier.tiers.codec import CodecSettings
from kvtier.tiers.encryption import Keys
from kvtier.tiers.lossless import LosslessCodec

from .conftest import Kvtier, Result, fork, held, store

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
    result = kvtier("inspect", "verify", folder, "--delete")
    assert result.status == 1
    assert f"unreadable {encoded}: is encoded by codec 40000, which is not installed" in result.output
    assert "0 corrupt, 1 unreadable." in result.output
    assert encoded.exists(), "a plugin may read it"
    assert "code 40000" in kvtier("inspect", "ls", folder, "--json").output


def test_verify_decodes_with_plugins(
    kvtier: Kvtier, folder: Path, encoded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(LosslessCodec):
        code = 40_000

    load = Plugins.load

    def load_all(only: Sequence[str] | None = None, *_: Any) -> Plugins:
        plugins = load([])
        if only is None:
            plugin = ModuleType("mine")
            vars(plugin)["kvtier_codecs"] = hookimpl(lambda: {"other": Other})
            plugins.register(plugin, "mine", "mine 1")
        return plugins

    monkeypatch.setattr(Plugins, "load", load_all)
    stored = memoryview(bytearray(encoded.read_bytes()))
    header = StoredHeader.parse(stored)
    StoredHeader.seal(stored, header.chunk, Other.code, header.stored_bytes, checksum=True)
    encoded.write_bytes(stored)
    assert kvtier("inspect", "verify", folder).status == 0
    stored[HEADER_BYTES] ^= 1
    StoredHeader.seal(stored, header.chunk, Other.code, header.stored_bytes, checksum=True)
    encoded.write_bytes(stored)
    assert f"corrupt {encoded}: cannot be decoded" in kvtier("inspect", "verify", folder).output


def test_verify_without_the_native_core(
    kvtier: Kvtier, folder: Path, encoded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only that decodes is not corrupt."""
    monkeypatch.setattr("kvtier.tiers.lossless.native.available", lambda: False)
    result = kvtier("inspect", "verify", folder, "--delete")
    assert result.status == 1
    assert f"unreadable {encoded}: needs the native core" in result.output
    assert encoded.exists()


def test_verify_without_enough_memory(
    kvtier: Kvtier, folder: Path, encoded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit into memory is not corrupt, and not deleted."""

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(LosslessCodec, "decode", fail)
    result = kvtier("inspect", "verify", folder, "--delete")
    assert "0 corrupt, 1 unreadable." in result.output
    assert encoded.exists()


def test_verify_of_a_file_that_cannot_be_read(
    kvtier: Kvtier, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = chunks(folder)[1], inspect_files.aiofiles.open

    def fail(name: Path, *arguments: Any, **named: Any) -> Any:
        if name == path:
            raise OSError(errno.EIO, "Input/output error", str(name))
        return real(name, *arguments, **named)

    monkeypatch.setattr(inspect_files.aiofiles, "open", fail)
    result = kvtier("inspect", "verify", folder, "--delete")
    assert result.status == 1
    assert f"unreadable {path}: Input/output error\n" in result.output
    assert "3 chunks, 16KiB read, 0 corrupt, 1 unreadable." in result.output
    assert path.exists()


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


def test_rekey_of_a_folder_without_chunks(kvtier: Kvtier, tmp_path: Path, key_file: Path) -> None:
    """Another folder than that of the tier must not look like success."""
    (tmp_path / "other").mkdir()
    result = kvtier("inspect", "rekey", tmp_path / "other", "--key-file", key_file)
    assert result.status == 1
    assert "holds no chunks" in result.output


def test_purge_knows_its_files_by_their_folder(folder: Path) -> None:
    """Not below a descriptor, which may be another folder's by then."""
    found, _ = anyio.run(inspect_files.claimed_chunks, folder)
    assert sorted(file.path for file in found) == sorted(chunks(folder))


def test_purge_names_what_it_cannot_list(
    kvtier: Kvtier, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, real = chunks(folder)[0].parent, os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == lost.name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    result = kvtier("inspect", "purge", folder, "--yes")
    assert result.status == 1
    assert "0 chunks removed" in result.output
    errors = "".join(result.errors.split())
    assert f"notremoved1foldersand0filesin{folder}" in errors
    assert f"{lost}(Input/outputerror)" in errors


def test_verify_decodes_in_threads(kvtier: Kvtier, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, real = threading.Barrier(3), inspect_files._verify

    def wait(*arguments: Any) -> bool:
        together.wait(TIMEOUT_SECONDS)
        return real(*arguments)

    monkeypatch.setattr(inspect_files, "_verify", wait)
    assert kvtier("inspect", "verify", folder).status == 0


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


Rekey = Callable[..., Result]


@pytest.fixture
def rekey(kvtier: Kvtier, folder: Path, key_file: Path) -> Rekey:
    """Run ``kvtier inspect rekey``."""
    return lambda *options: kvtier("inspect", "rekey", folder, "--key-file", key_file, *options)


@pytest.fixture
def encrypted(rekey: Rekey, folder: Path) -> list[Path]:
    """The files of the chunks, which are encrypted."""
    assert "3 chunks: 3 encrypted again" in rekey("--plain").output
    return chunks(folder)


def test_rekey(kvtier: Kvtier, rekey: Rekey, folder: Path, key_file: Path) -> None:
    """First what was not encrypted, then with a new key: each time the payload and the time of use remain."""
    before = {file.stem: file.read_bytes()[HEADER_BYTES : HEADER_BYTES + 5000] for file in chunks(folder)}
    used = [file.stat().st_mtime_ns for file in chunks(folder)]
    assert "3 chunks: 3 encrypted again" in rekey("--plain").output
    assert payloads(folder, Keys.load(key_file, "here")) == before
    assert "3 chunks: 0 encrypted again" in rekey().output
    key_file.write_text(f"2 {'cd' * 32}\n{key_file.read_text()}")
    assert "3 chunks: 3 encrypted again" in rekey().output
    key_file.write_text(f"2 {'cd' * 32}")
    assert payloads(folder, Keys.load(key_file, "here")) == before
    assert [file.stat().st_mtime_ns for file in chunks(folder)] == used
    listed = json.loads(kvtier("inspect", "ls", folder, "--json").output)["listed"]
    assert {facts["encrypted_with"] for facts in listed} == {2}
    assert "0 corrupt" in kvtier("inspect", "verify", folder).output


def test_rekey_keeps_tenants_apart(rekey: Rekey, folder: Path, key_file: Path) -> None:
    """By the mark that the old key has given them, with which the new one derives theirs."""
    keys = Keys.load(key_file, "here")
    marks = {}
    for number, file in enumerate(chunks(folder)):
        content = memoryview(bytearray(file.read_bytes()))
        header = StoredHeader.parse(content).chunk
        payload = content[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        marks[file.stem] = keys.mark_of(f"team-{number}")
        used = keys.encrypt(header, 0, marks[file.stem], payload, payload)
        StoredHeader.seal(content, header, 0, len(payload), checksum=True, encryption=used)
        file.write_bytes(content)
    before = payloads(folder, keys)
    key_file.write_text(f"2 {'cd' * 32}\n{key_file.read_text()}")
    assert "3 chunks: 3 encrypted again" in rekey().output
    assert payloads(folder, Keys({2: bytes.fromhex("cd" * 32)})) == before
    found = [StoredHeader.parse(file.read_bytes()) for file in chunks(folder)]
    assert {
        header.chunk.key.hex(): header.encryption.tenant for header in found if header.encryption
    } == marks


def test_rekey_leaves_what_is_not_encrypted(
    rekey: Rekey, encrypted: list[Path], folder: Path, key_file: Path
) -> None:
    """It may have been written by anyone, and would be trusted from then on."""
    planted = store(folder, 9)
    before = planted.read_bytes()
    key_file.write_text(f"2 {'cd' * 32}\n{key_file.read_text()}")
    result = rekey()
    assert result.status == 0
    assert "4 chunks: 3 encrypted again" in result.output
    assert "1 are not encrypted, and left so: see --plain." in result.output
    assert planted.read_bytes() == before
    result = rekey("--plain")
    assert "4 chunks: 1 encrypted again" in result.output
    assert "--plain" not in result.output


def test_rekey_without_the_old_key(rekey: Rekey, encrypted: list[Path], key_file: Path) -> None:
    """What cannot be read is named, and stays as it is."""
    before = [file.read_bytes() for file in encrypted]
    key_file.write_text(f"2 {'cd' * 32}")
    result = rekey()
    assert result.status == 1
    for file in encrypted:
        problem = "is encrypted with key 1, which the key file does not have"
        assert f"unchanged {file}: {problem}\n" in result.output
    assert [file.read_bytes() for file in encrypted] == before


def test_rekey_with_another_key_of_the_same_number(
    rekey: Rekey, encrypted: list[Path], key_file: Path
) -> None:
    """That none of the chunks can be decrypted must not be found out after the old key was removed."""
    before = [file.read_bytes() for file in encrypted]
    key_file.write_text(f"1 {'cd' * 32}")
    result = rekey()
    assert result.status == 1
    for file in encrypted:
        assert f"unchanged {file}: was not encrypted with key 1 of the key file" in result.output
    assert "3 chunks: 0 encrypted again" in result.output
    assert [file.read_bytes() for file in encrypted] == before


def test_rekey_finds_what_has_changed(rekey: Rekey, encrypted: list[Path]) -> None:
    """Also in chunks that have the first key."""
    damage(encrypted[1], "flipped")
    result = rekey()
    assert result.status == 1
    assert f"unchanged {encrypted[1]}: has a payload that does not match its checksum" in result.output


@pytest.mark.usefixtures("encrypted")
def test_rekey_names_what_it_cannot_list(
    rekey: Rekey, folder: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the old key, which must not be removed."""
    lost = store(folder, 0x1000).parent
    key_file.write_text(f"2 {'cd' * 32}\n{key_file.read_text()}")
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == lost.name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    result = rekey()
    assert result.status == 1
    assert "3 chunks: 3 encrypted again" in result.output
    assert f"1 folders and 0 files in {folder} cannot be read" in result.output
    assert f"such as {lost} (Input/output error)" in result.output


def test_rekey_names_files_as_the_user_does(
    rekey: Rekey, encrypted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as the process has opened them."""
    real = Path.open

    def fail(path: Path, *arguments: Any, **named: Any) -> Any:
        if path.name == encrypted[0].name:
            raise OSError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", fail)
    result = rekey()
    assert f"unchanged {encrypted[0]}: Permission denied\n" in result.output
    assert "/proc" not in result.output


def test_rekey_prints_some_failures_and_counts_the_others(
    rekey: Rekey, encrypted: list[Path], folder: Path, key_file: Path
) -> None:
    for number in range(3, 30):
        store(folder, number)
    rekey("--plain")
    key_file.write_text(f"2 {'cd' * 32}")
    result = rekey()
    assert result.status == 1
    assert result.output.count("which the key file does not have") == 20
    assert "unchanged and 10 more.\n" in result.output


def test_rekey_reads_headers_first(
    rekey: Rekey, encrypted: list[Path], folder: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They tell that a chunk is not encrypted, or has a key that is not there."""
    store(folder, 9)
    key_file.write_text(f"2 {'cd' * 32}")

    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("was read to its end")

    monkeypatch.setattr(StoredHeader, "verify", fail)
    result = rekey()
    assert result.output.count("which the key file does not have") == len(encrypted)
    assert "1 are not encrypted" in result.output


@pytest.mark.usefixtures("encrypted")
def test_rekey_reads_several_at_once(rekey: Rekey, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(folder, 9)
    together = threading.Barrier(inspect_files.READERS)
    real = inspect_files._rekey_one

    def wait(*arguments: Any, **named: Any) -> Any:
        together.wait(TIMEOUT_SECONDS)
        return real(*arguments, **named)

    monkeypatch.setattr(inspect_files, "_rekey_one", wait)
    assert "4 chunks: 0 encrypted again" in rekey().output


@pytest.mark.usefixtures("encrypted")
@pytest.mark.parametrize(("command", "function"), [("rekey", "_rekey_one"), ("verify", "_verify")])
def test_files_are_listed_meanwhile(
    kvtier: Kvtier,
    folder: Path,
    key_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    function: str,
) -> None:
    """A list of ten million files would take gigabytes, and nothing would happen until it is there."""
    store(folder, 0x1000)
    events = []
    scandir, one = os.scandir, getattr(inspect_files, function)

    def listed(path: Any) -> Any:
        events.append(Path(path).name)
        return scandir(path)

    def noted(*arguments: Any, **named: Any) -> Any:
        events.append(command)
        return one(*arguments, **named)

    monkeypatch.setattr("kvtier.backends.disk.scan.LISTED_AT_ONCE", 1)
    monkeypatch.setattr(os, "scandir", listed)
    monkeypatch.setattr(inspect_files, function, noted)
    assert "4 chunks" in kvtier("inspect", command, folder, "--key-file", key_file).output
    assert events[1:] == ["000", command, command, command, "100", command]


KILLED = """
import os, signal, sys, anyio
from functools import partial
from pathlib import Path
from kvtier.cli import inspect_files

replace = Path.replace

def replaced(path, target):
    replace(path, target)
    os.kill(os.getpid(), signal.SIGKILL)

Path.replace = replaced
inspect_files.READERS = 1
anyio.run(partial(inspect_files.rekey, Path(sys.argv[1]), Path(sys.argv[2]), lambda part: None, plain=True))
"""


def test_rekey_that_is_killed(rekey: Rekey, folder: Path, key_file: Path) -> None:
    """Each file is the old one or the new one, and the next run changes the rest."""
    before = {file.stem: file.read_bytes()[HEADER_BYTES : HEADER_BYTES + 5000] for file in chunks(folder)}
    for _ in range(2):
        command = [sys.executable, "-c", KILLED, str(folder), str(key_file)]
        assert subprocess.run(command, timeout=TIMEOUT_SECONDS).returncode == -signal.SIGKILL
    encrypted = [StoredHeader.parse(file.read_bytes()).encryption is not None for file in chunks(folder)]
    assert encrypted.count(True) == 2
    assert "3 chunks: 1 encrypted again" in rekey("--plain").output
    assert payloads(folder, Keys.load(key_file, "here")) == before


def reseal(file: Path, change: int) -> None:
    """Change a byte of an encrypted payload, and compute the checksum again."""
    content = memoryview(bytearray(file.read_bytes()))
    header = StoredHeader.parse(content)
    content[HEADER_BYTES + change] ^= 1
    StoredHeader.seal(
        content,
        header.chunk,
        header.codec,
        header.stored_bytes,
        checksum=True,
        encryption=header.encryption,
    )
    file.write_bytes(content)


def test_verify_decrypts_with_the_key_file(
    kvtier: Kvtier, folder: Path, encrypted: list[Path], key_file: Path
) -> None:
    """Without it, there are only checksums, which anyone can compute again."""
    reseal(encrypted[1], 100)
    result = kvtier("inspect", "verify", folder)
    assert result.status == 0
    assert "3 chunks, 24KiB read, 0 corrupt.\n" in result.output
    assert "3 are encrypted, and only their checksum was verified: use --key-file." in result.output
    result = kvtier("inspect", "verify", folder, "--key-file", key_file, "--delete")
    assert result.status == 1
    assert (
        f"unreadable {encrypted[1]}: was not encrypted with key 1 of the key file, or chan" in result.output
    )
    assert "3 chunks, 24KiB read, 0 corrupt, 1 unreadable.\n" in result.output
    assert "checksum" not in result.output
    assert chunks(folder) == encrypted
    reseal(encrypted[1], 100)
    assert kvtier("inspect", "verify", folder, "--key-file", key_file).status == 0


@pytest.mark.usefixtures("encoded")
def test_verify_decodes_what_is_encrypted(
    kvtier: Kvtier, rekey: Rekey, folder: Path, key_file: Path, encoded: Path
) -> None:
    """What was encrypted with the key, but cannot be decoded, is corrupt."""
    stored = memoryview(bytearray(encoded.read_bytes()))
    header = StoredHeader.parse(stored)
    rekey("--plain")
    assert kvtier("inspect", "verify", folder, "--key-file", key_file).status == 0
    keys, payload = Keys.load(key_file, "here"), stored[HEADER_BYTES : HEADER_BYTES + header.stored_bytes]
    payload[0] ^= 1
    used = keys.encrypt(header.chunk, header.codec, keys.mark_of(""), payload, payload)
    StoredHeader.seal(stored, header.chunk, header.codec, len(payload), checksum=True, encryption=used)
    encoded.write_bytes(stored)
    result = kvtier("inspect", "verify", folder, "--key-file", key_file, "--delete")
    assert f"corrupt {encoded}: cannot be decoded" in result.output
    assert "1 corrupt and removed." in result.output
    assert not encoded.exists()


def test_verify_keeps_what_has_an_unknown_key(
    kvtier: Kvtier, folder: Path, encrypted: list[Path], key_file: Path
) -> None:
    for content in (f"2 {'cd' * 32}", f"1 {'cd' * 32}"):
        key_file.write_text(content)
        result = kvtier("inspect", "verify", folder, "--key-file", key_file, "--delete")
        assert result.status == 1
        assert "0 corrupt, 3 unreadable." in result.output
        assert chunks(folder) == encrypted


@pytest.mark.parametrize(
    ("tier", "shown"),
    [
        ({}, ""),
        ({"codec": "lossless", "ratio": 1.414}, " (lossless 1.41)"),
        ({"codec": "lossless", "ratio": None}, " (lossless)"),
        ({"codec": "identity", "ratio": 1.0, "encrypted": True}, " (encrypted)"),
        (
            {"codec": "auto", "ratio": 1.08, "encodes": False, "codec_gain": 0.69},
            " (auto 1.08, not encoding now as reads are 0.69 times as fast)",
        ),
        (
            {"codec": "auto", "ratio": 1.0, "encodes": True, "codec_gain": None},
            " (auto 1.00, encoding now)",
        ),
        ({"codec": "lossless", "ratio": 1.414, "encrypted": True}, " (lossless 1.41, encrypted)"),
    ],
)
def test_status_shows_how_a_tier_stores(tier: dict[str, Any], shown: str) -> None:
    assert cache_process._encoding(tier) == shown
