"""What came of alternating runs: ratios pair by pair."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.common import show
from kvtier.bench.timing import ratios


class Pair(NamedTuple):
    """The same work on both, turn by turn, in seconds."""

    row: str
    what: str
    ours: Sequence[float]
    theirs: Sequence[float]
    length: int = 0
    """Bytes that were moved; 0 where none were."""

    def cells(self) -> list[object]:
        beside = ratios(self.ours, self.theirs)
        return [
            self.row,
            self.what,
            self._figure(self.ours),
            self._figure(self.theirs),
            statistics.median(beside),
            min(beside),
            max(beside),
        ]

    def as_json(self) -> dict[str, Any]:
        beside = ratios(self.ours, self.theirs)
        return {
            **self._asdict(),
            "ratio": {"median": statistics.median(beside), "lowest": min(beside), "highest": max(beside)},
        }

    def _figure(self, seconds: Sequence[float]) -> str:
        median = statistics.median(seconds)
        return f"{self.length / median / 1e9:.2f} GB/s" if self.length else f"{median * 1e3:.2f} ms"


def show_pairs(title: str, pairs: Sequence[Pair]) -> None:
    """Print them; a ratio above 1 says how many times as fast kvtier is."""
    columns = ("", "", "kvtier", "LMCache", "ratio", "lowest", "highest")
    show(title, columns, [pair.cells() for pair in pairs])
