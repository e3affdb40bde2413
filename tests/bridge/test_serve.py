"""`kvtier serve` as a process: it starts once, drains on SIGTERM, and survives SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier.bridge.client import status
from kvtier.memory.header import HEADER_BYTES
from kvtier.pipeline.query import Query
from tests.rigs.bridges import CHUNK_TOKENS, KEYS, LAYOUT, Start, connect, store
from tests.rigs.waiting import wait_until

PAUSES = [
    0,
    pytest.param(0.002, marks=pytest.mark.slow),
    0.005,
    pytest.param(0.01, marks=pytest.mark.slow),
    0.03,
]
"""Seconds of writing before a kill."""


def test_sigterm_writes_everything_before_exit(tmp_path: Path, start: Start) -> None:
    process = start()
    store(tmp_path / "socket", KEYS)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not (tmp_path / "socket").exists()
    assert process.stderr is not None
    lines = process.stderr.read().splitlines()
    assert [line for line in lines if " INFO kvtier: " not in line] == [], "it exits without a warning"
    start()
    report = status(tmp_path / "socket")
    assert report["tiers"][1]["chunks"] == len(KEYS)


@pytest.mark.parametrize("pause", PAUSES)
def test_sigkill_during_writes_leaves_only_whole_chunks(tmp_path: Path, start: Start, pause: float) -> None:
    process = start()
    scheduler, worker = store(tmp_path / "socket", KEYS)
    time.sleep(pause)
    process.kill()
    process.wait()
    scheduler.close()
    worker.close()
    start()
    report = status(tmp_path / "socket")
    files = list((tmp_path / "ssd").rglob("*.kv"))
    assert report["tiers"][1]["chunks"] == len(files)
    assert report["tiers"][1]["used_bytes"] == sum(file.stat().st_size for file in files)
    assert not list((tmp_path / "ssd").rglob("*.tmp"))
    scheduler, worker = connect(tmp_path / "socket")
    assert worker.arena is not None
    ticket = scheduler.look_up(Query(KEYS, CHUNK_TOKENS * len(KEYS)))
    assert ticket is not None
    wait_until(lambda: bool((lookup := scheduler.found(ticket)) and lookup.final))
    lookup = scheduler.found(ticket)
    assert lookup is not None
    for key, offset in zip(KEYS, lookup.offsets, strict=False):
        payload = bytes(worker.arena.view(offset + HEADER_BYTES, LAYOUT.payload_bytes(CHUNK_TOKENS)))
        assert payload == key * (len(payload) // len(key))


def test_second_process_on_one_socket_names_the_first(tmp_path: Path, start: Start) -> None:
    first = start()
    second = start()
    _, message = second.communicate(timeout=60)
    assert second.returncode != 0
    assert str(first.pid) in message
    assert "Traceback" not in message
    assert status(tmp_path / "socket")["pid"] == first.pid


@pytest.mark.parametrize("obstacle", ["a file", "a folder"])
def test_path_that_is_not_a_socket_is_not_removed(tmp_path: Path, start: Start, obstacle: str) -> None:
    path = tmp_path / "socket"
    if obstacle == "a file":
        path.write_text("dear")
    else:
        path.mkdir()
    process = start()
    _, message = process.communicate(timeout=60)
    assert process.returncode != 0
    assert f"{path} exists and is not a socket" in message
    assert "Traceback" not in message
    assert path.is_dir() if obstacle == "a folder" else path.read_text() == "dear"


def test_killed_engine_leaks_nothing(tmp_path: Path, start: Start) -> None:
    start()
    pid = os.fork()
    if pid == 0:
        store(tmp_path / "socket", KEYS[:3])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_until(lambda: status(tmp_path / "socket")["engines"] == [])
    report = status(tmp_path / "socket")
    assert report["tiers"][0]["chunks"] == 3


def test_cache_process_does_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys, kvtier.bridge.serve, kvtier.backends.disk.backend, kvtier.cli\n"
        "print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
