"""Taking turns, and what comes of it: on a machine that does other things too, only ratios mean something."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from blake3 import blake3

from kvtier.units import MIB

Contestant = Callable[[], Awaitable[object]]
Step = Callable[[], object]


async def take_turns(
    contestants: Mapping[str, Contestant], runs: int, before_each: Step = lambda: None
) -> dict[str, list[float]]:
    """The seconds of each run of each contestant, after one run of each that is not counted.

    They take turns, so that what slows the machine down for a while slows all of them: compare what is
    of the same turn, with :func:`ratio`. ``before_each`` runs before every run and is not counted.
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
    """The names in the order of that turn: who begins changes."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def ratios(seconds: Sequence[float], reference: Sequence[float]) -> list[float]:
    """How fast the first is beside the second in each turn, 1 for equally fast."""
    return [there / here for here, there in zip(seconds, reference, strict=True)]


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """The median of :func:`ratios`."""
    return statistics.median(ratios(seconds, reference))


def speed(length: int, seconds: Sequence[float]) -> float:
    """GB/s, the median over the turns."""
    return length / statistics.median(seconds) / 1e9


def percentile(seconds: Sequence[float], share: float) -> float:
    """The value below which ``share`` of them lie; of few values the nearest one that was seen."""
    ordered = sorted(seconds)
    return statistics.median(ordered) if share == 0.5 else ordered[round(share * (len(ordered) - 1))]


def filled(length: int) -> memoryview:
    """Page-aligned memory with bytes of which no device has others alike."""
    view = memoryview(mmap.mmap(-1, length))
    fill(view)
    return view


def fill(view: memoryview, seed: bytes = b"") -> None:
    """Write bytes that no device can compress, and that are nowhere else but where the seed is the same."""
    for start in range(0, len(view), MIB):
        piece = view[start : start + MIB]
        piece[:] = blake3(seed + start.to_bytes(8, "little")).digest(length=len(piece))
