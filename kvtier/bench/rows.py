"""Parameters and results of a benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.bench.timing import percentile, ratios
from kvtier.units import MIB


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
    """Durations of one direction in seconds: of turns, by contestant, and of single chunks."""

    def __init__(self) -> None:
        self.turns: dict[str, list[float]] = {}
        self.singles: list[float] = []

    def direction(self, name: str, limit: str | None, length: int) -> Direction:
        """Return the results of ``name``, for turns of ``length`` bytes."""
        own_turns = self.turns[name]
        of_limit: Mapping[str, Sequence[float]] = self.turns if limit is not None else {}
        limit_turns = of_limit.get(limit or "")
        by_turn = ratios(own_turns, limit_turns) if limit_turns else None
        return Direction(
            gb_s=length / statistics.median(own_turns) / 1e9,
            p50_ms=percentile(self.singles, 0.5) * 1e3,
            p99_ms=percentile(self.singles, 0.99) * 1e3,
            limit_gb_s=length / statistics.median(limit_turns) / 1e9 if limit_turns else None,
            ratio=Ratio(statistics.median(by_turn), min(by_turn), max(by_turn)) if by_turn else None,
        )
