"""`kvtier serve` as a process: it starts once, drains on SIGTERM, and survives kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.bridge.client import SchedulerBridge, WorkerBridge, status
from kvtier.header import HEADER_BYTES

from .conftest import CHUNK_TOKENS, KEYS, LAYOUT, answers, hello, store, wait_until

Start = Callable[..., subprocess.Popen[str]]


def test_sigterm_writes_everything_before_it_ends(tmp_path: Path, start: Start) -> None:
    process = start()
    wait_until(lambda: answers(tmp_path / "socket"))
    store(tmp_path / "socket", KEYS)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not (tmp_path / "socket").exists()
    assert process.stderr is not None
    said = process.stderr.read().splitlines()
    assert [line for line in said if " INFO kvtier: " not in line] == [], "it ends without a warning"
    start()
    wait_until(lambda: answers(tmp_path / "socket"))
    report = status(tmp_path / "socket")
    assert report["tiers"][1]["chunks"] == len(KEYS)


def test_kill_9_in_the_middle_of_writing_leaves_only_whole_chunks(tmp_path: Path, start: Start) -> None:
    for pause in (0, 0.002, 0.005, 0.01, 0.03):
        process = start()
        wait_until(lambda: answers(tmp_path / "socket"))
        scheduler, worker = store(tmp_path / "socket", KEYS)
        time.sleep(pause)
        process.kill()
        process.wait()
        scheduler.close()
        worker.close()
        again = start()
        wait_until(lambda: answers(tmp_path / "socket"))
        report = status(tmp_path / "socket")
        files = list((tmp_path / "ssd").rglob("*.kv"))
        assert report["tiers"][1]["chunks"] == len(files)
        assert report["tiers"][1]["used_bytes"] == sum(file.stat().st_size for file in files)
        assert not list((tmp_path / "ssd").rglob("*.tmp"))
        scheduler = SchedulerBridge(hello("scheduler"), tmp_path / "socket")
        worker = WorkerBridge(hello("worker"), tmp_path / "socket")
        worker.connect()
        scheduler.connect()
        assert worker.arena is not None
        ticket = scheduler.look_up(KEYS, CHUNK_TOKENS * len(KEYS))
        assert ticket is not None
        finding = scheduler.found(ticket, wait=60)
        while finding is not None and not finding.final:
            time.sleep(0.01)
            finding = scheduler.found(ticket)
        assert finding is not None
        for key, offset in zip(KEYS, finding.offsets, strict=False):
            payload = bytes(worker.arena.view(offset + HEADER_BYTES, LAYOUT.payload_bytes(CHUNK_TOKENS)))
            assert payload == key * (len(payload) // len(key))
        scheduler.close()
        worker.close()
        again.kill()
        again.wait()
        for file in files:
            file.unlink(missing_ok=True)


def test_a_second_process_on_one_socket_names_the_first(tmp_path: Path, start: Start) -> None:
    first = start()
    wait_until(lambda: answers(tmp_path / "socket"))
    second = start()
    _, message = second.communicate(timeout=60)
    assert second.returncode != 0
    assert str(first.pid) in message
    assert "Traceback" not in message
    assert status(tmp_path / "socket")["pid"] == first.pid


@pytest.mark.parametrize("taken", ["a file", "a folder"])
def test_a_socket_that_is_something_else_is_left_alone(tmp_path: Path, start: Start, taken: str) -> None:
    path = tmp_path / "socket"
    if taken == "a file":
        path.write_text("dear")
    else:
        path.mkdir()
    process = start()
    _, message = process.communicate(timeout=60)
    assert process.returncode != 0
    assert f"socket {path} is there already, and is no socket" in message
    assert "Traceback" not in message
    assert path.is_dir() if taken == "a folder" else path.read_text() == "dear"


def test_a_killed_engine_leaves_nothing(tmp_path: Path, start: Start) -> None:
    start()
    wait_until(lambda: answers(tmp_path / "socket"))
    pid = os.fork()
    if pid == 0:
        store(tmp_path / "socket", KEYS[:3])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_until(lambda: status(tmp_path / "socket")["engines"] == [])
    report = status(tmp_path / "socket")
    assert report["tiers"][0]["chunks"] == 3


def test_it_runs_without_torch(tmp_path: Path) -> None:
    code = "import sys, kvtier.bridge.serve, kvtier.backends.disk, kvtier.cli; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
