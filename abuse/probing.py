"""How long the processes take to answer during an attack. No finding: the machine may be busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from abuse.stack import POLL_SECONDS, Process


class Probes:
    """Ask each process all the time, in a thread each, within the block."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.slowest = 0.0
        """The longest time in seconds until a process answered."""
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._probe, args=(process,), daemon=True) for process in processes
        ]

    def __enter__(self) -> Probes:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _probe(self, process: Process) -> None:
        while not self._ended.wait(POLL_SECONDS):
            asked = time.monotonic()
            while not process.answers() and not self._ended.wait(POLL_SECONDS):
                pass
            self.slowest = max(self.slowest, time.monotonic() - asked)
