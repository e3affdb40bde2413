"""A watchdog for the event loop: was it blocked, for how long, and where.

A timer on the loop beats every few milliseconds, and a monitor thread checks it. A missing beat alone proves
nothing: on a busy machine a thread that is ready to run may wait for a core for tens of milliseconds, and no
test may fail for that. So wall time is not what counts. Of the time without a beat two kinds are counted:

- CPU time of the loop's thread (``pthread_getcpuclockid``): it computed, in Python or in C, and did not
  return to the loop. A thread that waits for a core consumes none.
- Time in which the thread slept in the kernel, outside the loop's own ``select``: in a blocking call, such as
  ``time.sleep``, a lock or a read from a disk. It slept from one look to the next if both find it asleep
  (``/proc/<pid>/task/<id>/stat``: ``S`` or ``D``) at the same instruction, and it had no core in between
  (``schedstat``). What it waited for may not have had a core either, so these are deducted: the time in
  which other threads of the process computed or waited for a core, since they hold locks and the GIL, and
  the time in which a child process waited for a core, since starting one waits for it.

Garbage collection is not counted, nor what it finalizes: it interrupts any code. Nor is reading source files
for a traceback that is logged, which takes as long as the disk is busy.

All of this errs on the side of too little. A worker thread that holds the GIL for long without computing in
the loop's thread is not found: the monitor needs the GIL too. Where the kernel has no ``schedstat``, only CPU
time is counted.
"""

from __future__ import annotations

import asyncio
import gc
import linecache
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

BEAT_SECONDS = 0.005
PERIOD_SECONDS = 0.01


_monitors: set[str] = set()
"""The threads of all watches: what they compute keeps no loop waiting."""


class Block(NamedTuple):
    """One time that the loop was blocked."""

    seconds: float
    stack: str
    """Where the loop's thread was when the limit was passed."""


class LoopWatch:
    """Watches the running loop from :meth:`start` to :meth:`stop`, both called on it."""

    def __init__(self, limit: float = 0.2) -> None:
        self.limit = limit
        self.blocks: list[Block] = []
        self._beats = 0
        self._collected_seconds = 0.0
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._cpu_clock = time.pthread_getcpuclockid(self._thread_id)
        self._native_id = str(threading.get_native_id())
        gc.callbacks.append(self._note_collection)
        self._beat()
        self._monitor = threading.Thread(target=self._watch, name="kvtier-loop-watch", daemon=True)
        self._monitor.start()

    def stop(self) -> None:
        """End. What was found is in :attr:`blocks`."""
        self._timer.cancel()
        gc.callbacks.remove(self._note_collection)
        self._stopped.set()
        self._monitor.join()

    def _beat(self) -> None:
        self._beats += 1
        self._timer = self._loop.call_later(BEAT_SECONDS, self._beat)

    def _watch(self) -> None:
        own_id = str(threading.get_native_id())
        _monitors.add(own_id)
        try:
            self._look_on()
        finally:
            _monitors.discard(own_id)

    def _look_on(self) -> None:
        stall = _Stall(self._cpu_seconds())
        beats = -1
        while not self._stopped.wait(PERIOD_SECONDS):
            if self._beats != beats or not self._loop.is_running():
                self._note(stall)
                beats = self._beats
                stall = _Stall(self._cpu_seconds())
            else:
                self._look(stall)
        self._note(stall)

    def _look(self, stall: _Stall) -> None:
        frame = sys._current_frames().get(self._thread_id)
        place = (id(frame), frame.f_lasti) if frame is not None else None
        cpu_seconds, tasks = self._cpu_seconds(), _tasks()
        asleep = place == stall.place and not _is_select(frame)
        slept = _seconds_asleep(self._native_id, stall.tasks, tasks) if asleep else 0.0
        if not _is_reading_source(frame):
            stall.seconds += max(cpu_seconds - stall.cpu_seconds, slept)
        stall.cpu_seconds, stall.place, stall.tasks = cpu_seconds, place, tasks
        if stall.seconds > self.limit and not stall.stack:
            stall.stack = "".join(traceback.format_stack(frame))

    def _note(self, stall: _Stall) -> None:
        if stall.stack:
            self.blocks.append(Block(stall.seconds, stall.stack))

    def _note_collection(self, phase: Literal["start", "stop"], _: dict[str, int]) -> None:
        if threading.get_ident() == self._thread_id:
            now = time.clock_gettime(self._cpu_clock)
            # From the start on, nothing counts; what came before it does.
            self._collected_seconds += -now if phase == "start" else now

    def _cpu_seconds(self) -> float:
        """What the thread has computed, but for collections."""
        now, collected = time.clock_gettime(self._cpu_clock), self._collected_seconds
        return now - collected if collected >= 0 else -collected


class _Stall:
    """The time since the last beat."""

    __slots__ = ("cpu_seconds", "place", "seconds", "stack", "tasks")

    def __init__(self, cpu_seconds: float) -> None:
        self.cpu_seconds = cpu_seconds
        self.place: tuple[int, int] | None = None
        self.tasks: dict[str, _Task] = {}
        self.seconds = 0.0
        self.stack = ""


class _Task(NamedTuple):
    """A thread of this process, or the first thread of a child process, when it was looked at."""

    at: float
    is_child: bool
    state: str
    cpu_seconds: float
    delay_seconds: float
    """How long it has waited for a core, the wait that still lasts excluded."""
    turns: int
    """How often it was given a core."""

    @property
    def is_ready(self) -> bool:
        """Whether it computes or waits for a core."""
        return self.state == "R"


def _tasks() -> dict[str, _Task]:
    """The threads of this process and its child processes, by id."""
    tasks: dict[str, _Task] = {}
    for folder in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            tasks[folder.name] = _task(folder, is_child=False)
            for child in (folder / "children").read_text().split():
                tasks[child] = _task(Path("/proc", child), is_child=True)
    return tasks


def _task(folder: Path, *, is_child: bool) -> _Task:
    # The first field after the thread's name, which is in parentheses and may contain others.
    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
    cpu, delay, turns = map(int, (folder / "schedstat").read_text().split())
    return _Task(time.monotonic(), is_child, state, cpu / 1e9, delay / 1e9, turns)


def _seconds_asleep(thread: str, before: dict[str, _Task], now: dict[str, _Task]) -> float:
    """How long a thread has slept between two looks that no wait of another for a core explains."""
    was, is_ = before.get(thread), now.get(thread)
    if was is None or is_ is None or was.turns != is_.turns or was.is_ready or is_.is_ready:
        return 0.0
    if before.keys() - now.keys():
        return 0.0  # Of what has ended since, it is not known what it computed.
    elapsed = is_.at - was.at
    others = now.keys() - _monitors - {thread}
    return max(0.0, elapsed - sum(_explained(now[name], before.get(name), elapsed) for name in others))


def _explained(task: _Task, past: _Task | None, elapsed: float) -> float:
    """For how many of these seconds another thread may have waited for this one."""
    # Each has a period of its own: to look at all of them takes long where the GIL is wanted.
    period = elapsed if past is None else task.at - past.at
    computed = task.cpu_seconds - (past.cpu_seconds if past else 0.0)
    waited = task.delay_seconds - (past.delay_seconds if past else 0.0)
    if task.is_child:
        explained = max(0.0, period - computed) if task.is_ready else waited
    else:
        explained = period if task.is_ready else computed + waited
    return explained * elapsed / period


def _is_select(frame: FrameType | None) -> bool:
    return frame is not None and Path(frame.f_code.co_filename).name == "selectors.py"


def _is_reading_source(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == linecache.__file__:
            return True
        frame = frame.f_back
    return False
