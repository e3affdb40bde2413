"""Compare the transports between peers with the limits of their media, in the same run.

::

    python -m benchmarks.transports                     # tcp and nixl, 2 GiB of memory, a minute each
    python -m benchmarks.transports --transport nixl --ucx TLS=tcp

Two processes on loopback, each with a real arena. The chunks of a row are one batch, which each side in turn
reads from the other arena or writes into it. The limit of ``tcp`` is the same bytes on as many plain blocking
sockets, with a thread each. The limit of ``nixl`` is one plain NIXL transfer in a busy loop, between two
processes that map the same arenas and have the same UCX variables. CPU time includes all processes involved.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import anyio

from benchmarks.common import MIB, ratio, show, speed
from kvtier.bench.raw_sockets import Span
from kvtier.bench.timing import percentile
from kvtier.bench.transport_process import cpu_seconds
from kvtier.bench.transports import (
    LIMIT,
    Check,
    Contestant,
    contestants_of,
    other_process,
    others_paused,
    spans_between,
)
from kvtier.plugins import Plugins
from kvtier.testing.transport_side import Side
from kvtier.transports.base import Access

TRANSPORTS = ("tcp", "nixl") if find_spec("nixl") else ("tcp",)
SMALL_BYTES = 4096
SMALL_BATCH = 100
"""Number of consecutive small reads of one side before the other side runs."""


class Extent(NamedTuple):
    """Amount of work to measure."""

    chunk_bytes: int
    depths: Sequence[int]
    bytes_per_row: int
    """Bytes that each side moves, in at least ``min_turns`` turns."""
    min_turns: int
    small_runs: int


FULL = Extent(32 * MIB, [1, 4, 16], 2048 * MIB, 7, 2000)
QUICK = Extent(MIB, [1, 4], 0, 1, 100)


class Row(NamedTuple):
    """Measurements of one kind of move, by contestant."""

    access: Access
    depth: int
    seconds: Mapping[str, Sequence[float]]
    cpu_seconds: Mapping[str, float]
    """Sum over all turns."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare the transports between peers with their limits.")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: all")
    parser.add_argument("--connections", type=int, default=4, help="of tcp; default: %(default)s")
    parser.add_argument("--ucx", action="append", default=[], metavar="NAME=VALUE", help="a UCX variable")
    parser.add_argument("--quick", action="store_true", help="smoke test with a few megabytes")
    options = parser.parse_args(arguments)
    settings: dict[str, dict[str, Any]] = {
        "tcp": {"type": "tcp", "connections": options.connections},
        "nixl": {"type": "nixl", "ucx": dict(text.split("=", 1) for text in options.ucx)},
    }
    for name in options.transport or TRANSPORTS:
        anyio.run(measure, name, settings[name], QUICK if options.quick else FULL)


async def measure(name: str, settings: Mapping[str, Any], extent: Extent) -> None:
    """Print the tables of one transport."""
    count = max(extent.depths)
    lengths = [extent.chunk_bytes] * count
    kind = Plugins.load([]).transport(name)
    with other_process(settings, lengths, plugins=[]) as remote:
        async with Side.open(kind, settings, sum(lengths) + MIB) as side:
            leases = [side.arena.allocate(length) for length in lengths]
            side.arena.settle()
            spans = spans_between([lease for lease in leases if lease is not None], remote)
            checked = kind.settings_type.model_validate(settings)
            async with contestants_of(checked, side, remote) as contestants:
                check = Check(side, remote, spans)
                rows = []
                for access in Access:
                    for depth in extent.depths:
                        rows.append(await interleave(contestants, check, access, depth, extent))
                        print(f"{name}: {access.value} {depth} measured", file=sys.stderr)
                small = await small_reads(contestants, spans[Access.READ][0], extent.small_runs)
            check.close()
            for lease in leases:
                if lease is not None:
                    lease.release()
    size = extent.chunk_bytes
    show(f"{name}, chunks of {size // MIB} MiB, GB/s and ratio to the limit", *of_speed(rows, size))
    show(f"{name}, CPU seconds per GB, both hosts", *of_cost(rows, size, extent))
    show(f"{name}, reading {SMALL_BYTES} bytes, µs", *of_latency(small))


async def interleave(
    contestants: Mapping[str, Contestant], check: Check, access: Access, depth: int, extent: Extent
) -> Row:
    """Measure one row, without a first warm-up turn. The order alternates."""
    seconds: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, float] = dict.fromkeys(contestants, 0.0)
    for turn in range(turns_of(extent, depth) + 1):
        for name in list(contestants)[:: 1 if turn % 2 else -1]:
            mover, processes, _ = contestants[name]
            spans = check.spans[access][:depth]
            check.clear(access, spans)
            with others_paused(contestants, name):
                before = cpu_seconds(processes)
                took = await mover.move(access, spans)
                cpu_used = cpu_seconds(processes) - before
            if not check.arrived(access, spans):
                raise SystemExit(f"{name} did not transfer all bytes")
            if turn:
                seconds[name].append(took)
                cpu[name] += cpu_used
    return Row(access, depth, seconds, cpu)


def turns_of(extent: Extent, depth: int) -> int:
    return max(extent.bytes_per_row // (extent.chunk_bytes * depth), extent.min_turns)


async def small_reads(
    contestants: Mapping[str, Contestant], span: Span, runs: int
) -> dict[str, Sequence[float]]:
    """Return the seconds of each of ``runs`` small reads."""
    span = span._replace(length=SMALL_BYTES)
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(-1, runs // SMALL_BATCH):
        for name in list(contestants)[:: 1 if turn % 2 else -1]:
            with others_paused(contestants, name):
                took = await contestants[name].mover.read_repeatedly(span, SMALL_BATCH)
            if turn >= 0:
                seconds[name] += took
    return dict(seconds)


def of_speed(rows: Sequence[Row], size: int) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Return the columns and rows of the first table."""
    name = transport_of(rows[0].seconds)
    cells: list[Sequence[object]] = []
    for access, depth, seconds, _ in rows:
        own, limit = seconds[name], seconds[LIMIT]
        ratios = sorted(reference / actual for actual, reference in zip(own, limit, strict=True))
        cells.append(
            (
                f"{access.value} {depth} in flight",
                speed(depth * size, limit),
                speed(depth * size, own),
                ratio(own, limit),
                f"{ratios[len(ratios) // 4]:.2f} to {ratios[-len(ratios) // 4]:.2f}",
            )
        )
    return ("", "limit", name, f"{name} : limit", "middle half"), cells


def of_cost(rows: Sequence[Row], size: int, extent: Extent) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Return the columns and rows of the second table."""
    name = transport_of(rows[0].seconds)
    cells: list[Sequence[object]] = []
    for access, depth, seconds, cpu in rows:
        moved = depth * size * len(seconds[name]) / 1e9
        limit, own = cpu[LIMIT] / moved, cpu[name] / moved
        cells.append((f"{access.value} {depth} in flight", limit, own, own / limit))
    return ("", "limit", name, f"{name} : limit"), cells


def of_latency(small: Mapping[str, Sequence[float]]) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Return the columns and rows of the third table."""
    name = transport_of(small)
    cells: list[Sequence[object]] = []
    for label, share in (("median", 0.5), ("p99", 0.99)):
        limit, own = (percentile(small[contestant], share) * 1e6 for contestant in (LIMIT, name))
        cells.append((label, f"{limit:,.0f}", f"{own:,.0f}", limit / own))
    return ("", "limit", name, f"{name} : limit"), cells


def transport_of(by_name: Mapping[str, object]) -> str:
    return next(name for name in by_name if name != LIMIT)


if __name__ == "__main__":
    main()
