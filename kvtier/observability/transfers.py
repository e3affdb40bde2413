"""Counts of the transfers between tiers, from the reports that observers receive: microseconds per batch."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field

from kvtier.backends.base import Outcome
from kvtier.cache import TieredCache
from kvtier.events import Event, Observer, Prefetch, Report, Store

BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Histogram buckets in seconds. A batch of tens of MiB takes 1 ms from memory and 1 s from a slow disk."""
ENGINE = "engine"
"""The source of chunks that come from an engine."""
Route = tuple[type[Event], str | None, str | None]
"""Event type, source and target."""


@dataclass(slots=True)
class RouteCounts:
    """Counters of the transfers of one event type between two tiers."""

    bytes: int = 0
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))

    def add(self, report: Report) -> None:
        """Count one batch."""
        self.bytes += report.transferred_bytes
        self.seconds += report.seconds
        self.buckets[bisect_left(BOUNDS, report.seconds)] += 1
        remaining = len(report.outcomes)
        for outcome in self.outcomes:  # OK comes first and usually covers the whole batch.
            if not remaining:
                break
            count = report.outcomes.count(outcome)
            self.outcomes[outcome] += count
            remaining -= count


class TransferCounts(Observer):
    """Counts the transfers of one cache, by route. Add it to the cache's observers."""

    def __init__(self, cache: TieredCache) -> None:
        self.routes = defaultdict[Route, RouteCounts](RouteCounts)
        # Count 0 from the start: rate() misses the first increase of a counter that appears late.
        memory = cache.memory.name
        for tier in cache.lower:
            self.routes[Prefetch, tier.name, memory] = RouteCounts()
            if tier.write != "never":
                self.routes[Store, memory, tier.name] = RouteCounts()

    def observe(self, report: Report) -> None:
        """Count one transfer. Deletions are not counted."""
        if report.target is not None:
            self.routes[type(report.event), report.source, report.target].add(report)
