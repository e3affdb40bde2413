"""Cache processes that are forked like the engines: they start at once, where an interpreter takes seconds.

That ``kvtier serve`` starts as a command is tested in ``tests/bridge`` and ``tests/demo``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.vllm.cache_process import CacheProcess, Process
from tests.vllm.forks import forks


class ForkedCacheProcess(CacheProcess):
    """A cache process of a test with an engine."""

    def _run(self, environment: dict[str, str], fault: Sequence[str]) -> Process:
        self.log.touch()
        arguments = (environment, str(self.log), str(self._hold), list(fault))
        process = forks().Process(target=serve, args=arguments)
        process.start()
        return Forked(process)


class Forked:
    """The methods of a ``subprocess.Popen`` that :class:`CacheProcess` uses."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process is known to have exited."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)
        assert self.poll() is not None, "still running"


def serve(environment: dict[str, str], log: str, hold: str, fault: Sequence[str]) -> None:
    """Run ``kvtier serve``. The process's main function."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    from tests.vllm import faulty_serve

    faulty_serve.serve(Path(hold), fault)
