"""`kvtier serve --record FILE` as a process, with engines that use the clients of the bridge."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.bridge.client import SchedulerBridge, status
from kvtier.catalog.hints import ChunkHints
from kvtier.memory.header import object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.observability.recording.reader import TraceRequest, read_recording
from kvtier.pipeline.query import Query
from tests.rigs.bridges import CHUNK_TOKENS, KEYS, LAYOUT, Start, _close_bridges, start, store
from tests.rigs.waiting import wait_until

__all__ = ["_close_bridges", "start"]

HINTS = ChunkHints("tenant-a", priority=7, retention=60.0)


def look_up(scheduler: SchedulerBridge, keys: Sequence[ChunkKey], tokens: int, **more: Any) -> None:
    ticket = scheduler.look_up(Query(keys, tokens, **more))
    assert ticket is not None
    assert scheduler.found(ticket, wait=60) is not None
    scheduler.cancel(ticket)


def recorded(tmp_path: Path) -> dict[str, Any]:
    report: dict[str, Any] = status(tmp_path / "socket")["recording"]
    return report


def test_lookups_of_engines_are_recorded_once(path: Path, tmp_path: Path, start: Start) -> None:
    process = start("--record", str(path))
    scheduler, _ = store(tmp_path / "socket", KEYS[:3])
    look_up(scheduler, KEYS, len(KEYS) * CHUNK_TOKENS, hints=HINTS)
    look_up(scheduler, KEYS[:3], 2 * CHUNK_TOKENS + 5)
    look_up(scheduler, KEYS[:4], 4 * CHUNK_TOKENS, repeated=True)
    look_up(scheduler, KEYS[5:6], CHUNK_TOKENS)
    wait_until(lambda: recorded(tmp_path)["recorded"] == 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    first, second, third = read_recording(path)
    assert len(first.chunks) == len(KEYS), "also the chunks that are not held"
    assert list(second.chunks) == list(first.chunks[:3])
    assert list(third.chunks) == [first.chunks[5]]
    assert first.time <= second.time <= third.time
    size = object_bytes(LAYOUT.payload_bytes(CHUNK_TOKENS))
    tokens = len(KEYS) * CHUNK_TOKENS
    assert first == TraceRequest(first.time, first.chunks, tokens, 0, size, "tenant-a", HINTS)
    assert second == TraceRequest(second.time, second.chunks, 2 * CHUNK_TOKENS + 5, 0, size)
    content = path.read_bytes()
    assert not [key for key in KEYS if key[:8] in content]


def test_rest_is_written_at_exit(path: Path, tmp_path: Path, start: Start) -> None:
    process = start("--record", str(path))
    scheduler, _ = store(tmp_path / "socket", KEYS[:1])
    for _ in range(50):
        look_up(scheduler, KEYS, len(KEYS) * CHUNK_TOKENS)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert len(list(read_recording(path))) == 50
    assert process.stderr is not None
    assert "WARNING" not in process.stderr.read()


def test_unusable_file_is_one_error(path: Path, tmp_path: Path, start: Start) -> None:
    path.write_text("dear")
    process = start("--record", str(path))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    reason = f"{path} exists and is not a recording"
    assert errors == f"error: recording.path: cannot record to {path} ({reason}): use another path\n"
    assert not (tmp_path / "ssd").exists(), "nothing else was opened"


def test_nothing_is_recorded_by_default(tmp_path: Path, start: Start) -> None:
    start()
    assert "recording" not in status(tmp_path / "socket")
