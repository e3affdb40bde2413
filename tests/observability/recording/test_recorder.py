"""A recorder never delays its callers: a slow disk drops lookups, a failing one ends the recording."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio.lowlevel
import pytest

from kvtier.catalog.hints import ChunkHints
from kvtier.errors import SettingsError
from kvtier.memory.keys import KEY_BYTES
from kvtier.observability.recording import recorder as recorder_module
from kvtier.observability.recording.file import LookedUp, RecordingFile
from kvtier.observability.recording.format import EndRecord
from kvtier.observability.recording.reader import TraceAnswerEnd, read_events, read_recording
from kvtier.observability.recording.recorder import LOOKUP_BYTES, MAX_PENDING_BYTES, Recorder, recording
from kvtier.settings.observability import RecordingSettings
from kvtier.units import MIB
from tests.rigs.small_disk import mounted
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

KEYS = bytes(range(96))
HINTS = ChunkHints("tenant", priority=3)


def record(recorder: Recorder, chunks: int = 3) -> None:
    recorder.record((KEYS * (chunks // 3 + 1))[: chunks * KEY_BYTES], chunks * 16, 16, 4096, HINTS)


def stopped(recorder: Recorder) -> bool:
    return bool(recorder.status()["stopped"])


def has_written(recorder: Recorder, before: object) -> bool:
    return stopped(recorder) or recorder.status()["recorded"] != before


async def test_lookups_are_written_while_recording_and_at_exit(path: Path) -> None:
    async with recording(RecordingSettings(path=path)) as recorder:
        record(recorder)
        await until(lambda: recorder.status()["recorded"] == 1)
        [first] = read_recording(path)
        recorder.record(b"", 0, 16, 4096, None)
        record(recorder)
    requests = list(read_recording(path))
    assert len(requests) == 2
    assert (first.tokens, first.chunk_bytes, first.tenant, first.hints) == (48, 4096, "tenant", HINTS)
    assert 0 <= requests[0].time <= requests[1].time
    assert recorder.status() == {"path": str(path), "recorded": 2, "ends": 0, "dropped": 0, "stopped": ""}


async def test_ends_are_written_beside_lookups(path: Path) -> None:
    async with recording(RecordingSettings(path=path)) as recorder:
        record(recorder)
        recorder.answer_ended(KEYS[-2 * KEY_BYTES :], [1, 2], 0.0)
        recorder.answer_ended(KEYS[:KEY_BYTES], [], 1e9)
        recorder.answer_ended(KEYS[:KEY_BYTES], [], 0.0)
    request, *ends = read_events(path)
    assert all(isinstance(end, TraceAnswerEnd) for end in ends)
    assert ends[0].chunk == request.chunks[-1]  # type: ignore[union-attr]
    assert [len(end.signature) for end in ends] == [2, 0, 0]
    assert request.time <= ends[0].time <= ends[2].time
    assert ends[1].time == 0.0, "an answer does not end before the recording began"
    status = recorder.status()
    assert (status["recorded"], status["ends"], status["dropped"]) == (1, 3, 0)


async def test_cancelled_recording_is_complete(path: Path) -> None:
    with anyio.CancelScope() as scope:
        async with recording(RecordingSettings(path=path)) as recorder:
            record(recorder)
            scope.cancel()
            await anyio.sleep_forever()
    assert len(list(read_recording(path))) == 1


async def test_error_at_the_start_is_raised(path: Path) -> None:
    path.write_text("dear")
    with pytest.raises(SettingsError, match=r"^recording\.path: "):
        async with recording(RecordingSettings(path=path)):
            pytest.fail("it records")


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk whose writes block until the event is set."""
    write, unblocked = RecordingFile.write, threading.Event()

    def wait_and_write(self: RecordingFile, batch: Sequence[LookedUp | EndRecord]) -> None:
        unblocked.wait(60)
        write(self, batch)

    monkeypatch.setattr(RecordingFile, "write", wait_and_write)
    return unblocked


async def test_slow_disk_drops_lookups_and_warns_once(
    path: Path, blocked: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    size = 30_000 * KEY_BYTES
    fits = MAX_PENDING_BYTES // size
    async with recording(RecordingSettings(path=path)) as recorder:
        for _ in range(fits + 10):
            record(recorder, 30_000)
        for number in range(MAX_PENDING_BYTES // LOOKUP_BYTES):
            recorder.answer_ended(KEYS, [], 0.0)
            if number % 1000 == 0:  # All of them take a slow CPU longer than the loop may be blocked.
                await anyio.lowlevel.checkpoint()
        dropped = recorder.status()["dropped"]
        assert isinstance(dropped, int)
        assert dropped > 10, "ends take memory, too"
        blocked.set()
        await until(lambda: recorder.status()["recorded"] == fits)
        record(recorder)
    assert recorder.status()["dropped"] == dropped
    assert len(list(read_recording(path))) == fits + 1
    slow = f"recording: the disk of {path} is too slow: 1 lookups and ends so far are not recorded"
    assert [text for text in caplog.messages if "slow" in text] == [slow]


async def test_disk_that_hangs_does_not_keep_the_process_from_exiting(
    path: Path, blocked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "CLOSE_SECONDS", 0.1)
    async with recording(RecordingSettings(path=path)) as recorder:
        record(recorder)
    assert not blocked.is_set()
    blocked.set()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(5, "Input/output error"), "Input/output error"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (ValueError("a defect"), "a defect"),
    ],
)
async def test_any_error_of_the_writer_only_ends_the_recording_with_one_warning(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    reason: str,
) -> None:
    def fail(self: RecordingFile, batch: Sequence[LookedUp | EndRecord]) -> None:
        raise error

    monkeypatch.setattr(RecordingFile, "write", fail)
    async with recording(RecordingSettings(path=path)) as recorder:
        record(recorder)
        await until(lambda: stopped(recorder))
        record(recorder)
        recorder.answer_ended(KEYS, [], 0.0)
    assert (recorder.status()["stopped"], recorder.status()["dropped"]) == (reason, 3)
    warning = f"recording to {path} has stopped, serving goes on: {reason}"
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == [warning]


async def test_full_disk_keeps_what_was_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mounted(tmp_path / "small", 1) as folder:
        path = folder / "traffic"
        async with recording(RecordingSettings(path=path, max_bytes=16 * MIB)) as recorder:
            while not stopped(recorder):
                record(recorder, 60_000)
                written = recorder.status()["recorded"]
                await until(partial(has_written, recorder, written))
        assert recorder.status()["stopped"] == "No space left on device"
        assert {request.tokens for request in read_recording(path)} == {60_000 * 16}
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1


async def test_full_disk_does_not_prevent_a_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvtier")
    with mounted(tmp_path / "small", 1) as folder:
        (folder / "other").write_bytes(bytes(MIB))
        async with recording(RecordingSettings(path=folder / "traffic")) as recorder:
            record(recorder)
            status = recorder.status()
    assert (status["recorded"], status["dropped"], status["stopped"]) == (0, 1, "No space left on device")
    assert [entry.levelno for entry in caplog.records] == [logging.WARNING], "and none that says: recording"


@pytest.mark.parametrize(("tokens", "chunk_tokens"), [(0, 16), (32, 16), (49, 16), (3, 0)])
async def test_lookup_that_could_not_be_read_back_is_dropped(
    path: Path, tokens: int, chunk_tokens: int
) -> None:
    async with recording(RecordingSettings(path=path)) as recorder:
        recorder.record(KEYS, tokens, chunk_tokens, 4096, None)
        record(recorder)
    assert len(list(read_recording(path))) == recorder.status()["recorded"] == 1
    assert recorder.status()["dropped"] == 1
