"""What a busy machine costs: each part of a cache process's work, beside loads and without them.

::

    python -m benchmarks.busy                        # in the current folder: needs 1 GiB there; six minutes
    python -m benchmarks.busy --rounds 1 --conditions idle saturated
    python -m benchmarks.busy --memory 2GiB          # the most that the load which fragments memory takes

The conditions take turns, another one first in each round, so that what slows the machine down for a while
slows all of them; a ratio is the median over the rounds of the time taken to the idle one of the same round.

idle        no load of this benchmark
saturated   three processes a core compute
memory      another process holds every other page of memory, and the page cache takes what is free: there is
            no page of 2 MiB unless others are moved. 4 GiB stay available
disk        another process writes to the same disk, 256 MiB again and again, past the page cache
nice        as saturated, with the cache process at nice 19

A turn starts a cache process on a folder that holds 512 MiB of chunks, and looks all of them up until they
are leased: the *first load*. Then all are in memory, and a scheduler looks them up again, a prompt of 32,768
tokens. It reserves a chunk for each of 64 prompts, as one step of an engine with that many requests does;
with ``benchmarks/stepping.py`` and vLLM, all hooks of such a step are measured, too. An engine stores and
retrieves a prompt of 64 MiB. *Loop blocked* is how late a timer of 1 ms in the cache process's event loop is,
from the first load on; *on a core* excludes the time in which its thread waited for one.

To measure another version, run this with the Python of the environment that it is installed in.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import filled, show
from benchmarks.loads import LEAVE_BYTES, MIB, available_bytes, fragmented, saturated, writing
from benchmarks.look_up import answers, look_up
from kvtier.bench.timing import percentile, rotated
from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge, WorkerBridge, status
from kvtier.bridge.protocol import Hello, Role
from kvtier.header import HEADER_BYTES
from kvtier.keys import KEY_BYTES, ChunkKey, chunk_keys, root_key
from kvtier.layout import ChunkLayout, GroupLayout
from kvtier.units import parse_size

CHUNK_TOKENS, CHUNKS = 256, 128
NAMESPACE = b"\1" * 32
"""Not that of :class:`benchmarks.compare.tokens.Engine`, which clears its own."""
ROOT = root_key(NAMESPACE)
PROMPTS = 64
LIMIT_SECONDS = 120.0
CONDITIONS = ("idle", "saturated", "memory", "disk", "nice")

Measured = dict[str, float]
"""Milliseconds by what took them, or the number of look-ups."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A cache process on a busy machine, beside an idle one.")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write; default: here")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--conditions", nargs="+", choices=CONDITIONS, default=CONDITIONS, help="default: all"
    )
    parser.add_argument("--memory", type=parse_size, default=1 << 50, help="the most that a load takes of it")
    parser.add_argument(
        "--small", action="store_true", help="a few megabytes and one round, to see that it runs"
    )
    given = parser.parse_args(arguments)
    # Loads end with the benchmark, however that ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="kvtier-bench-") as folder:
        bench = Bench(Path(folder).absolute(), given.memory, small=given.small)
        bench.prepare()
        found = take_turns(bench, given.conditions, 1 if given.small else given.rounds)
    report(found)


def take_turns(bench: Bench, conditions: Sequence[str], rounds: int) -> dict[str, list[Measured]]:
    """What was measured in each round, by condition."""
    found: dict[str, list[Measured]] = {name: [] for name in conditions}
    for turn in range(rounds):
        for name in rotated(list(found), turn):
            started = time.monotonic()
            found[name].append(bench.measure(name))
            print(
                f"round {turn + 1}, {name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True
            )
    return found


def report(found: dict[str, list[Measured]]) -> None:
    """Print the figures: medians with the worst of the rounds, and ratios to the idle machine."""
    measures = list(next(iter(found.values()))[0])
    values = {
        name: {what: [one[what] for one in of_it] for what in measures} for name, of_it in found.items()
    }
    show(
        "median of the rounds (the worst of them); milliseconds, unless it says otherwise",
        ("", *found),
        [(what, *(figures(values[name][what]) for name in found)) for what in measures],
    )
    busy = [name for name in found if name != "idle"]
    if "idle" not in found or not busy:
        return
    idle = values["idle"]
    show(
        "times as long as on the idle machine of the same round, the median",
        ("", *busy),
        [(what, *(compared(values[name][what], idle[what]) for name in busy)) for what in measures],
    )


def figures(values: Sequence[float]) -> str:
    return f"{figure(statistics.median(values))} ({figure(max(values))})"


def figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def compared(values: Sequence[float], idle: Sequence[float]) -> str:
    pairs = [there / here for there, here in zip(values, idle, strict=True) if here]
    return f"{statistics.median(pairs):.2f}" if pairs else ""


class Bench:
    """One cache process after the other on the same folder, each in the conditions of its turn."""

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
        """Have the chunks on disk, and nothing in memory."""
        with self._cache_process(), self._connected() as (scheduler, worker):
            assert worker.arena is not None
            payload = self._layout.payload_bytes(CHUNK_TOKENS)
            content = filled(payload)
            for key in self._keys:
                (slot,) = reserve(scheduler, [key])
                assert slot is not None, "there is no room for the chunks"
                worker.arena.view(slot.offset + HEADER_BYTES, payload)[:] = content
                worker.commit([slot.lease])
            wait_until(lambda: status(self._socket)["counts"].get("put_ok", 0) >= CHUNKS)

    def measure(self, condition: str) -> Measured:
        """One turn."""
        with self._load(condition):
            started = time.perf_counter()
            with self._cache_process(nice=condition == "nice") as process:
                found = {"start of the process": (time.perf_counter() - started) * 1e3}
                with self._connected() as (scheduler, worker):
                    process.send_signal(signal.SIGUSR1)
                    found |= self._first_load(scheduler)
                    found |= self._look_ups(scheduler)
                    found |= self._reservations(scheduler, worker)
                found |= self._steps()
                found |= self._engine()
        blocked = json.loads(self._report.read_text())
        return found | {f"loop blocked, {what}": value for what, value in blocked.items()}

    def _load(self, condition: str) -> AbstractContextManager[None]:
        if condition in ("saturated", "nice"):
            return saturated()
        if condition == "disk":
            return writing(self._folder)
        if condition == "memory":
            needed = LEAVE_BYTES + 256 * MIB
            if available_bytes() < needed:
                raise SystemExit(f"memory is short: {needed >> 20} MiB must be available; leave out `memory`")
            return fragmented(self._folder, self._memory_bytes)
        return nullcontext()

    def _first_load(self, scheduler: SchedulerBridge) -> Measured:
        """Until all that is on disk is leased: in one look-up, unless chunks are given up on the way."""
        started = time.perf_counter()
        look_ups = 0
        while True:
            look_ups += 1
            leases = self._look_up_all(scheduler)
            seconds = time.perf_counter() - started
            scheduler.release(leases)
            if len(leases) == CHUNKS or seconds > LIMIT_SECONDS:
                break
        return {"first load from disk": seconds * 1e3, "  look-ups until all came": look_ups}

    def _look_up_all(self, scheduler: SchedulerBridge) -> list[int]:
        ticket = scheduler.look_up(self._keys, CHUNKS * CHUNK_TOKENS)
        if ticket is None:
            raise SystemExit("the cache process is gone")
        finding = scheduler.found(ticket, wait=LIMIT_SECONDS)
        while finding is not None and not finding.final:
            time.sleep(0.001)
            finding = scheduler.found(ticket)
        if finding is None:
            raise SystemExit("the cache process is gone")
        scheduler.take(ticket)
        return finding.leases

    def _look_ups(self, scheduler: SchedulerBridge) -> Measured:
        seconds = []
        for _ in range(self._runs):
            started = time.perf_counter()
            leases = look_up(scheduler, chunk_keys(ROOT, range(CHUNK_TOKENS * CHUNKS), CHUNK_TOKENS))
            seconds.append(time.perf_counter() - started)
            scheduler.release(leases)
        return {
            "look-up of 32,768 tokens": statistics.median(seconds) * 1e3,
            "  99 %": percentile(seconds, 0.99) * 1e3,
        }

    def _reservations(self, scheduler: SchedulerBridge, worker: WorkerBridge) -> Measured:
        """A chunk for each of many prompts."""
        seconds = []
        for _ in range(max(2, self._runs // 10)):
            keys = [ChunkKey(os.urandom(KEY_BYTES)) for _ in range(PROMPTS)]
            started = time.perf_counter()
            slots = reserve(scheduler, keys)
            seconds.append(time.perf_counter() - started)
            worker.abandon([slot.lease for slot in slots if slot is not None])
        return {f"reserve for {PROMPTS} prompts": statistics.median(seconds) * 1e3}

    def _steps(self) -> Measured:
        """What the connector's hooks add to a step in which each of many requests completes a chunk."""
        try:
            from benchmarks.stepping import Engine, make_request
        except ImportError:  # It needs vLLM.
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
            "  99 % of the steps": percentile(seconds, 0.99) * 1e3,
        }

    def _engine(self) -> Measured:
        from benchmarks.compare.tokens import TOKEN_LAYER_BYTES, Engine  # Imports torch, which is slow.

        layers = 8
        engine = Engine(self._socket, layers, self._engine_tokens)
        length = layers * self._engine_tokens * TOKEN_LAYER_BYTES / MIB
        found: dict[str, list[float]] = {"store": [], "retrieve": []}
        try:
            for _ in range(3):
                for name in found:
                    found[name].append(getattr(engine, name)())
                engine.forget()
        finally:
            engine.close()
        return {
            f"{name} {length:.0f} MiB": statistics.median(seconds) * 1e3 for name, seconds in found.items()
        }

    @property
    def _socket(self) -> Path:
        return self._folder / "socket"

    @contextmanager
    def _cache_process(self, *, nice: bool = False) -> Iterator[subprocess.Popen[bytes]]:
        words = [str(os.getpid()), str(self._settings), str(self._report)]
        prefix = ["nice", "-n", "19"] if nice else []
        command = [*prefix, sys.executable, "-m", "benchmarks.busy_process", *words]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            wait_until(partial(self._answers, process))
            yield process
            process.terminate()
            process.wait(LIMIT_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        if process.poll() is not None:
            raise SystemExit("the cache process did not start")
        return answers(self._socket)

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


def reserve(scheduler: SchedulerBridge, keys: Sequence[ChunkKey]) -> list[Any]:
    """Room for a chunk of each of many prompts, in one message if the bridge has one for that."""
    try:
        from kvtier.bridge.protocol import Run
    except ImportError:
        return [scheduler.reserve(ROOT, [key], CHUNK_TOKENS, seconds=LIMIT_SECONDS)[0] for key in keys]
    question = scheduler.reserve([Run(ROOT, key, CHUNK_TOKENS) for key in keys])
    while question is not None and question.open:
        scheduler.poll(LIMIT_SECONDS)
    if question is None or question.answer is None:
        raise SystemExit("the cache process does not answer")
    return [slot for (slot,) in question.answer]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing came of it in {LIMIT_SECONDS:.0f} s")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
