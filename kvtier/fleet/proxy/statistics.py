"""Counters and latencies of the proxy."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from typing import TypedDict

RECENT = 10_000
"""Samples for the median and the 99th percentile; count and mean cover all samples."""
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LINE = "=" * 31


class Summary(TypedDict):
    """Summary of durations, in milliseconds; all 0 without samples."""

    count: int
    mean_ms: float
    median_ms: float
    p99_ms: float


class Durations:
    """Latency samples: a histogram and the most recent values. Bounded."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(BOUNDS) + 1)
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add(self, seconds: float) -> None:
        """Record one sample."""
        self.count += 1
        self.seconds += seconds
        self.buckets[bisect_left(BOUNDS, seconds)] += 1
        self._recent.append(seconds)

    def summary(self) -> Summary:
        """Summarize all samples. Takes some milliseconds with 10,000 recent samples, which it sorts."""
        recent = sorted(self._recent) or [0.0]
        return {
            "count": self.count,
            "mean_ms": self.seconds / max(1, self.count) * 1000,
            "median_ms": statistics.median(recent) * 1000,
            "p99_ms": _percentile(recent, 0.99) * 1000,
        }


class Statistics:
    """All counters of the proxy. Each has a small, fixed set of labels."""

    def __init__(self) -> None:
        self.prefill = Durations()
        self.first_byte = Durations()
        self.requests: Counter[str] = Counter()
        """By outcome."""
        self.prefills: Counter[str] = Counter()
        """By outcome: requests sent to a prefill engine."""
        self.skipped: Counter[str] = Counter()
        """By reason: requests decoded without a remote prefill."""
        self.retries: Counter[str] = Counter()
        """By role: requests retried after an engine failed."""
        self.lookups: Counter[str] = Counter()
        """By outcome: lookups at the controller."""
        self.transferred_tokens = 0

    def report(self) -> str:
        """Return the summary that ``kvtier proxy`` prints when it ends."""
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
    """Interpolate linearly between the two nearest values, like ``numpy.percentile``."""
    position = (len(ordered) - 1) * share
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
