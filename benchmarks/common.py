"""What the benchmarks share: contestants that take turns, and a table of what came out."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from blake3 import blake3
from rich.console import Console
from rich.table import Table

MIB = 1 << 20

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


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """How fast the first is beside the second: the median over the turns, 1 for equally fast."""
    return statistics.median(there / here for here, there in zip(seconds, reference, strict=True))


def speed(length: int, seconds: Sequence[float]) -> float:
    """GB/s, the median over the turns."""
    return length / statistics.median(seconds) / 1e9


def filled(length: int) -> memoryview:
    """Page-aligned memory with bytes that no device can compress."""
    view = memoryview(mmap.mmap(-1, length))
    for start in range(0, length, MIB):
        piece = view[start : start + MIB]
        piece[:] = blake3(start.to_bytes(8, "little")).digest(length=len(piece))
    return view


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: text to the left, figures to the right."""
    table = Table(title=title, title_justify="left")
    for column, example in zip(columns, rows[0], strict=True):
        table.add_column(column, justify="left" if isinstance(example, str) else "right")
    for row in rows:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=110).print(table)
