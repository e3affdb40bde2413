"""Rounds of abuse find nothing in processes that work, and each check finds a fault planted for it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import abuse.engine
import abuse.run
from abuse.hostile import dial
from abuse.run import KINDS, Results, Run
from abuse.stack import DISK_BYTES, Process, Stack, running
from kvtier.errors import ChannelError
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.query import Query
from soak.leaks import wait_until_idle

ROOT = Path(__file__).parents[2]


PROMPTS = itertools.count(1000, 1000)
"""Where the runs of this module begin, so that none stores what another one has stored."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_kind_of_round(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = abused("--rounds", str(len(KINDS)), "--seed", "7", "--json", str(report))
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(report.read_text())
    assert found["rounds"] == dict.fromkeys(KINDS, 1)
    assert all(found["sent"][kind] for kind in KINDS)
    assert found["counts"]["chunks read from ram"] > 0


def test_unknown_kinds_are_listed() -> None:
    result = abused("--only", "nonsense")
    assert result.returncode == 2
    assert "kill -9: cache-0" in result.stderr


def abused(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "abuse", *arguments]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="kva-") as folder, running(Path(folder)) as started:
        yield started


@pytest.fixture
def run(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run that waits briefly for what never comes. It finds nothing before and after the planted fault."""
    results = Results()
    made = Run(stack, 1, "", results)
    assert results.findings == []
    made.number = 1
    made.work.prompts = next(PROMPTS)
    with monkeypatch.context() as patches:
        patches.setattr(abuse.run, "RECOVERY_SECONDS", 1.0)
        patches.setattr(abuse.run, "wait_until_idle", partial(wait_until_idle, seconds=0.5))
        yield made
    results.findings.clear()
    made.check()
    assert results.findings == []


Found = Callable[[], str]


@pytest.fixture
def found(run: Run) -> Found:
    def check() -> str:
        run.check()
        return "\n".join(finding.what for finding in run.results.findings)

    return check


def test_hostile_bytes_do_no_harm(stack: Stack) -> None:
    run = Run(stack, 7, "hostile", Results())
    for _ in range(3):
        run.round()
    assert run.results.findings == []
    assert run.results.sent.total() > 200
    assert run.results.slowest.keys() == run.results.rounds.keys()


@pytest.mark.parametrize("name", ["cache-0", "controller", "proxy"])
def test_a_process_that_died(stack: Stack, found: Found, name: str) -> None:
    process = stack.processes[name]
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert f"{name} has exited with status -9" in found()


def test_a_process_that_does_not_answer(
    stack: Stack, run: Run, found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = stack.processes["controller"]
    monkeypatch.setattr(process, "answers", lambda: False)
    monkeypatch.setattr(Process, "start", lambda _: monkeypatch.undo())
    monkeypatch.setattr(Process, "kill", lambda _: None)
    assert "controller does not answer" in found()


def test_a_traceback_in_a_log(stack: Stack, found: Found) -> None:
    with stack.processes["proxy"].log.open("a") as log:
        log.write("Traceback (most recent call last):\n  planted\n")
    assert "a traceback in" in found()


def test_wrong_bytes(stack: Stack, run: Run, found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(key: ChunkKey, size: int) -> bytes:
        return bytes(size)

    with monkeypatch.context() as patches:
        patches.setattr(abuse.engine, "noise", other)
        socket, number = run.work.store()
    run.work.read(socket, number)
    assert f"10 of 10 chunks of prompt {number} have wrong bytes on {socket}" in found()


def test_an_engine_that_cannot_store(run: Run, found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ChannelError("planted")

    with monkeypatch.context() as patches:
        patches.setattr(run.work, "store", fail)
        assert "no engine can store and load 1 s after the round: planted" in found()


def test_what_is_still_held(stack: Stack, run: Run, found: Found) -> None:
    socket, number = run.work.store()
    with abuse.engine.connected(socket) as (_, scheduler):
        ticket = scheduler.look_up(Query(abuse.engine.prompt(number), 640))
        assert ticket is not None
        assert scheduler.found(ticket, 30.0) is not None
        assert "cache-" in (text := found())
        assert "still holds" in text


def test_a_disk_over_its_capacity(stack: Stack, found: Found) -> None:
    planted = stack.disks[0].tier / "planted.kv"
    planted.write_bytes(bytes(DISK_BYTES + 1))
    try:
        assert "the disk of cache-0 has" in found()
    finally:
        planted.unlink(missing_ok=True)


def test_memory_that_grows(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patches:
        patches.setattr(abuse.run, "MORE_BYTES", -1 << 40)
        assert "MiB of memory" in found()


def test_descriptors_that_grow(stack: Stack, found: Found) -> None:
    opened = [dial(stack.addresses[0].controller) for _ in range(abuse.run.MORE_DESCRIPTORS + 10)]
    try:
        assert "controller has" in (text := found())
        assert "open descriptors" in text
    finally:
        for connected in opened:
            connected.close()
