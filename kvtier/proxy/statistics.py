"""What the proxy counts: outcomes, and how long prefills and first bytes took."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from typing import TypedDict

RECENT = 10_000
"""Of so many the median and the 99th percentile are told; count and mean are of all."""
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LINE = "=" * 31


class Summary(TypedDict):
    """Of a number of durations, in milliseconds; all 0 where there are none."""

    count: int
    mean_ms: float
    median_ms: float
    p99_ms: float


class Durations:
    """How long something took, each time. Bounded."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(BOUNDS) + 1)
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add(self, seconds: float) -> None:
        """It took so long once more."""
        self.count += 1
        self.seconds += seconds
        self.buckets[bisect_left(BOUNDS, seconds)] += 1
        self._recent.append(seconds)

    def summary(self) -> Summary:
        """What it was like so far. Takes some milliseconds where there were many."""
        recent = sorted(self._recent) or [0.0]
        return {
            "count": self.count,
            "mean_ms": self.seconds / max(1, self.count) * 1000,
            "median_ms": statistics.median(recent) * 1000,
            "p99_ms": _percentile(recent, 0.99) * 1000,
        }


class Statistics:
    """Everything that is counted. Labels are few and fixed."""

    def __init__(self) -> None:
        self.prefill = Durations()
        self.first_byte = Durations()
        self.requests: Counter[str] = Counter()
        """By outcome."""
        self.prefills: Counter[str] = Counter()
        """By outcome: those that prefillers were asked for."""
        self.skipped: Counter[str] = Counter()
        """By reason: requests that no prefiller was asked about."""
        self.retries: Counter[str] = Counter()
        """By role: requests that went to one more engine."""
        self.look_ups: Counter[str] = Counter()
        """By outcome: questions to the controller."""
        self.handed_over_tokens = 0

    def report(self) -> str:
        """What is printed at the end."""
        prefill = self.prefill.summary()
        return "\n".join(
            (
                LINE,
                f"Num requests: {prefill['count']}",
                "Prefill node TTFT stats:",
                f"- Average (ms): {prefill['mean_ms']:.3f}",
                f"- Median (ms): {prefill['median_ms']:.3f}",
                f"- 99th Percentile (ms): {prefill['p99_ms']:.3f}",
                LINE,
            )
        )


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Between the two values that are nearest, as numpy has it."""
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
