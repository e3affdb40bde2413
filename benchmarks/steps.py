"""Measure what the connector adds to a step of the engine, for each state of the cache process.

::

    python -m benchmarks.steps              # 64 requests, each of which completes a chunk per step
    python -m benchmarks.steps --small

The hooks of scheduler and worker are called as by vLLM, with a real cache process: healthy, stopped
(SIGSTOP), at a low priority with spinning processes, and killed (SIGKILL). In each step, all requests
complete a chunk, which is reserved, copied and committed, and some requests arrive and are looked up. The
first step in a new state is reported separately. The chunks are small, because only the waits matter.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cache_process import is_ready
from benchmarks.common import parse, show
from kvtier.bridge.client import status
from tests.rigs.stepping import CHUNK_TOKENS, Engine, StepTime, make_request

REQUESTS, ARRIVALS = 64, 8
SPINNERS, SMALL_SPINNERS = 6, 2
NICE = 5
"""Priority of the starved cache process: beside 6 spinning processes, about 10 % of a CPU."""
STEP_SECONDS = 0.005
"""Time of the model per step, during which this process sleeps."""
RECOVERY_SECONDS = 300.0
STARVED_SECONDS = 300.0
"""Timeout for an answer of the starved cache process."""

Row = tuple[str, int, float, float, float, float]


class CacheProcess:
    """A `kvtier serve` process with a memory tier only."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "socket"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        tiers = json.dumps([{"name": "ram", "type": "cpu", "capacity": "256MiB"}])
        environment = {**os.environ, "KVTIER_TIERS": tiers, "KVTIER_SOCKET": str(self.socket)}
        command = [sys.executable, "-m", "kvtier", "serve", "--log-level", "WARNING"]
        self._process = subprocess.Popen(command, env=environment)
        while not is_ready(self.socket):
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        if number is signal.SIGKILL:
            self._process.wait()

    def nice(self) -> None:
        assert self._process is not None
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), NICE)

    def stored(self) -> int:
        stored: int = status(self.socket, STARVED_SECONDS)["counts"].get("stored", 0)
        return stored


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the connector adds to a step of the engine.")
    options = parse(parser)
    count = 10 if options.small else 400
    with tempfile.TemporaryDirectory() as folder:
        cache = CacheProcess(Path(folder))
        cache.start()
        try:
            rows = measure(cache, count, SMALL_SPINNERS if options.small else SPINNERS)
        finally:
            cache.signal(signal.SIGKILL)
    show(
        f"all hooks of a step, with {REQUESTS} completed chunks and {ARRIVALS} lookups per step",
        ("cache process", "steps", "median ms", "p99 ms", "max ms", "median CPU ms"),
        rows,
    )


def measure(cache: CacheProcess, count: int, spinners: int) -> list[Row]:
    engine = Engine.open(cache.socket, REQUESTS, tiers=[{"name": "ram", "type": "cpu", "capacity": "256MiB"}])
    for _ in range(REQUESTS):
        engine.run(make_request(1 << 19))
    gc.collect()
    gc.freeze()  # as vLLM does before it serves
    rows: list[Row] = []
    try:
        run_steps(engine, max(5, count // 10))
        rows.append(make_row("healthy", run_steps(engine, count)))
        cache.signal(signal.SIGSTOP)
        rows.append(make_row("stopped: first step", run_steps(engine, 1)))
        rows.append(make_row("stopped: later steps", run_steps(engine, count // 2)))
        cache.signal(signal.SIGCONT)
        rows.append(make_row("continued: until it stores again", run_until_stored(engine, cache)))
        cache.signal(signal.SIGKILL)
        rows.append(make_row("killed: first step", run_steps(engine, 1)))
        rows.append(make_row("killed: later steps", run_steps(engine, count // 2)))
        cache.start()
        rows.append(make_row("restarted: until it stores again", run_until_stored(engine, cache)))
        rows.append(make_row("healthy again", run_steps(engine, count)))
        with spinning_processes(spinners):
            cache.signal(signal.SIGSTOP)
            run_steps(engine, 200)
            rows.append(make_row(f"stopped, {spinners} spinning processes", run_steps(engine, count)))
            cache.signal(signal.SIGCONT)
            cache.nice()
            run_until_stored(engine, cache)
            before = cache.stored()
            rows.append(make_row(f"nice {NICE}, spinning processes", run_steps(engine, count)))
            share = (cache.stored() - before) / (count * REQUESTS)
    finally:
        engine.close()
    print(f"at nice {NICE} {share:.0%} of the chunks were stored", flush=True)
    return rows


def run_steps(engine: Engine, count: int) -> list[StepTime]:
    times = []
    for _ in range(count):
        for _ in range(ARRIVALS - len(engine.waiting)):
            engine.arrive(make_request(4 * CHUNK_TOKENS))
        times.append(engine.step())
        time.sleep(STEP_SECONDS)
    return times


def run_until_stored(engine: Engine, cache: CacheProcess) -> list[StepTime]:
    """Run steps until chunks are stored again."""
    times, deadline = [], time.monotonic() + RECOVERY_SECONDS
    before = cache.stored()
    while cache.stored() < before + REQUESTS:
        if time.monotonic() > deadline:
            raise SystemExit("the engine did not reconnect to its cache process")
        times += run_steps(engine, 1)
    return times


def make_row(name: str, times: Sequence[StepTime]) -> Row:
    elapsed = sorted(step_time.elapsed * 1e3 for step_time in times)
    p99 = elapsed[math.ceil(0.99 * (len(elapsed) - 1))]
    cpu = statistics.median(step_time.cpu for step_time in times) * 1e3
    return name, len(elapsed), statistics.median(elapsed), p99, elapsed[-1], cpu


@contextmanager
def spinning_processes(count: int) -> Iterator[None]:
    """Run processes that keep all CPUs busy."""
    command = [sys.executable, "-c", "while True: pass"]
    spinners = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


if __name__ == "__main__":
    main()
