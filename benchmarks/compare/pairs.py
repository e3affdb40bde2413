"""Results of interleaved runs, with a ratio per pair."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.common import show
from kvtier.lab.bench.rows import ratios


class Pair(NamedTuple):
    """Seconds of the same work on both sides, per turn."""

    row: str
    what: str
    ours: Sequence[float]
    theirs: Sequence[float]
    length: int = 0
    """Bytes moved, or 0."""

    def cells(self) -> list[object]:
        speedups = ratios(self.ours, self.theirs)
        return [
            self.row,
            self.what,
            self._format(self.ours),
            self._format(self.theirs),
            statistics.median(speedups),
            min(speedups),
            max(speedups),
        ]

    def _format(self, seconds: Sequence[float]) -> str:
        median = statistics.median(seconds)
        return f"{self.length / median / 1e9:.2f} GB/s" if self.length else f"{median * 1e3:.2f} ms"


def show_pairs(title: str, pairs: Sequence[Pair]) -> None:
    """Print a table of pairs. A ratio above 1 means that kvtier is faster."""
    columns = ("", "", "kvtier", "LMCache", "ratio", "lowest", "highest")
    show(title, columns, [pair.cells() for pair in pairs])
