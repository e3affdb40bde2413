"""Time slices, as the kernel of this machine reports them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.concurrency.placement import SLICE_NANOSECONDS

SCRIPT = """
import os, sys, threading
from kvtier.concurrency.placement import shorten_slices

def slice_of_this_thread():
    lines = open("/proc/thread-self/sched").read().splitlines()
    return next(int(line.split(":")[1]) for line in lines if line.startswith("se.slice"))

os.setpriority(os.PRIO_PROCESS, 0, 0)
exec(sys.argv[1])
before, shortened, of_other_threads = slice_of_this_thread(), shorten_slices(), []
thread = threading.Thread(target=lambda: of_other_threads.append(slice_of_this_thread()))
thread.start()
thread.join()
print(int(shortened), before, slice_of_this_thread(), *of_other_threads)
"""


def reported(prepare: str = "") -> list[int]:
    """Return whether slices were shortened, those before and after, and those of a thread started then."""
    try:
        sched = Path("/proc/self/sched").read_text()
    except FileNotFoundError:
        sched = ""
    if "se.slice" not in sched:
        pytest.skip("this kernel does not report slices")
    if os.getuid() and os.getpriority(os.PRIO_PROCESS, 0):
        pytest.skip("only root may raise the priority of its processes")
    output = subprocess.check_output([sys.executable, "-c", SCRIPT, prepare])
    return [int(word) for word in output.split()]


def test_slices_are_short_in_this_thread_only() -> None:
    shortened, before, after, of_others = reported()
    if not shortened:
        pytest.skip("this kernel has the same slices for all")
    assert after == SLICE_NANOSECONDS
    assert of_others == before > SLICE_NANOSECONDS


@pytest.mark.parametrize(
    "prepare",
    [
        "os.setpriority(os.PRIO_PROCESS, 0, 5)",
        "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
        "import platform; platform.machine = lambda: 'another'",
    ],
    ids=["nice", "batch", "machine"],
)
def test_what_the_user_has_chosen_is_not_changed(prepare: str) -> None:
    shortened, before, after, of_others = reported(prepare)
    assert not shortened
    assert before == after == of_others
