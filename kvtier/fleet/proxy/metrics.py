"""Counters and latencies of the proxy, and its Prometheus metrics.

``docs/proxy.md`` lists all metrics, with the same descriptions.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from kvtier.fleet.proxy.admission import Admission
from kvtier.fleet.proxy.upstream import Role, State, Upstream, Upstreams
from kvtier.fleet.service import ServiceMetrics
from kvtier.observability.families import counter, gauge, histogram
from kvtier.version import __version__

RECENT = 10_000
"""Samples for the median and the 99th percentile; count and mean cover all samples."""
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LINE = "=" * 31

OUTCOMES = ("ok", "error", "refused", "interrupted", "cancelled")
PREFILL_OUTCOMES = ("transferred", "kept", "refused", "failed")
SKIP_REASONS = ("short", "cached", "no_prefiller", "no_peer", "unsuitable")
LOOKUP_OUTCOMES = ("answered", "refused", "failed")


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

    def summary(self) -> dict[str, float]:
        """Summarize all samples, all 0 without one. Takes some ms with 10,000 recent ones: it sorts them."""
        recent = sorted(self._recent) or [0.0]
        # Before Python 3.13, one sample has no quantiles.
        *_, p99 = statistics.quantiles(recent if len(recent) > 1 else recent * 2, n=100, method="inclusive")
        return {
            "count": self.count,
            "mean_ms": self.seconds / max(1, self.count) * 1000,
            "median_ms": statistics.median(recent) * 1000,
            "p99_ms": p99 * 1000,
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


class ProxyMetrics(ServiceMetrics):
    """Collect all values at scrape time from the counters that the proxy keeps anyway."""

    def __init__(self, statistics: Statistics, admission: Admission, upstreams: Upstreams) -> None:
        super().__init__()
        self._statistics, self._admission, self._upstreams = statistics, admission, upstreams
        ProcessCollector(registry=self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        statistics, admission = self._statistics, self._admission
        yield gauge("proxy_info", "The proxy's version.", [([__version__], 1)], "version")
        yield gauge("proxy_requests_in_flight", "Requests in flight.", admission.in_flight)
        yield gauge("proxy_held_bytes", "Bodies of requests in flight.", admission.held_bytes)
        text = "1 while the proxy shuts down and accepts no requests."
        yield gauge("proxy_draining", text, admission.draining)
        yield _counts("requests", "Completed requests.", "outcome", OUTCOMES, statistics.requests)
        text = "Requests sent to a prefill engine."
        yield _counts("prefills", text, "outcome", PREFILL_OUTCOMES, statistics.prefills)
        text = "Requests decoded without a remote prefill."
        yield _counts("skipped_prefills", text, "reason", SKIP_REASONS, statistics.skipped)
        text = "Requests retried after an engine failed."
        yield _counts("retries", text, "role", tuple(Role), statistics.retries)
        text = "Tokens that prefill engines report as transferred."
        yield counter("proxy_transferred_tokens", text, statistics.transferred_tokens)
        text = "Lookups at the controller."
        yield _counts("lookups", text, "outcome", LOOKUP_OUTCOMES, statistics.lookups)
        text = "Time from sending a prefill request to its response."
        yield _histogram("prefill_seconds", text, statistics.prefill)
        text = "Time from a request's arrival to the first byte of its response."
        yield _histogram("first_byte_seconds", text, statistics.first_byte)
        for metric, name, text, value in _OF_ENGINES:
            samples = [((engine.role, engine.url), value(engine)) for engine in self._upstreams]
            yield metric(f"proxy_engine_{name}", text, samples, "role", "engine")


_OF_ENGINES: tuple[tuple[Callable[..., Metric], str, str, Callable[[Upstream], float]], ...] = (
    (gauge, "up", "1 while the engine is up.", lambda engine: engine.state == State.UP),
    (gauge, "requests_in_flight", "Requests in flight at the engine.", lambda engine: engine.load),
    (counter, "responses", "Responses that the engine started.", lambda engine: engine.served),
    (counter, "failures", "Requests that failed at the engine.", lambda engine: engine.failed),
)


def _counts(name: str, text: str, label: str, values: Iterable[str], counts: Counter[str]) -> Metric:
    """Return a counter with all label values, even at 0: a late series hides its first increase."""
    return counter(f"proxy_{name}", text, [([value], counts[value]) for value in values], label)


def _histogram(name: str, text: str, durations: Durations) -> Metric:
    return histogram(f"proxy_{name}", text, BOUNDS, [((), durations.buckets, durations.seconds)])
