"""A watchdog for the event loop: was it blocked, for how long, and where.

A timer on the loop beats every few milliseconds; a monitor thread looks whether it does. What a missing
beat means is the question: on a busy machine a thread that is ready to run may not get a core for tens of
milliseconds, and no test may fail for that. So time is not taken from the clock on the wall. Of the time
without a beat two kinds are counted:

- CPU time of the loop's thread (``pthread_getcpuclockid``): it computed, in Python or in C, and did not
  come back to the loop. A thread that waits for a core consumes none.
- Time in which the thread was asleep in the kernel (``/proc/self/task/<id>/stat``: ``S`` or ``D``) at one
  and the same instruction from one look to the next, other than in the loop's own ``select``, and no other
  thread of the process was ready to run (``R``): it sits in a blocking call, such as ``time.sleep``, a
  lock or a read from a disk. A thread that waits for a core is ``R``, and one that waits for such a
  thread, as ``Thread.start`` does, is not to blame either. One such look counts as one period, however
  late the monitor itself came.

What the garbage collector takes is not counted, nor what it finalizes: it interrupts whoever comes along. Nor
is reading source files for a traceback that is logged, which takes as long as the disk is busy.

Both err on the side of too little; twice the limit is found on any machine. A worker thread that holds the
GIL for long without computing in the loop's thread is not found: the monitor needs the GIL too.
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
        cpu_seconds = self._cpu_seconds()
        asleep = self._is_asleep() and place == stall.place and not _is_select(frame)
        if not _is_reading_source(frame):
            stall.seconds += max(cpu_seconds - stall.cpu_seconds, PERIOD_SECONDS if asleep else 0.0)
        stall.cpu_seconds = cpu_seconds
        stall.place = place
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

    def _is_asleep(self) -> bool:
        states = _thread_states()
        states.pop(str(threading.get_native_id()), None)
        return states.pop(self._native_id, "") in {"S", "D"} and "R" not in states.values()


class _Stall:
    """The time since the last beat."""

    __slots__ = ("cpu_seconds", "place", "seconds", "stack")

    def __init__(self, cpu_seconds: float) -> None:
        self.cpu_seconds = cpu_seconds
        self.place: tuple[int, int] | None = None
        self.seconds = 0.0
        self.stack = ""


def _thread_states() -> dict[str, str]:
    """The state of each thread of this process."""
    states = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            # The first field after the thread's name, which is in parentheses and may hold others.
            states[task.name] = (task / "stat").read_text().rpartition(")")[2].split()[0]
    return states


def _is_select(frame: FrameType | None) -> bool:
    return frame is not None and Path(frame.f_code.co_filename).name == "selectors.py"


def _is_reading_source(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == linecache.__file__:
            return True
        frame = frame.f_back
    return False
