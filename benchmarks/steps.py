"""What the connector adds to a step of the engine, whatever the state of the cache process.

::

    python benchmarks/steps.py              # 64 requests that complete a chunk each in every step
    python benchmarks/steps.py --small

The hooks of scheduler and worker are called as vLLM does, against a real cache process: healthy, stopped
(SIGSTOP), at the lowest priority beside processes that spin, and killed (SIGKILL). In each step all requests
complete a chunk, which is reserved, copied and committed, and some requests arrive and are looked up. The
first step in a new state counts by itself. The bytes are few, as it is the waiting that counts.
"""

from __future__ import annotations

import argparse
import json
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

from benchmarks.common import show
from benchmarks.look_up import answers
from benchmarks.stepping import CHUNK_TOKENS, Engine, Taken, make_request
from kvtier.bridge.client import status

REQUESTS, ARRIVALS = 64, 8
SPINNERS = 6
STEP_SECONDS = 0.005
"""What the model takes for a step, in which this process sleeps."""
BACK_SECONDS = 300.0
STARVED_SECONDS = 300.0
"""How long an answer may take at nice 19 beside processes that spin."""

Row = tuple[str, int, float, float, float, float]


class CacheProcess:
    """A `kvtier serve` with memory alone."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "socket"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        tiers = json.dumps([{"name": "ram", "type": "cpu", "capacity": "256MiB"}])
        environment = {**os.environ, "KVTIER_TIERS": tiers, "KVTIER_SOCKET": str(self.socket)}
        command = [sys.executable, "-m", "kvtier", "serve", "--log-level", "WARNING"]
        self._process = subprocess.Popen(command, env=environment)
        while not answers(self.socket):
            time.sleep(0.02)

    def signal(self, sent: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(sent)
        if sent is signal.SIGKILL:
            self._process.wait()

    def nice(self) -> None:
        assert self._process is not None
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)

    def stored(self) -> int:
        stored: int = status(self.socket, STARVED_SECONDS)["counts"].get("stored", 0)
        return stored


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What the connector adds to a step of the engine.")
    parser.add_argument("--small", action="store_true", help="few steps, to see that it runs")
    options = parser.parse_args(arguments)
    count = 10 if options.small else 400
    with tempfile.TemporaryDirectory() as folder:
        cache = CacheProcess(Path(folder))
        cache.start()
        try:
            rows = measure(cache, count)
        finally:
            cache.signal(signal.SIGKILL)
    show(
        f"{REQUESTS} chunks completed and {ARRIVALS} look-ups a step: what all hooks of a step take",
        ("cache process", "steps", "median ms", "99 % ms", "longest ms", "median CPU ms"),
        rows,
    )


def measure(cache: CacheProcess, count: int) -> list[Row]:
    engine = Engine.open(cache.socket, REQUESTS, tiers=[{"name": "ram", "type": "cpu", "capacity": "256MiB"}])
    for _ in range(REQUESTS):
        engine.run(make_request(1 << 19))
    rows: list[Row] = []
    try:
        steps(engine, max(5, count // 10))
        rows.append(row("healthy", steps(engine, count)))
        cache.signal(signal.SIGSTOP)
        rows.append(row("stopped: first step", steps(engine, 1)))
        rows.append(row("  later steps", steps(engine, count // 2)))
        cache.signal(signal.SIGCONT)
        rows.append(row("  until it stores again", until_stored(engine, cache)))
        cache.signal(signal.SIGKILL)
        rows.append(row("killed: first step", steps(engine, 1)))
        rows.append(row("  later steps", steps(engine, count // 2)))
        cache.start()
        rows.append(row("  until it stores again", until_stored(engine, cache)))
        rows.append(row("healthy", steps(engine, count)))
        with spinning():
            cache.signal(signal.SIGSTOP)
            steps(engine, 200)
            rows.append(row(f"stopped, beside {SPINNERS} that spin", steps(engine, count)))
            cache.signal(signal.SIGCONT)
            cache.nice()
            until_stored(engine, cache)
            before = cache.stored()
            rows.append(row("nice 19, beside them", steps(engine, count)))
            share = (cache.stored() - before) / (count * REQUESTS)
    finally:
        engine.close()
    print(f"at nice 19 {share:.0%} of the chunks were stored", flush=True)
    return rows


def steps(engine: Engine, count: int) -> list[Taken]:
    taken = []
    for _ in range(count):
        for _ in range(ARRIVALS - len(engine.waiting)):
            engine.arrive(make_request(4 * CHUNK_TOKENS))
        taken.append(engine.step())
        time.sleep(STEP_SECONDS)
    return taken


def until_stored(engine: Engine, cache: CacheProcess) -> list[Taken]:
    """The steps until chunks are stored again."""
    taken, deadline = [], time.monotonic() + BACK_SECONDS
    before = cache.stored()
    while cache.stored() < before + REQUESTS:
        if time.monotonic() > deadline:
            raise SystemExit("the engine has not come back to its cache process")
        taken += steps(engine, 1)
    return taken


def row(name: str, taken: Sequence[Taken]) -> Row:
    elapsed = sorted(one.elapsed * 1e3 for one in taken)
    p99 = elapsed[int(0.99 * (len(elapsed) - 1))]
    cpu = statistics.median(one.cpu for one in taken) * 1e3
    return name, len(elapsed), statistics.median(elapsed), p99, elapsed[-1], cpu


@contextmanager
def spinning() -> Iterator[None]:
    """Processes that want every CPU."""
    command = [sys.executable, "-c", "while True: pass"]
    spinners = [subprocess.Popen(command) for _ in range(SPINNERS)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


if __name__ == "__main__":
    main()
