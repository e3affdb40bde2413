"""Files are rotated, private, locked, whole, and never overwrite anything else."""

from __future__ import annotations

import os
import signal
import stat
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.tenants import tenant_of_salt
from kvtier.errors import SettingsError
from kvtier.memory.keys import KEY_BYTES
from kvtier.observability.recording.file import RecordingFile
from kvtier.observability.recording.format import MAX_BODY_BYTES, NUMBER_BYTES, RecordingError
from kvtier.observability.recording.reader import TraceAnswerEnd, read_events, read_recording
from kvtier.settings.observability import RecordingSettings
from kvtier.units import MIB
from tests.rigs.small_disk import mounted

from .recordings import AnswerEnded, begin, looked_up, of_keys, write


def times(path: Path) -> list[float]:
    return [request.time for request in read_recording(path)]


def test_file_is_private_whatever_was_there(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch(0o644)
    for path in (tmp_path / "new", empty):
        write(path, looked_up(1))
        write(path, looked_up(1))
        for file in (path, path.with_name(path.name + ".1")):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_neither_keys_nor_parts_of_them_are_written(path: Path) -> None:
    keys = os.urandom(50 * KEY_BYTES)
    write(path, of_keys(keys))
    content = path.read_bytes()
    assert not [at for at in range(len(keys) - 4) if keys[at : at + 4] in content and at % 4 == 0]


def test_ends_reveal_neither_keys_nor_signatures(tmp_path: Path) -> None:
    """Also if somebody knows how signatures are computed: they have other numbers in each recording."""
    key, signature = os.urandom(KEY_BYTES), [0x1122334455667788]
    found = []
    for name in ("one", "two"):
        write(
            tmp_path / name, of_keys(key), AnswerEnded(1.0, key, signature), AnswerEnded(2.0, key, signature)
        )
        content = (tmp_path / name).read_bytes()
        assert not [at for at in range(0, KEY_BYTES, 4) if key[at : at + 4] in content]
        assert not [order for order in ("little", "big") if signature[0].to_bytes(8, order)[:4] in content]
        found.append([event for event in read_events(tmp_path / name) if isinstance(event, TraceAnswerEnd)])
    (first, again), (other, _) = found
    assert first.signature == again.signature != other.signature
    assert first.chunk != other.chunk


def test_end_is_read_from_a_later_file_than_its_lookup(path: Path, tmp_path: Path) -> None:
    key = os.urandom(KEY_BYTES)
    file = begin(path)
    file.write([of_keys(key, 1.0), *(looked_up(60_000, 2.0) for _ in range(3)), file.end(3.0, key, [])])
    file.close()
    assert (tmp_path / "traffic.1").exists()
    first, *_, end = read_events(path)
    assert isinstance(end, TraceAnswerEnd)
    assert end.chunk == first.chunks[-1]  # type: ignore[union-attr]
    assert list(read_events(path.rename(tmp_path / "newest")))[-1] == end


def test_chunks_have_other_numbers_in_each_recording(tmp_path: Path) -> None:
    prompt = of_keys(os.urandom(5 * KEY_BYTES))
    for name in ("one", "two"):
        write(tmp_path / name, prompt, prompt)
    (first, again), (other, _) = read_recording(tmp_path / "one"), read_recording(tmp_path / "two")
    assert first.chunks == again.chunks
    assert not set(first.chunks).intersection(other.chunks)


def test_salts_cannot_be_confirmed_by_a_recording(tmp_path: Path) -> None:
    """A recording is given away; who reads it may guess salts, and compute the names that others see."""
    salted, named = ChunkHints(tenant_of_salt("team a")), ChunkHints("team-b", priority=2)
    for name in ("one", "two"):
        write(tmp_path / name, *(looked_up(1, hints=hints) for hints in (salted, salted, named)))
    (first, again, other), (elsewhere, *_) = (
        list(read_recording(tmp_path / name)) for name in ("one", "two")
    )
    assert first.tenant == again.tenant
    assert len({first.tenant, elsewhere.tenant, salted.tenant}) == 3
    assert salted.tenant.encode() not in (tmp_path / "one").read_bytes()
    assert other.hints == named


def test_files_are_rotated_and_read_in_order(path: Path, tmp_path: Path) -> None:
    file = begin(path, MIB, 3)
    for number in range(100):
        file.write([looked_up(10_000, number + 0.25), looked_up(1, number + 0.5)])
    file.close()
    assert sorted(name.name for name in tmp_path.iterdir()) == ["traffic", "traffic.1", "traffic.2"]
    assert all(0 < name.stat().st_size <= MIB for name in tmp_path.iterdir())
    found = times(path)
    every = [number + part for number in range(100) for part in (0.25, 0.5)]
    assert 50 < len(found) < 100
    assert found == every[-len(found) :], "the oldest were deleted"
    newest = path.rename(tmp_path / "newest")
    assert found == times(tmp_path / "traffic.2") + times(tmp_path / "traffic.1") + times(newest)


def test_single_file_begins_anew(path: Path, tmp_path: Path) -> None:
    write(path, *(looked_up(10_000, float(number)) for number in range(100)), files=1)
    assert [name.name for name in tmp_path.iterdir()] == ["traffic"]
    assert path.stat().st_size <= MIB
    assert times(path)[-1] == 99.0


def test_earlier_recording_is_kept_and_not_mixed_with_the_new_one(path: Path, tmp_path: Path) -> None:
    for number in range(6):
        write(path, looked_up(1, float(number)))
    assert times(path) == [5.0]
    assert times(tmp_path / "traffic.3") == [2.0]
    assert len(list(tmp_path.iterdir())) == 4


def test_reader_sees_each_record_once_while_files_are_renamed(path: Path) -> None:
    file = begin(path)
    file.write([looked_up(60_000, 1.0)])
    requests = read_recording(path)
    assert next(requests).time == 1.0
    file.write([looked_up(60_000, float(number)) for number in (2, 3, 4, 5)])
    file.close()
    assert [request.time for request in requests] == [2.0], "the rest of the file that was open"
    assert times(path) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_too_long_lookup_is_left_out(path: Path) -> None:
    longest = MAX_BODY_BYTES // NUMBER_BYTES - 16
    file = write(path, looked_up(longest, 1.0), looked_up(longest + 16, 2.0), looked_up(1, 3.0))
    assert times(path) == [1.0, 3.0]
    assert file.too_long == 1


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        ("text", "exists and is not a recording"),
        ("older text", r"traffic\.2 exists and is not a recording"),
        ("folder", "Is a directory"),
        ("pipe", "No such device or address"),
        ("device", "the path is not a file"),
        ("no folder", "No such file or directory"),
        ("locked", "another process records to it"),
    ],
)
def test_path_that_cannot_be_used_is_one_error(
    path: Path, tmp_path: Path, obstacle: str, reason: str
) -> None:
    locked = None
    match obstacle:
        case "text":
            path.write_text("dear")
        case "older text":
            write(path, looked_up(1))
            (tmp_path / "traffic.2").write_text("dear")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "device":
            path = Path("/dev/null")
        case "no folder":
            path = tmp_path / "folder" / "traffic"
        case "locked":
            locked = begin(path)
    with pytest.raises(SettingsError, match=rf"^recording\.path: cannot record to {path} \(.*{reason}\)"):
        begin(path)
    if locked is not None:
        locked.write([looked_up(1)])
        locked.close()
        assert len(times(path)) == 1
    elif obstacle in ("text", "older text"):
        text = path if obstacle == "text" else tmp_path / "traffic.2"
        assert text.read_text() == "dear"


def test_processes_that_record_nothing_delete_nothing(path: Path, tmp_path: Path) -> None:
    write(path, looked_up(1, 7.0))
    for _ in range(6):
        write(path)
    path.write_bytes(path.read_bytes()[:30])  # As after a power loss.
    write(path)
    assert sorted(name.name for name in tmp_path.iterdir()) == ["traffic", "traffic.1"]
    assert times(tmp_path / "traffic.1") == [7.0]


def test_fewer_files_than_before(path: Path, tmp_path: Path) -> None:
    for _ in range(5):
        write(path, looked_up(1))
    (tmp_path / "traffic.9").write_text("dear")
    write(path, files=2)
    assert sorted(name.name for name in tmp_path.iterdir()) == ["traffic", "traffic.1", "traffic.9"]


def test_configured_tenants_keep_their_names(path: Path) -> None:
    salted = tenant_of_salt("secret")
    file = RecordingFile.open(RecordingSettings(path=path), {salted: "team-a", "salt-pool": "salt-pool"})
    file.write([looked_up(1, hints=ChunkHints(name)) for name in (salted, "salt-pool", "someone")])
    file.close()
    assert [request.tenant for request in read_recording(path)] == ["team-a", "salt-pool", "someone"]


def test_without_a_path_there_is_no_recording() -> None:
    with pytest.raises(SettingsError, match=r"recording\.path is not set"):
        RecordingFile.open(RecordingSettings())


def test_other_file_is_not_overwritten_while_recording(path: Path, tmp_path: Path) -> None:
    file = begin(path)
    (tmp_path / "traffic.1").write_text("dear")
    with pytest.raises(RecordingError, match=r"traffic\.1 exists and is not a recording"):
        file.write([looked_up(60_000, float(number)) for number in range(5)])
    file.close()
    assert (tmp_path / "traffic.1").read_text() == "dear"
    assert times(path) == [0.0, 1.0]


def test_full_disk_leaves_whole_records(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", 1) as folder:
        path = folder / "traffic"
        file = begin(path, 16 * MIB)
        for number in range(4):
            file.write([looked_up(30_000, float(number))])
        with pytest.raises(OSError, match="No space left on device"):
            file.write([looked_up(30_000, 4.0)])
        file.close()
        assert times(path) == [0.0, 1.0, 2.0, 3.0]


def test_killed_writer_leaves_whole_records(path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):  # Else this copy of the test process would run the other tests.
            file = begin(path, 64 * MIB)
            while True:
                file.write([looked_up(1000, float(number)) for number in range(10)])
        os._exit(1)
    try:
        deadline = time.monotonic() + 60
        while not (path.exists() and path.stat().st_size > MIB):
            assert time.monotonic() < deadline
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    found = times(path)
    assert len(found) > 100
    assert found == [float(number % 10) for number in range(len(found))]
    write(path, looked_up(1, 7.0))
    assert times(path) == [7.0], "the lock ends with the process"
