"""What is measured, and what came of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.bench.timing import percentile, ratios
from kvtier.units import MIB


@dataclass(frozen=True)
class Extent:
    """How much is measured of each tier and transport."""

    size: int = 32 * MIB
    """Bytes of a chunk, whole pages."""
    chunks: int = 16
    in_flight: int = 4
    """Chunks of one batch."""
    turns: int = 5
    look_ups: int = 50

    @property
    def length(self) -> int:
        """Bytes of all chunks together."""
        return self.size * self.chunks


@dataclass(frozen=True)
class Ratio:
    """How fast it was beside its limit, turn by turn: 1 for equally fast."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Direction:
    """Chunks on their way in, or out."""

    gb_s: float
    """The median over the turns, with ``in_flight`` chunks in a batch."""
    p50_ms: float
    """Of one chunk alone."""
    p99_ms: float
    limit_gb_s: float | None = None
    ratio: Ratio | None = None


@dataclass(frozen=True)
class Row:
    """One tier or transport; of one that has failed only why."""

    name: str
    type: str
    limit: str | None = None
    """What it is held against; ``None`` where nothing is known."""
    put: Direction | None = None
    get: Direction | None = None
    look_ups_per_s: float | None = None
    """Keys, asked for in one batch; ``None`` for a transport."""
    remark: str = ""
    error: str | None = None


class Samples:
    """Seconds of one direction: of whole turns by contestant, and of single chunks."""

    def __init__(self) -> None:
        self.turns: dict[str, list[float]] = {}
        self.singles: list[float] = []

    def direction(self, name: str, limit: str | None, length: int) -> Direction:
        """What came of it, where each turn moved ``length`` bytes."""
        ours = self.turns[name]
        of_limit: Mapping[str, Sequence[float]] = self.turns if limit is not None else {}
        theirs = of_limit.get(limit or "")
        beside = ratios(ours, theirs) if theirs else None
        return Direction(
            gb_s=length / statistics.median(ours) / 1e9,
            p50_ms=percentile(self.singles, 0.5) * 1e3,
            p99_ms=percentile(self.singles, 0.99) * 1e3,
            limit_gb_s=length / statistics.median(theirs) / 1e9 if theirs else None,
            ratio=Ratio(statistics.median(beside), min(beside), max(beside)) if beside else None,
        )
