"""Cache process for benchmarks/busy.py that measures how long its event loop is blocked.

``python -m benchmarks.busy_process PARENT SETTINGS REPORT`` serves like ``kvtier serve``. SIGUSR1 discards
the measurements so far. The figures are written to REPORT at exit.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import anyio

from kvtier.bridge.serve import serve
from kvtier.settings import Settings, load_settings
from tests.rigs.loads import end_with

BEAT_SECONDS = 0.001


class LoopProbe:
    """Measures the delay of a timer on the loop, with and without the time its thread waited for a core."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self.late: list[float] = []
        self.late_on_a_core: list[float] = []
        self._delay = self._run_delay()
        self._at = time.perf_counter()
        self._timer = self._loop.call_later(BEAT_SECONDS, self._beat)

    def clear(self) -> None:
        """Discard the measurements so far."""
        self.late.clear()
        self.late_on_a_core.clear()

    def report(self) -> dict[str, float]:
        """Return the maximum and the 99th percentile of both delays, in milliseconds."""
        figures = {}
        for name, seconds in (("wall", sorted(self.late)), ("on a core", sorted(self.late_on_a_core))):
            figures[f"{name}, maximum"] = seconds[-1] * 1e3
            figures[f"{name}, p99"] = seconds[int(0.99 * (len(seconds) - 1))] * 1e3
        return figures

    def _beat(self) -> None:
        now, delay = time.perf_counter(), self._run_delay()
        late = max(0.0, now - self._at - BEAT_SECONDS)
        self.late.append(late)
        self.late_on_a_core.append(max(0.0, late - (delay - self._delay)))
        self._at, self._delay = now, delay
        self._timer = self._loop.call_later(BEAT_SECONDS, self._beat)

    def _run_delay(self) -> float:
        """Return the seconds that this thread was runnable but waited for a core."""
        return int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e9


async def serve_measured(settings: Settings, report: Path) -> None:
    probe = LoopProbe()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, probe.clear)
    await serve(settings)
    report.write_text(json.dumps(probe.report()))


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    anyio.run(partial(serve_measured, load_settings({}, file=Path(sys.argv[2])), Path(sys.argv[3])))
