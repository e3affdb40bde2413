"""Measure how much a busy machine slows down each operation of a cache process.

::

    python -m benchmarks.busy                        # needs 1 GiB in the current folder; six minutes
    python -m benchmarks.busy --rounds 1 --conditions idle saturated
    python -m benchmarks.busy --memory 2GiB          # limit of the load that fragments memory

The conditions are interleaved, and each round starts with another one, so that temporary slowness of the
machine affects all of them. A ratio is the median over the rounds of the time relative to the idle condition
of the same round.

idle        no load from this benchmark
saturated   three CPU-bound processes per core
memory      another process holds every other page of memory, and the page cache takes the free rest: there is
            no page of 2 MiB unless the kernel moves other pages. 4 GiB stay available
disk        another process overwrites 256 MiB on the same disk repeatedly, with O_DIRECT
nice        like saturated, with the cache process at nice 19

Each turn starts a cache process on a folder with 512 MiB of chunks, and looks them all up until they are
leased: the *first load*. With all chunks in memory, a scheduler then repeats the lookup, of a prompt of
32,768 tokens. It reserves one chunk for each of 64 prompts, as one step of an engine with that many requests
does. If vLLM is installed, all hooks of such a step are measured too (``tests/rigs/stepping.py``). An engine
stores and retrieves a prompt of 64 MiB. *Loop blocked* is the delay of a 1 ms timer in the cache process's
event loop, from the first load on; *on a core* excludes the time in which the loop's thread waited for a
core.

To measure another version of kvtier, use the Python of the environment that has it installed.
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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from benchmarks.cache_process import is_ready
from benchmarks.common import filled, parse, show
from benchmarks.look_up import look_up
from kvtier.bridge import protocol
from kvtier.bridge.client import LookupState, SchedulerBridge, WorkerBridge, status
from kvtier.bridge.protocol import Hello, Reserved, Role, Run
from kvtier.lab.bench.rows import percentile, rotated
from kvtier.memory.header import HEADER_BYTES
from kvtier.memory.keys import KEY_BYTES, ChunkKey, chunk_keys, root_key
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.pipeline.query import Query
from kvtier.units import parse_size
from tests.rigs.loads import LEAVE_BYTES, MIB, available_bytes, fragmented, saturated, writing
from tests.rigs.waiting import wait_until

CHUNK_TOKENS, CHUNKS = 256, 128
NAMESPACE = b"\1" * 32
"""Differs from that of :class:`benchmarks.compare.tokens.Engine`, which clears its namespace."""
ROOT = root_key(NAMESPACE)
PROMPTS = 64
LIMIT_SECONDS = 120.0
CONDITIONS = ("idle", "saturated", "memory", "disk", "nice")

Measurements = dict[str, float]
"""Milliseconds, or a number of lookups, by row title."""


def main() -> None:
    parser = argparse.ArgumentParser(description="A cache process on a busy and on an idle machine.")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write; default: current folder")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--conditions", nargs="+", choices=CONDITIONS, default=CONDITIONS, help="default: all"
    )
    parser.add_argument("--memory", type=parse_size, default=1 << 50, help="limit for the memory load")
    options = parse(parser)
    # So that the loads are stopped on SIGTERM as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="kvtier-bench-") as folder:
        bench = Bench(Path(folder).absolute(), options.memory, small=options.small)
        bench.prepare()
        results = interleave_conditions(bench, options.conditions, 1 if options.small else options.rounds)
    report(results)


def interleave_conditions(
    bench: Bench, conditions: Sequence[str], rounds: int
) -> dict[str, list[Measurements]]:
    """Return the measurements of each round, by condition."""
    results: dict[str, list[Measurements]] = {name: [] for name in conditions}
    for turn in range(rounds):
        for name in rotated(list(results), turn):
            started = time.monotonic()
            results[name].append(bench.measure(name))
            print(
                f"round {turn + 1}, {name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True
            )
    return results


def report(results: dict[str, list[Measurements]]) -> None:
    """Print the median and worst figures over the rounds, and ratios to the idle machine."""
    measures = list(next(iter(results.values()))[0])
    values = {
        name: {what: [turn[what] for turn in turns] for what in measures} for name, turns in results.items()
    }
    show(
        "median over the rounds (and the worst), in milliseconds unless stated otherwise",
        ("", *results),
        [(what, *(figures(values[name][what]) for name in results)) for what in measures],
    )
    busy = [name for name in results if name != "idle"]
    if "idle" not in results or not busy:
        return
    idle = values["idle"]
    show(
        "time relative to the idle machine in the same round, median",
        ("", *busy),
        [(what, *(relative(values[name][what], idle[what]) for name in busy)) for what in measures],
    )


def figures(values: Sequence[float]) -> str:
    return f"{figure(statistics.median(values))} ({figure(max(values))})"


def figure(value: float) -> str:
    """Format with three significant digits, or with all digits of the integer part."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def relative(values: Sequence[float], idle: Sequence[float]) -> str:
    ratios = [busy / reference for busy, reference in zip(values, idle, strict=True) if reference]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


class Bench:
    """Runs one cache process per turn on the same folder, each under the condition of its turn."""

    def __init__(self, folder: Path, memory_bytes: int, *, small: bool) -> None:
        self._folder = folder
        self._memory_bytes = 256 * MIB if small else memory_bytes
        self._runs = 5 if small else 100
        self._engine_tokens = 256 if small else 2048
        page = (64 << 10 if small else 4 * MIB - 4096) // 16
        self._layout = ChunkLayout(CHUNK_TOKENS, (GroupLayout(CHUNK_TOKENS // 16, (page,)),))
        self._keys = chunk_keys(ROOT, range(CHUNK_TOKENS * CHUNKS), CHUNK_TOKENS)
        self._settings = folder / "kvtier.yaml"
        self._report = folder / "report.json"
        capacity = 2 * CHUNKS * (self._layout.payload_bytes(CHUNK_TOKENS) + 4096) + 256 * MIB
        self._settings.write_text(
            f"socket: {folder / 'socket'}\n"
            f"tiers:\n"
            f"- {{name: ram, type: cpu, capacity: {capacity}}}\n"
            f"- {{name: ssd, type: disk, path: {folder / 'ssd'}, capacity: {4 * capacity}}}\n"
            f"prefetch: {{policy: wait}}\n"
            f"log_level: ERROR\n"
        )

    def prepare(self) -> None:
        """Store the chunks on disk."""
        with self._cache_process(), self._connected() as (scheduler, worker):
            assert worker.arena is not None
            payload = self._layout.payload_bytes(CHUNK_TOKENS)
            content = filled(payload)
            for key in self._keys:
                reserved = reserve(scheduler, [key])
                assert reserved.granted, "no room for the chunks"
                worker.arena.view(reserved.offsets[0] + HEADER_BYTES, payload)[:] = content
                worker.commit(reserved.granted)
            wait_until(lambda: status(self._socket)["counts"].get("put_ok", 0) >= CHUNKS, LIMIT_SECONDS)

    def measure(self, condition: str) -> Measurements:
        """Run one turn."""
        with self._load(condition):
            started = time.perf_counter()
            with self._cache_process(nice=condition == "nice") as process:
                results = {"process start": (time.perf_counter() - started) * 1e3}
                with self._connected() as (scheduler, worker):
                    process.send_signal(signal.SIGUSR1)
                    results |= self._first_load(scheduler)
                    results |= self._lookups(scheduler)
                    results |= self._reservations(scheduler, worker)
                results |= self._steps()
                results |= self._engine()
        blocked = json.loads(self._report.read_text())
        return results | {f"loop blocked, {what}": value for what, value in blocked.items()}

    def _load(self, condition: str) -> AbstractContextManager[object]:
        if condition in ("saturated", "nice"):
            return saturated()
        if condition == "disk":
            return writing(self._folder)
        if condition == "memory":
            needed = LEAVE_BYTES + 256 * MIB
            if available_bytes() < needed:
                raise SystemExit(f"the condition `memory` needs {needed >> 20} MiB of available memory")
            return fragmented(self._folder, self._memory_bytes)
        return nullcontext()

    def _first_load(self, scheduler: SchedulerBridge) -> Measurements:
        """Look up until all chunks on disk are leased: once, unless the cache process abandons some."""
        started = time.perf_counter()
        lookups = 0
        while True:
            lookups += 1
            lookup = self._look_up_all(scheduler)
            seconds = time.perf_counter() - started
            scheduler.cancel(lookup.call.ticket)
            if len(lookup.leases) == CHUNKS or seconds > LIMIT_SECONDS:
                break
        return {"first load from disk": seconds * 1e3, "  lookups until complete": lookups}

    def _look_up_all(self, scheduler: SchedulerBridge) -> LookupState:
        ticket = scheduler.look_up(Query(self._keys, CHUNKS * CHUNK_TOKENS))
        if ticket is None:
            raise SystemExit("the connection to the cache process is lost")
        lookup = scheduler.found(ticket, wait=LIMIT_SECONDS)
        while lookup is not None and not lookup.final:
            time.sleep(0.001)
            lookup = scheduler.found(ticket)
        if lookup is None:
            raise SystemExit("the connection to the cache process is lost")
        return lookup

    def _lookups(self, scheduler: SchedulerBridge) -> Measurements:
        seconds = []
        for _ in range(self._runs):
            started = time.perf_counter()
            lookup = look_up(scheduler, chunk_keys(ROOT, range(CHUNK_TOKENS * CHUNKS), CHUNK_TOKENS))
            seconds.append(time.perf_counter() - started)
            scheduler.cancel(lookup.call.ticket)
        return {
            "lookup of 32,768 tokens": statistics.median(seconds) * 1e3,
            "  p99": percentile(seconds, 0.99) * 1e3,
        }

    def _reservations(self, scheduler: SchedulerBridge, worker: WorkerBridge) -> Measurements:
        """Reserve a chunk for each of many prompts."""
        seconds = []
        for _ in range(max(2, self._runs // 10)):
            keys = [ChunkKey(os.urandom(KEY_BYTES)) for _ in range(PROMPTS)]
            started = time.perf_counter()
            reserved = reserve(scheduler, keys)
            seconds.append(time.perf_counter() - started)
            worker.abandon(reserved.granted)
        return {f"reserve for {PROMPTS} prompts": statistics.median(seconds) * 1e3}

    def _steps(self) -> Measurements:
        """Measure the connector's hooks in steps in which each of many requests completes a chunk."""
        try:
            from tests.rigs.stepping import Engine, make_request
        except ImportError:  # Needs vLLM.
            return {}
        engine = Engine.open(self._socket, PROMPTS)
        for _ in range(PROMPTS):
            engine.run(make_request(1 << 19))
        try:
            seconds = [engine.step().elapsed for _ in range(2 * self._runs)][self._runs :]
        finally:
            engine.close()
        return {
            f"hooks of a step of {PROMPTS} requests": statistics.median(seconds) * 1e3,
            "  p99 of the steps": percentile(seconds, 0.99) * 1e3,
        }

    def _engine(self) -> Measurements:
        from benchmarks.compare.tokens import TOKEN_LAYER_BYTES, Engine  # Slow: imports torch.

        layers = 8
        engine = Engine(self._socket, layers, self._engine_tokens)
        length = layers * self._engine_tokens * TOKEN_LAYER_BYTES / MIB
        results: dict[str, list[float]] = {"store": [], "retrieve": []}
        try:
            for _ in range(3):
                for name in results:
                    results[name].append(getattr(engine, name)())
                engine.forget()
        finally:
            engine.close()
        return {
            f"{name} {length:.0f} MiB": statistics.median(seconds) * 1e3 for name, seconds in results.items()
        }

    @property
    def _socket(self) -> Path:
        return self._folder / "socket"

    @contextmanager
    def _cache_process(self, *, nice: bool = False) -> Iterator[subprocess.Popen[bytes]]:
        arguments = [str(os.getpid()), str(self._settings), str(self._report)]
        prefix = ["nice", "-n", "19"] if nice else []
        command = [*prefix, sys.executable, "-m", "benchmarks.busy_process", *arguments]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            wait_until(partial(self._is_ready, process), LIMIT_SECONDS)
            yield process
            process.terminate()
            process.wait(LIMIT_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _is_ready(self, process: subprocess.Popen[bytes]) -> bool:
        if process.poll() is not None:
            raise SystemExit("the cache process did not start")
        return is_ready(self._socket)

    @contextmanager
    def _connected(self) -> Iterator[tuple[SchedulerBridge, WorkerBridge]]:
        scheduler = SchedulerBridge(self._hello("scheduler"), self._socket)
        worker = WorkerBridge(self._hello("worker"), self._socket)
        try:
            worker.connect()
            scheduler.connect()
            yield scheduler, worker
        finally:
            scheduler.close()
            worker.close()

    def _hello(self, role: Role) -> Hello:
        return Hello(protocol.VERSION, "busy", role, 0, self._layout, NAMESPACE)


def reserve(scheduler: SchedulerBridge, keys: Sequence[ChunkKey]) -> Reserved:
    """Reserve a chunk for each of many prompts, in one message."""
    call = scheduler.reserve([Run(ROOT, key, CHUNK_TOKENS) for key in keys])
    while call is not None and not call.settled:
        scheduler.poll(LIMIT_SECONDS)
    if call is None or call.result is None:
        raise SystemExit("the cache process did not answer")
    return call.result


if __name__ == "__main__":
    main()
