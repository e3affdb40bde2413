"""A watchdog for the event loop: detects when it is blocked, for how long, and where.

A timer on the event loop ticks every few milliseconds, and a monitor thread checks it. A missing tick alone
proves nothing: on a busy machine a runnable thread may wait tens of milliseconds for a core, and no test may
fail for that. So wall time is not the criterion. Of the time without a tick, two kinds count:

- CPU time of the loop's thread (``pthread_getcpuclockid``): it ran Python or C code and did not return to the
  event loop. A thread that waits for a core uses none.
- Time in which the thread slept in the kernel, outside the event loop's own ``select``: in a blocking call,
  such as ``time.sleep``, a lock or a disk read. It slept between two samples if both find it asleep
  (``/proc/<pid>/task/<id>/stat``: ``S`` or ``D``) at the same instruction, and it had no core in between
  (``schedstat``). What it waited for may have lacked a core as well, so two times are subtracted: the time in
  which other threads of the process ran or waited for a core, since they hold locks and the GIL, and the time
  in which a child process waited for a core, since starting a process waits for it.

Garbage collection and finalizers do not count, because they interrupt any code. Nor does reading source files
for a logged traceback, whose duration depends on the disk's load.

The watchdog underestimates rather than overestimates. It does not find a worker thread that holds the GIL for
long while the loop's thread does not run: the monitor needs the GIL too. On kernels without ``schedstat``,
only CPU time counts.
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
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

TICK_SECONDS = 0.005
PERIOD_SECONDS = 0.01


_monitors: set[str] = set()
"""The monitor threads of all watchdogs: their CPU time does not block an event loop."""


class Block(NamedTuple):
    """One period in which the event loop was blocked."""

    seconds: float
    stack: str
    """The stack of the loop's thread when the limit was exceeded."""


class LoopWatch:
    """A watchdog for the running event loop. Call :meth:`start` and :meth:`stop` from it."""

    def __init__(self, limit: float = 0.2) -> None:
        self.limit = limit
        self.blocks: list[Block] = []
        self._ticks = 0
        self._collected_seconds = 0.0
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the monitor thread."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._cpu_clock = time.pthread_getcpuclockid(self._thread_id)
        self._native_id = str(threading.get_native_id())
        gc.callbacks.append(self._on_collection)
        self._tick()
        self._monitor = threading.Thread(target=self._watch, name="kvtier-loop-watch", daemon=True)
        self._monitor.start()

    def stop(self) -> None:
        """Stop the monitor thread. The results are in :attr:`blocks`."""
        self._timer.cancel()
        gc.callbacks.remove(self._on_collection)
        self._stopped.set()
        self._monitor.join()

    def _tick(self) -> None:
        self._ticks += 1
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)

    def _watch(self) -> None:
        own_id = str(threading.get_native_id())
        _monitors.add(own_id)
        try:
            self._sample_until_stopped()
        finally:
            _monitors.discard(own_id)

    def _sample_until_stopped(self) -> None:
        stall = _Stall(self._cpu_seconds())
        ticks = -1
        while not self._stopped.wait(PERIOD_SECONDS):
            if self._ticks != ticks or not self._loop.is_running():
                self._record(stall)
                ticks = self._ticks
                stall = _Stall(self._cpu_seconds())
            else:
                self._sample(stall)
        self._record(stall)

    def _sample(self, stall: _Stall) -> None:
        frame = _current_frames().get(self._thread_id)
        place = (id(frame), frame.f_lasti) if frame is not None else None
        cpu_seconds, tasks = self._cpu_seconds(), _tasks()
        asleep = place == stall.place and not _is_select(frame)
        slept = _seconds_asleep(self._native_id, stall.tasks, tasks) if asleep else 0.0
        # Walking the frames of a running thread can crash CPython 3.11, so not while it only waits.
        if _is_select(frame) or not _is_reading_source(frame):
            stall.seconds += max(cpu_seconds - stall.cpu_seconds, slept)
        stall.cpu_seconds, stall.place, stall.tasks = cpu_seconds, place, tasks
        if stall.seconds > self.limit and not stall.stack:
            stall.stack = "".join(traceback.format_stack(frame))

    def _record(self, stall: _Stall) -> None:
        if stall.stack:
            self.blocks.append(Block(stall.seconds, stall.stack))

    def _on_collection(self, phase: Literal["start", "stop"], _: dict[str, int]) -> None:
        if threading.get_ident() == self._thread_id:
            now = time.clock_gettime(self._cpu_clock)
            # Negative during a collection: only the CPU time before its start counts.
            self._collected_seconds += -now if phase == "start" else now

    def _cpu_seconds(self) -> float:
        """Return the thread's CPU time without garbage collections."""
        now, collected = time.clock_gettime(self._cpu_clock), self._collected_seconds
        return now - collected if collected >= 0 else -collected


@dataclass(slots=True, eq=False)
class _Stall:
    """The time since the last tick of the event loop."""

    cpu_seconds: float
    place: tuple[int, int] | None = None
    tasks: dict[str, _Task] = field(default_factory=dict)
    seconds: float = 0.0
    stack: str = ""


class _Task(NamedTuple):
    """A sample of a thread of this process, or of the main thread of a child process."""

    at: float
    is_child: bool
    state: str
    cpu_seconds: float
    delay_seconds: float
    """Time spent waiting for a core, without the current wait."""
    timeslices: int
    """How many times it was scheduled on a core."""

    @property
    def is_runnable(self) -> bool:
        """Whether it runs or waits for a core."""
        return self.state == "R"


def _tasks() -> dict[str, _Task]:
    """Sample the threads of this process and its child processes, by id. Without free descriptors: none."""
    tasks: dict[str, _Task] = {}
    try:
        folders = list(Path("/proc/self/task").iterdir())
    except OSError:
        return tasks
    for folder in folders:
        with suppress(OSError):
            tasks[folder.name] = _task(folder, is_child=False)
            for child in (folder / "children").read_text().split():
                tasks[child] = _task(Path("/proc", child), is_child=True)
    return tasks


def _task(folder: Path, *, is_child: bool) -> _Task:
    # The first field after the thread's name, which is in parentheses and may contain parentheses.
    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
    cpu, delay, timeslices = map(int, (folder / "schedstat").read_text().split())
    return _Task(time.monotonic(), is_child, state, cpu / 1e9, delay / 1e9, timeslices)


def _seconds_asleep(thread: str, before: dict[str, _Task], now: dict[str, _Task]) -> float:
    """Return how long a thread slept between two samples, minus what other threads' scheduling explains."""
    first, second = before.get(thread), now.get(thread)
    if first is None or second is None or first.timeslices != second.timeslices:
        return 0.0
    if first.is_runnable or second.is_runnable:
        return 0.0
    if before.keys() - now.keys():
        return 0.0  # The CPU time of threads that exited in between is unknown.
    elapsed = second.at - first.at
    others = now.keys() - _monitors - {thread}
    return max(0.0, elapsed - sum(_explained(now[name], before.get(name), elapsed) for name in others))


def _explained(task: _Task, past: _Task | None, elapsed: float) -> float:
    """Return for how many of these seconds another thread may have waited for this task."""
    # Each task has its own period, because sampling all of them takes long when the GIL is contended.
    period = elapsed if past is None else task.at - past.at
    computed = task.cpu_seconds - (past.cpu_seconds if past else 0.0)
    waited = task.delay_seconds - (past.delay_seconds if past else 0.0)
    if task.is_child:
        explained = max(0.0, period - computed) if task.is_runnable else waited
    else:
        explained = period if task.is_runnable else computed + waited
    return explained * elapsed / period


def _current_frames() -> dict[int, FrameType]:
    """Return the frame of each thread, without a garbage collection meanwhile.

    CPython before 3.11.9 holds a lock that a starting thread needs: a finalizer that gives up the GIL then
    blocks both threads for ever (https://github.com/python/cpython/issues/106883).
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collecting:
            gc.enable()


def _is_select(frame: FrameType | None) -> bool:
    return frame is not None and Path(frame.f_code.co_filename).name == "selectors.py"


def _is_reading_source(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == linecache.__file__:
            return True
        frame = frame.f_back
    return False
