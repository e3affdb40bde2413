"""Measure how long the connector's hooks block an engine's step, independent of the machine's load.

The blocked time of a hook is its wall time minus the CPU time of its thread and minus the time in which the
thread waited for a CPU (the second number of ``/proc/thread-self/schedstat``, in nanoseconds). What remains
is time blocked on a socket, a lock or a major page fault.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

LIMIT_SECONDS = 0.05
"""A step that is blocked for longer counts as stalled."""
SUMMARY_SECONDS = 1.0
FOLDER = "SOAK_HOOKS"
"""The environment variable with the folder for the files of :class:`Stalls`."""
SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Reading(NamedTuple):
    """The clocks of one thread, in seconds."""

    wall: float
    cpu: float
    queued: float
    """Time spent waiting for a CPU."""
    faults: int = 0
    """Number of major page faults."""


def read_clocks(*, ended: bool) -> Reading:
    """Read the clocks of the calling thread, before the timed block or when it has ``ended``.

    The order of the clocks ensures that a wait for a CPU between two of them makes the blocked time shorter,
    never longer. Without ``schedstat`` these waits read as 0.
    """
    if ended:
        wall, cpu = time.monotonic(), time.thread_time()
        return Reading(wall, cpu, _queued(), _faults())
    queued, faults, cpu = _queued(), _faults(), time.thread_time()
    return Reading(time.monotonic(), cpu, queued, faults)


def _queued() -> float:
    try:
        return int(SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except OSError:
        return 0.0


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


class ReadClocks(Protocol):
    """The signature of :func:`read_clocks`."""

    def __call__(self, *, ended: bool) -> Reading:
        """Read the clocks."""


class HookTimes(NamedTuple):
    """Statistics of one hook's calls, in seconds."""

    calls: int = 0
    max_wall: float = 0.0
    max_cpu: float = 0.0
    max_blocked: float = 0.0

    def add(self, wall: float, cpu: float, blocked: float) -> HookTimes:
        """Return the statistics with one more call."""
        return HookTimes(
            self.calls + 1,
            max(self.max_wall, wall),
            max(self.max_cpu, cpu),
            max(self.max_blocked, blocked),
        )


class Stalls:
    """Timers for the hooks of one process, whose results are appended to a file of JSON lines.

    ``{"stall": step, "start", "end", "blocked", "wall", "faults", "hooks": {name: blocked}}`` for a step
    whose hooks were blocked for more than :data:`LIMIT_SECONDS` in total, and about once per second
    ``{"hooks": {name: HookTimes}}``. Times are those of ``time.monotonic``, which all processes share.
    """

    def __init__(self, path: Path, read: ReadClocks = read_clocks) -> None:
        self._path = path
        self._read = read
        self._depth = 0
        self._is_scheduled = False
        self._written_at = 0.0
        self._step = 0
        self._hooks: dict[str, HookTimes] = {}
        self._begin()

    def _begin(self) -> None:
        self._blocked: dict[str, float] = {}
        self._wall = 0.0
        self._faults = 0
        self._start = self._end = 0.0

    @contextmanager
    def timed(self, hook: str, *, schedules: bool = False, scheduled: bool = False) -> Iterator[None]:
        """Time one call. ``schedules``: it prepares a step; ``scheduled``: it is the last one to do so.

        A hook called by another hook counts as part of that.
        """
        if self._depth:
            yield
            return
        if (schedules or scheduled) and self._is_scheduled:
            self.end_step()
        self._is_scheduled |= scheduled
        self._depth += 1
        before = self._read(ended=False)
        try:
            yield
        finally:
            self._depth -= 1
            self._add(hook, before, self._read(ended=True))

    def _add(self, hook: str, before: Reading, after: Reading) -> None:
        wall, cpu = after.wall - before.wall, after.cpu - before.cpu
        blocked = max(wall - cpu - (after.queued - before.queued), 0.0)
        self._hooks[hook] = self._hooks.get(hook, HookTimes()).add(wall, cpu, blocked)
        self._blocked[hook] = self._blocked.get(hook, 0.0) + blocked
        self._wall += wall
        self._faults += after.faults - before.faults
        self._start = self._start or before.wall
        self._end = after.wall
        if after.wall - self._written_at > SUMMARY_SECONDS:
            self._written_at = after.wall
            self._write({"hooks": {name: times._asdict() for name, times in self._hooks.items()}})

    def end_step(self) -> None:
        """Write the current step if it has stalled, and start the next."""
        blocked = sum(self._blocked.values())
        if blocked > LIMIT_SECONDS:
            self._write(
                {
                    "stall": self._step,
                    "start": self._start,
                    "end": self._end,
                    "blocked": blocked,
                    "wall": self._wall,
                    "faults": self._faults,
                    "hooks": {name: seconds for name, seconds in self._blocked.items() if seconds > 0.001},
                }
            )
        self._step += 1
        self._is_scheduled = False
        self._begin()

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as output:
            output.write(json.dumps(line) + "\n")


class Stall(NamedTuple):
    """A stalled step of an engine."""

    engine: int
    """Its process id."""
    step: int
    start: float
    end: float
    blocked: float
    wall: float
    faults: int
    hooks: dict[str, float]


def read_file(path: Path) -> tuple[list[Stall], dict[str, HookTimes]]:
    """Read the file of one engine's :class:`Stalls`: stalled steps, and the times of each hook."""
    stalls: list[Stall] = []
    hooks: dict[str, HookTimes] = {}
    engine = int(path.stem.rpartition("-")[2])
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # The last line of a killed engine.
        if "stall" in entry:
            stalls.append(Stall(engine, entry.pop("stall"), **entry))
        else:
            hooks = {name: HookTimes(**times) for name, times in entry["hooks"].items()}
    return stalls, hooks


def outside_pauses(stalls: list[Stall], pauses: list[tuple[float, float]]) -> list[Stall]:
    """Return the stalls that do not overlap with ``pauses``, in which the engine was stopped."""
    return [
        stall
        for stall in stalls
        if not any(start <= stall.end and stall.start <= end for start, end in pauses)
    ]
