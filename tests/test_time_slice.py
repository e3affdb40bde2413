"""Short time slices: what the kernel notes of them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier import time_slice

ASK = "from kvtier.time_slice import ask_for_short_time_slices as ask;"
SLICE = """
def slice(thread):
    lines = open(f"/proc/self/task/{thread}/sched").read().splitlines()
    return next(line.split()[-1] for line in lines if line.startswith("se.slice"))
"""


def run(program: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()


def tells_slices() -> bool:
    sched = Path("/proc/self/sched")
    return sched.exists() and "se.slice" in sched.read_text()


@pytest.mark.skipif(not tells_slices(), reason="needs a kernel with /proc/PID/sched, Linux 6.12 or newer")
def test_the_kernel_notes_the_slice_for_this_thread_alone() -> None:
    here, other = run(f"""{SLICE}
import os, threading
os.setpriority(os.PRIO_PROCESS, 0, 0)
{ASK} assert ask()
thread = threading.Thread(target=lambda: print(slice(threading.get_native_id())))
print(slice(threading.get_native_id()), flush=True)
thread.start()
""")
    assert int(here) == time_slice.SLICE_SECONDS * 1e9 < int(other)


def test_a_priority_that_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpriority", lambda *_: -7)
    assert not time_slice.ask_for_short_time_slices()


def test_nice_stays() -> None:
    assert run(
        f"import os; os.setpriority(os.PRIO_PROCESS, 0, 7); {ASK} assert ask(); print(os.nice(0))"
    ) == ["7"]


def test_another_policy_stays() -> None:
    program = "import os; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0));"
    asked = run(f"{program} {ASK} print(ask(), os.sched_getscheduler(0) == os.SCHED_BATCH)")
    assert asked == ["False", "True"]


def test_a_refusal_is_harmless(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvtier")
    monkeypatch.setattr(os, "getpriority", lambda *_: 0)
    monkeypatch.setattr(time_slice, "_SCHED_SETATTR", {os.uname().machine: 100_000})
    assert not time_slice.ask_for_short_time_slices()
    assert "no short time slices: sched_setattr: Function not implemented" in caplog.text


def test_an_unknown_machine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_slice, "_SCHED_SETATTR", {})
    assert not time_slice.ask_for_short_time_slices()
