"""Interleaved measurements and their ratios. On a machine with other load, only ratios are meaningful."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from blake3 import blake3

from kvtier.units import MIB

Contestant = Callable[[], Awaitable[object]]
Step = Callable[[], object]


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


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Return the names in the order of that turn: each turn starts with another one."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def ratios(seconds: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the speed relative to the reference, per turn. 1: equally fast."""
    return [expected / actual for actual, expected in zip(seconds, reference, strict=True)]


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of :func:`ratios`."""
    return statistics.median(ratios(seconds, reference))


def speed(length: int, seconds: Sequence[float]) -> float:
    """Return the median throughput over the turns, in GB/s."""
    return length / statistics.median(seconds) / 1e9


def percentile(seconds: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile; for a ``share`` of 0.5, the median."""
    ordered = sorted(seconds)
    return statistics.median(ordered) if share == 0.5 else ordered[round(share * (len(ordered) - 1))]


def filled(length: int) -> memoryview:
    """Return page-aligned memory with incompressible contents; see :func:`fill`."""
    view = memoryview(mmap.mmap(-1, length))
    fill(view)
    return view


def fill(view: memoryview, seed: bytes = b"") -> None:
    """Fill a view with bytes that do not compress or deduplicate, except with views of the same seed."""
    for start in range(0, len(view), MIB):
        piece = view[start : start + MIB]
        piece[:] = blake3(seed + start.to_bytes(8, "little")).digest(length=len(piece))
