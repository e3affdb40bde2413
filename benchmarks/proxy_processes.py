"""The processes of :mod:`benchmarks.proxy` and :mod:`benchmarks.proxy_streams`: stub engines and a proxy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def engine_process() -> Iterator[int]:
    """Run a stub engine; yield its port."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.proxy_engine"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


class Measured:
    """What a process of this host uses."""

    def __init__(self, process: int) -> None:
        self.process = process
        self._folder = Path("/proc", str(process))

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its threads."""
        fields = self._folder.joinpath("stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def resident_mib(self) -> float:
        """Return its memory."""
        return int(self._folder.joinpath("statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

    def descriptors(self) -> int:
        """Return the number of its open files."""
        return sum(1 for _ in self._folder.joinpath("fd").iterdir())


class ProxyProcess(Measured):
    """A running proxy."""

    def __init__(self, process: int, log: Path) -> None:
        super().__init__(process)
        self._log = log
        deadline = time.monotonic() + START_SECONDS
        while self.log().count(" is up, ") < 2:
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)
        found = re.search(r"proxy listening on http://127.0.0.1:(\d+)", self.log())
        assert found is not None
        self.port = int(found[1])

    def log(self) -> str:
        """Return its log."""
        return self._log.read_text()


@contextmanager
def proxy_process(
    engine: int, prefiller: int, requests: int = 2000, files: int | None = None
) -> Iterator[ProxyProcess]:
    """Run a proxy for both engines. ``files``: its limit of open files; default: that of this process."""
    command = [] if files is None else ["bash", "-c", f'ulimit -n {files} && exec "$@"', "-"]
    command += [sys.executable, "-m", "kvtier", "proxy", "--listen", "127.0.0.1:0"]
    command += ["--max-requests", str(requests)]
    command += ["--decode", f"http://127.0.0.1:{engine}", "--prefill", f"http://127.0.0.1:{prefiller}"]
    # A file, because a pipe without a reader would block the proxy once it is full.
    with tempfile.NamedTemporaryFile(prefix="kvtier-bench-") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            yield ProxyProcess(process.pid, Path(log.name))
        finally:
            process.kill()
            process.communicate()
