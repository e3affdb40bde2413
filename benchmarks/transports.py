"""Compare the transports between peers with the limits of their media, in the same run.

::

    python -m benchmarks.transports                     # tcp and nixl, 2 GiB of memory, a minute each
    python -m benchmarks.transports --transport nixl --ucx TLS=tcp

Two processes on loopback, each with a real arena. The chunks of a row are one batch, which each side in turn
writes into the other arena and reads from it. The limits are those of ``kvtier bench``. CPU time includes all
processes involved.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

import anyio

from benchmarks.common import MIB, loads, parse, ratio, show, speed
from kvtier.lab.bench.rows import KVTIER, LIMIT, percentile
from kvtier.lab.bench.sides import Chunk, Side, clear_stamps, have_stamps
from kvtier.lab.bench.transports import family, open_sides
from kvtier.lab.bench.turns import others_paused
from kvtier.plugins import Plugins

TRANSPORTS = ("tcp", "nixl") if find_spec("nixl") else ("tcp",)
SMALL_BYTES = 4096
SMALL_BATCH = 100
"""Number of consecutive small reads of one side before the other side runs."""
CPU_CLOCK = 2
"""``CPUCLOCK_SCHED`` of Linux's ``posix-timers.h``: CPU time of a process, all threads included."""


class Extent(NamedTuple):
    """Amount of work to measure."""

    chunk_bytes: int
    depths: Sequence[int]
    bytes_per_row: int
    """Bytes that each side moves, in at least ``min_turns`` turns."""
    min_turns: int
    small_runs: int


FULL = Extent(32 * MIB, [1, 4, 16], 2048 * MIB, 7, 2000)
SMALL = Extent(MIB, [1, 4], 0, 1, 100)


class Row(NamedTuple):
    """Measurements of one kind of move, by side."""

    call: str
    """``read`` or ``write``."""
    depth: int
    seconds: Mapping[str, Sequence[float]]
    cpu_seconds: Mapping[str, float]
    """Sum over all turns."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the transports between peers with their limits.")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: all")
    parser.add_argument("--connections", type=int, default=4, help="of tcp; default: %(default)s")
    parser.add_argument("--ucx", action="append", default=[], metavar="NAME=VALUE", help="a UCX variable")
    options = parse(parser)
    settings: dict[str, dict[str, Any]] = {
        "tcp": {"type": "tcp", "connections": options.connections},
        "nixl": {"type": "nixl", "ucx": dict(text.split("=", 1) for text in options.ucx)},
    }
    for name in options.transport or TRANSPORTS:
        anyio.run(measure, name, settings[name], SMALL if options.small else FULL)


async def measure(name: str, settings: Mapping[str, Any], extent: Extent) -> None:
    """Print the tables of one transport."""
    kind = Plugins.load([]).transport(name)
    size = extent.chunk_bytes
    rows = []
    async with open_sides(kind, settings, max(extent.depths), size) as (sides, chunks):
        for depth in extent.depths:
            rows += await interleave(sides, chunks[:depth], extent)
            print(f"{name}: {depth} in flight measured", file=sys.stderr)
        small = await small_reads(sides, chunks[0], extent.small_runs)
    rows.sort(key=lambda row: row.call)
    show(f"{name}, chunks of {size // MIB} MiB, GB/s and ratio to the limit", *of_speed(name, rows, size))
    show(f"{name}, CPU seconds per GB, both hosts", *of_cost(name, rows, size))
    show(f"{name}, reading {SMALL_BYTES} bytes, µs", *of_latency(name, small))


async def interleave(sides: Mapping[str, Side], chunks: Sequence[Chunk], extent: Extent) -> list[Row]:
    """Measure writes and reads of one batch, without a first warm-up turn. The order alternates."""
    seconds: dict[str, dict[str, list[float]]] = {call: defaultdict(list) for call in ("read", "write")}
    cpu: dict[str, dict[str, float]] = {call: defaultdict(float) for call in seconds}
    keys = [key for key, _ in chunks]
    processes = family(os.getpid()) - loads  # Those of the other sides are stopped, or wait.
    for turn in range(turns_of(extent, len(chunks)) + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            with others_paused(sides, name):
                started = cpu_seconds(processes)
                wrote = await sides[name].put(chunks)
                written = cpu_seconds(processes)
                stamps = clear_stamps(chunks)
                prepared = cpu_seconds(processes)
                took = await sides[name].get(chunks)
                done = cpu_seconds(processes)
            if not have_stamps(chunks, stamps):
                raise SystemExit(f"{name} did not transfer all bytes")
            await sides[name].forget(keys)
            if turn:
                seconds["write"][name].append(wrote)
                cpu["write"][name] += written - started
                seconds["read"][name].append(took)
                cpu["read"][name] += done - prepared
    return [Row(call, len(chunks), seconds[call], cpu[call]) for call in seconds]


def cpu_seconds(processes: Iterable[int]) -> float:
    """Return the CPU time of these processes, user and system, with nanosecond resolution.

    Processes that have exited count as 0: they only prepared memory.
    """
    seconds = 0.0
    for process in processes:
        with suppress(OSError):
            seconds += time.clock_gettime((~process << 3) | CPU_CLOCK)
    return seconds


COLUMNS = ("limit", "kvtier", "kvtier : limit", "cores busy", "by CPU time")
"""Those of :meth:`Cost.compared`."""


class Cost(NamedTuple):
    """What one transfer takes."""

    seconds: float
    cpu_seconds: float
    """Of all processes of both hosts."""

    @staticmethod
    def compared(length: int, limit: Sequence[Cost], own: Sequence[Cost]) -> tuple[object, ...]:
        """Return both speeds in GB/s, their ratio, and the ratio of the CPU times.

        Besides, how many cores each of them keeps busy: if that is all, the last ratio bounds the first.
        """
        limit_seconds, seconds = ([cost.seconds for cost in costs] for costs in (limit, own))
        limit_busy, busy = (
            statistics.median(cost.cpu_seconds / cost.seconds for cost in costs) for costs in (limit, own)
        )
        return (
            speed(length, limit_seconds),
            speed(length, seconds),
            ratio(seconds, limit_seconds),
            f"{limit_busy:.2f}, {busy:.2f}",
            ratio([cost.cpu_seconds for cost in own], [cost.cpu_seconds for cost in limit]),
        )


class Meter:
    """Measures the block that it is the context of."""

    cost: Cost

    def __enter__(self) -> Meter:
        self._processes = family(os.getpid()) - loads
        self._cpu_seconds, self._started = cpu_seconds(self._processes), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._started
        self.cost = Cost(seconds, cpu_seconds(self._processes) - self._cpu_seconds)


def turns_of(extent: Extent, depth: int) -> int:
    return max(extent.bytes_per_row // (extent.chunk_bytes * depth), extent.min_turns)


async def small_reads(sides: Mapping[str, Side], chunk: Chunk, runs: int) -> dict[str, Sequence[float]]:
    """Return the seconds of each of ``runs`` small reads."""
    part = chunk[0], chunk[1][:SMALL_BYTES]
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(-1, runs // SMALL_BATCH):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            with others_paused(sides, name):
                took = [await sides[name].get([part]) for _ in range(SMALL_BATCH)]
            if turn >= 0:
                seconds[name] += took
    return dict(seconds)


def of_speed(title: str, rows: Sequence[Row], size: int) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Return the columns and rows of the first table."""
    cells: list[Sequence[object]] = []
    for call, depth, seconds, _ in rows:
        own, limit = seconds[KVTIER], seconds[LIMIT]
        ratios = sorted(reference / actual for actual, reference in zip(own, limit, strict=True))
        cells.append(
            (
                f"{call} {depth} in flight",
                speed(depth * size, limit),
                speed(depth * size, own),
                ratio(own, limit),
                f"{ratios[len(ratios) // 4]:.2f} to {ratios[-len(ratios) // 4]:.2f}",
            )
        )
    return ("", "limit", title, f"{title} : limit", "middle half"), cells


def of_cost(title: str, rows: Sequence[Row], size: int) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Return the columns and rows of the second table."""
    cells: list[Sequence[object]] = []
    for call, depth, seconds, cpu in rows:
        moved = depth * size * len(seconds[KVTIER]) / 1e9
        limit, own = cpu[LIMIT] / moved, cpu[KVTIER] / moved
        cells.append((f"{call} {depth} in flight", limit, own, own / limit))
    return ("", "limit", title, f"{title} : limit"), cells


def of_latency(
    title: str, small: Mapping[str, Sequence[float]]
) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Return the columns and rows of the third table."""
    cells: list[Sequence[object]] = []
    for label, share in (("median", 0.5), ("p99", 0.99)):
        limit, own = (percentile(small[side], share) * 1e6 for side in (LIMIT, KVTIER))
        cells.append((label, f"{limit:,.0f}", f"{own:,.0f}", limit / own))
    return ("", "limit", title, f"{title} : limit"), cells


if __name__ == "__main__":
    main()
