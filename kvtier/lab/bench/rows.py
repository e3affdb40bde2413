"""Parameters, results and statistics of interleaved measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.units import MIB

KVTIER, LIMIT = "kvtier", "limit"
"""Names of the two sides that are compared."""


@dataclass(frozen=True)
class Extent:
    """Parameters of the benchmark of each tier and transport."""

    size: int = 32 * MIB
    """Bytes per chunk, whole pages."""
    chunks: int = 16
    in_flight: int = 4
    """Chunks per batch."""
    turns: int = 5
    lookups: int = 50

    @property
    def length(self) -> int:
        """Bytes of all chunks."""
        return self.size * self.chunks


@dataclass(frozen=True)
class Ratio:
    """Speed relative to the limit, over all turns. 1: equally fast."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Direction:
    """Results of puts, or of gets."""

    gb_s: float
    """Median over the turns, with ``in_flight`` chunks per batch."""
    p50_ms: float
    """Latency with one chunk in flight."""
    p99_ms: float
    limit_gb_s: float | None = None
    ratio: Ratio | None = None


@dataclass(frozen=True)
class Row:
    """Results of one tier or transport; if it failed, only its error."""

    name: str
    type: str
    limit: str | None = None
    """Name of the limit that it is compared with; ``None`` if there is no limit."""
    put: Direction | None = None
    get: Direction | None = None
    lookups_per_s: float | None = None
    """Keys per second, looked up in batches; ``None`` for a transport."""
    remark: str = ""
    error: str | None = None


class Samples:
    """Durations of one direction in seconds: of turns, by side, and of single chunks."""

    def __init__(self) -> None:
        self.turns: dict[str, list[float]] = {}
        self.singles: list[float] = []

    def direction(self, length: int) -> Direction:
        """Return the results of kvtier, for turns of ``length`` bytes."""
        turns, limit = self.turns[KVTIER], self.turns.get(LIMIT)
        by_turn = ratios(turns, limit) if limit else None
        return Direction(
            gb_s=length / statistics.median(turns) / 1e9,
            p50_ms=percentile(self.singles, 0.5) * 1e3,
            p99_ms=percentile(self.singles, 0.99) * 1e3,
            limit_gb_s=length / statistics.median(limit) / 1e9 if limit else None,
            ratio=Ratio(statistics.median(by_turn), min(by_turn), max(by_turn)) if by_turn else None,
        )


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
