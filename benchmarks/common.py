"""Shared by the benchmarks: options, interleaved measurements, tables, and blocking bridge calls."""

from __future__ import annotations

import argparse
import atexit
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.results import Table, record
from kvtier.bridge.client import Bridge, SchedulerBridge, WorkerBridge
from kvtier.bridge.protocol import Reserved, Run
from kvtier.lab.bench.rows import ratios
from kvtier.lab.bench.sides import filled
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.rpc.calls import Call
from kvtier.units import MIB
from tests.rigs.loads import saturated

__all__ = [
    "MIB",
    "confidence",
    "confirm",
    "filled",
    "interleave",
    "loads",
    "parse",
    "ratio",
    "reserve",
    "show",
    "speed",
]

ANSWER_SECONDS = 60.0
RESAMPLES = 4000
loads: set[int] = set()
"""The processes of ``--busy``, whose CPU time is not that of what is measured."""

ResultT = TypeVar("ResultT")
SampleT = TypeVar("SampleT")
Contestant = Callable[[], Awaitable[object]]
Step = Callable[[], object]


def parse(parser: argparse.ArgumentParser, **small: object) -> argparse.Namespace:
    """Parse the command line, and begin the load of ``--busy``, which ends with this process.

    ``small``: the defaults with ``--small``. Both options are added to the others.
    """
    parser.add_argument("--small", action="store_true", help="smoke test: the figures mean nothing")
    parser.add_argument(
        "--busy", type=int, nargs="?", const=3, help="beside so many spinning processes per core; default: 3"
    )
    if "--small" in sys.argv:
        parser.set_defaults(**small)
    options = parser.parse_args()
    if options.busy:
        load = ExitStack()
        atexit.register(load.close)
        loads.update(load.enter_context(saturated(options.busy)))
    return options


async def interleave(
    contestants: Mapping[str, Contestant], runs: int, before_each: Step = lambda: None
) -> dict[str, list[float]]:
    """Run the contestants alternately; return the seconds of each run, without a first warm-up run of each.

    Temporary load on the machine slows all contestants alike: compare runs of the same turn, with
    :func:`ratio`. ``before_each`` runs before every run and is not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(-1, runs):
        for name, contestant in contestants.items():
            before_each()
            started = time.perf_counter()
            await contestant()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of :func:`ratios`."""
    return statistics.median(ratios(seconds, reference))


def speed(length: int, seconds: Sequence[float]) -> float:
    """Return the median throughput over the turns, in GB/s."""
    return length / statistics.median(seconds) / 1e9


def confidence(samples: Sequence[SampleT], figure: Callable[[Sequence[SampleT]], float]) -> str:
    """Return a figure with its 95 % confidence interval, from a bootstrap over the samples."""
    generator = random.Random(0)
    figures = sorted(figure(generator.choices(samples, k=len(samples))) for _ in range(RESAMPLES))
    low, high = figures[round(0.025 * RESAMPLES)], figures[round(0.975 * RESAMPLES) - 1]
    return f"{figure(samples):.3f} ({low:.3f} to {high:.3f})"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print and record a table, with text left-aligned and figures right-aligned."""
    record(Table(title, columns, rows))
    table = RichTable(title=title, title_justify="left")
    for column, example in zip(columns, rows[0], strict=True):
        text = isinstance(example, str)
        table.add_column(column, justify="left" if text else "right", no_wrap=text)
    for row in rows:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=120).print(table)


def reserve(
    scheduler: SchedulerBridge, parent: ChunkKey, keys: Sequence[ChunkKey], last_tokens: int
) -> Reserved:
    """Reserve room for consecutive chunks. Blocks until the cache process answers."""
    return _answer(scheduler, scheduler.reserve([Run(parent, join_keys(keys), last_tokens)]))


def confirm(worker: WorkerBridge, leases: Sequence[int]) -> bool:
    """Whether the leases are still valid. Blocks until the cache process answers."""
    return _answer(worker, worker.confirm(leases))


def _answer(bridge: Bridge, call: Call[ResultT] | None) -> ResultT:
    assert call is not None, "the cache process is not connected"
    deadline = time.monotonic() + ANSWER_SECONDS
    while not call.settled and time.monotonic() < deadline:
        bridge.poll(1.0)
    assert call.result is not None, "the cache process did not answer"
    return call.result
