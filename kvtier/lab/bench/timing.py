"""Order, ratios and percentiles of interleaved measurements, and contents for their chunks."""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Sequence

from blake3 import blake3

from kvtier.units import MIB


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Return the names in the order of that turn: each turn starts with another one."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def ratios(seconds: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the speed relative to the reference, per turn. 1: equally fast."""
    return [expected / actual for actual, expected in zip(seconds, reference, strict=True)]


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
