from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from soak import leaks
from soak.findings import Record
from soak.lane import Lane
from soak.oracle import Mismatch, Oracle, Question, compare
from soak.schedule import Conversation, Exchange, Fault, Piece
from soak.stack import MARK, marked
from soak.stalls import LIMIT_SECONDS, Reading, Stall, Stalls, outside_pauses, read_clocks, read_file
from tests.rigs.vllm.engine import Answer, Engines

IDLE: Mapping[str, Any] = {
    "engines": [{"leases": 0, "reservations": 0, "tickets": 0}],
    "arena": {"leases": 7},
    "tiers": [{"chunks": 7}],
    "flights": 0,
    "pending_bytes": 0,
    "pinned_chunks": 0,
    "pushed": {"announced": 0, "waiting": 0},
    "serving": {"grants": 0, "granted_bytes": 0, "unauthenticated": 0},
    "kv_transfers": {"open": 0},
    "peers": [{"granted_chunks": 0, "in_flight_bytes": 0}],
    "controller": {"commands": 0},
}


@pytest.mark.parametrize(
    ("got", "mismatch"),
    [
        ([1, 2, 3], None),
        ([1, 9, 3], Mismatch(1, 2, 9)),
        ([1, 2], Mismatch(2, 3, None)),
        ([1, 2, 3, 4], Mismatch(3, None, 4)),
    ],
)
def test_wrong_token_is_detected(got: list[int], mismatch: Mismatch | None) -> None:
    assert compare([1, 2, 3], got) == mismatch


class NoEngine(Oracle):
    """An oracle for which the token ``TIE`` is as likely as the expected one."""

    def gaps(self, mismatches: Sequence[tuple[Question, Mismatch]]) -> list[float]:
        return [0.0 if mismatch.got == TIE else 2.5 for _, mismatch in mismatches]


TIE = 77


def test_wrong_answer_is_a_finding_unless_it_is_a_tie(tmp_path: Path) -> None:
    record = Record()
    lane = Lane(0, lambda: None, [], NoEngine(Engines(tmp_path), tmp_path), record)  # type: ignore[arg-type, return-value]
    question = Question([5, 6], [1, 2, 3])
    lane.check(question, Answer([1, 2, 3], 0, "length"), "a right one")
    lane.check(question, Answer([1, TIE, 3], 0, "length"), "a tie")
    lane.judge()
    assert not record.found
    assert record.counts["ties"] == 1
    lane.check(question, Answer([1, 2, 4], 1, "length"), "a wrong one")
    lane.judge()
    assert record.found == {"wrong token": 1}
    assert "a wrong one: token 2 is 4 and should be 3" in record.findings[0].what
    assert record.counts["answers"] == 3


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("leases", {"engines": [{"leases": 1, "reservations": 0, "tickets": 0}]}),
        ("reservations", {"engines": [{"leases": 0, "reservations": 1, "tickets": 0}]}),
        ("tickets", {"engines": [{"leases": 0, "reservations": 0, "tickets": 1}]}),
        ("arena leases", {"arena": {"leases": 8}}),
        ("flights", {"flights": 1}),
        ("pending bytes", {"pending_bytes": 1}),
        ("pinned chunks", {"pinned_chunks": 1}),
        ("pending pushes", {"pushed": {"announced": 1, "waiting": 0}}),
        ("grants", {"serving": {"grants": 1}}),
        ("chunks granted by peers", {"peers": [{"granted_chunks": 1, "in_flight_bytes": 0}]}),
        ("KV transfers", {"kv_transfers": {"open": 1}}),
        ("commands", {"controller": {"commands": 1}}),
    ],
)
def test_held_resources_are_reported(name: str, change: dict[str, Any]) -> None:
    assert leaks.held(IDLE) == {}
    assert leaks.wait_until_idle(lambda: {**IDLE, **change}, 0.0) == {name: 1}


def test_resources_released_in_time_are_not_a_leak() -> None:
    statuses = deque([{**IDLE, "flights": 2}, {**IDLE, "flights": 1}, IDLE])
    assert leaks.wait_until_idle(statuses.popleft, 60.0) == {}


def test_growing_descriptors_are_reported(tmp_path: Path) -> None:
    before = leaks.descriptors(os.getpid())
    chunk = tmp_path / "a.kv"
    with chunk.open("wb"):
        after = leaks.descriptors(os.getpid())
        assert list(leaks.grown(before, after)) == ["chunk file"]
    assert leaks.grown({"socket": 3}, {"socket": 3 + leaks.SOCKETS_ALLOWED}) == {}
    assert list(leaks.grown({"socket": 3}, {"socket": 4 + leaks.SOCKETS_ALLOWED})) == ["socket"]
    pumps = "anon_inode:[eventfd]"
    assert leaks.grown({pumps: 2}, {pumps: 2 + leaks.PUMPS_ALLOWED}) == {}
    assert list(leaks.grown({pumps: 2}, {pumps: 3 + leaks.PUMPS_ALLOWED})) == [pumps]
    pipes = [os.pipe() for _ in range(leaks.OTHERS_ALLOWED)]
    try:
        assert list(leaks.grown(before, leaks.descriptors(os.getpid()))) == ["pipe"]
    finally:
        for pair in pipes:
            for end in pair:
                os.close(end)
    assert leaks.grown(before, leaks.descriptors(os.getpid())) == {}


def test_growing_tasks_are_reported() -> None:
    assert leaks.more_tasks({"run": 1}, {"run": 1 + leaks.TASKS_ALLOWED, "other": 1}) == {}
    assert list(leaks.more_tasks({"run": 1}, {"run": 2 + leaks.TASKS_ALLOWED})) == ["run"]
    for name, allowed in ((leaks.SERVED, leaks.SERVED_ALLOWED), (leaks.ENDPOINT, leaks.ENDPOINT_ALLOWED)):
        full = f"kvtier.{name}"
        assert leaks.more_tasks({full: 1}, {full: 1 + allowed}) == {}
        assert list(leaks.more_tasks({}, {full: 1 + allowed})) == [full]


def test_leftover_process_is_found() -> None:
    command = [sys.executable, "-S", "-c", "input()"]
    child = subprocess.Popen(command, env={**os.environ, MARK: "this run"}, stdin=subprocess.PIPE)
    try:
        assert marked("this run") == [child.pid]
        assert marked("another") == []
        assert "input()" in leaks.describe([child.pid])
    finally:
        child.kill()
        child.communicate()
    assert marked("this run") == []


def test_errors_in_a_log_are_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert leaks.errors_in(log) == []
    log.write_text("INFO kvtier: serving\nWARNING kvtier: no ERRORS\n")
    assert leaks.errors_in(log) == []
    log.write_text("ERROR kvtier: a connection failed\nTraceback (most recent call last):\n")
    assert len(leaks.errors_in(log)) == 2


class Clocks:
    """A replacement for :func:`read_clocks`, with a list of hook durations."""

    def __init__(self, *spans: Reading) -> None:
        self._now = Reading(100.0, 10.0, 1.0, 0)
        self._spans = deque(spans)

    def __call__(self, *, ended: bool) -> Reading:
        if ended:
            self._now = Reading(*map(sum, zip(self._now, self._spans.popleft(), strict=True)))
        return self._now


def step(stalls: Stalls, *hooks: str) -> None:
    with stalls.timed("schedule", scheduled=True):
        pass
    for hook in hooks:
        with stalls.timed(hook):
            pass


def test_computing_and_waiting_for_a_cpu_are_not_stalls(tmp_path: Path) -> None:
    path = tmp_path / "hooks-42.jsonl"
    computed, queued = Reading(0.3, 0.3, 0.0), Reading(0.5, 0.01, 0.49)
    stalls = Stalls(path, Clocks(computed, queued, computed))
    step(stalls, "load")
    step(stalls)
    stalls.end_step()
    found, hooks = read_file(path)
    assert found == []
    assert hooks["schedule"].max_cpu == pytest.approx(0.3)


def test_stall_is_the_sum_of_all_hooks_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "hooks-42.jsonl"
    short = Reading(0.03, 0.0, 0.0, 1)
    stalls = Stalls(path, Clocks(short, Reading(0.0, 0.0, 0.0), short, short))
    step(stalls)
    step(stalls, "load", "save")
    stalls.end_step()
    found, _ = read_file(path)
    assert [(stall.engine, stall.step, stall.faults) for stall in found] == [(42, 1, 2)]
    assert found[0].blocked == pytest.approx(0.06)
    assert found[0].hooks == pytest.approx({"load": 0.03, "save": 0.03})


def test_stall_of_a_stopped_engine_is_ignored() -> None:
    stall = Stall(42, 1, 10.0, 11.0, 0.9, 1.0, 0, {})
    assert outside_pauses([stall], []) == [stall]
    assert outside_pauses([stall], [(10.5, 10.6)]) == []
    assert outside_pauses([stall], [(11.5, 12.0)]) == [stall]


def test_sleeping_is_a_stall_and_computing_is_not(tmp_path: Path) -> None:
    path = tmp_path / "hooks-42.jsonl"
    stalls = Stalls(path)
    with stalls.timed("sleeps"):
        threading.Event().wait(2 * LIMIT_SECONDS)
    stalls.end_step()
    with stalls.timed("computes"):
        began = read_clocks(ended=True).cpu
        while read_clocks(ended=True).cpu < began + 2 * LIMIT_SECONDS:
            pass
    stalls.end_step()
    found, _ = read_file(path)
    assert [list(stall.hooks) for stall in found] == [["sleeps"]]


def test_finding_lists_concurrent_faults(tmp_path: Path) -> None:
    record = Record()
    record.begin("tcp")
    over = record.apply(Fault(0.0, "kill-cache", "cache-1", 1.0, 0))
    over.started, over.ended = -100.0, -50.0
    now = record.apply(Fault(0.0, "fill-disk", "disk-0", 1.0, 0))
    now.started = 0.0
    record.find("leak", "one lease", 0.5)
    assert [str(now)] == record.findings[0].faults
    record.write(tmp_path / "report.json", seed=7)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["seed"], report["passed"], report["found"]) == (7, False, {"leak": 1})
    assert len(report["timeline"]) == 2


def test_oracle_counts_conversations() -> None:
    conversation = Conversation(Piece(0, 10), (Exchange(Piece(100, 5), 3),))
    oracle = NoEngine(None, Path())  # type: ignore[arg-type]
    oracle.questions[0, 0, None] = Question([1] * 15, [2, 3, 4])
    assert oracle.conversations == 1
    assert len(oracle.question(0, 0).answer) == conversation.exchanges[0].new_tokens


def test_fault_without_effect_is_a_finding() -> None:
    record = Record()
    for kind, hits in (("cut-worker", [0, 0, 0]), ("plant-files", [0, 0, 4]), ("kill-nixl", [0, 0])):
        for number in hits:
            record.apply(Fault(0.0, kind, "engine-0", 1.0, 0)).end(number)
    for _ in range(5):
        record.apply(Fault(0.0, "kill-redis", "redis", 1.0, 0)).end(None)
    record.find_without_effect()
    assert [finding.what for finding in record.findings] == ["cut-worker has hit nothing in 3 times"]
