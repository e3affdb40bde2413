"""Prometheus metrics of the proxy. ``docs/proxy.md`` lists all of them, with the same descriptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.responses import Response

from kvtier.fleet.proxy.engine import Role, State
from kvtier.fleet.proxy.statistics import BOUNDS, Durations
from kvtier.version import __version__

if TYPE_CHECKING:
    from kvtier.fleet.proxy.proxy import Proxy

OUTCOMES = ("ok", "error", "refused", "interrupted", "cancelled")
PREFILL_OUTCOMES = ("transferred", "kept", "refused", "failed")
SKIP_REASONS = ("short", "cached", "no_prefiller", "no_peer", "unsuitable")
LOOKUP_OUTCOMES = ("answered", "refused", "failed")
ENGINE_LABELS = ("role", "engine")


class ProxyMetrics(Collector):
    """Collect all values at scrape time from the counters that the proxy keeps anyway."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def response(self) -> Response:
        """Return all metrics in Prometheus' text format."""
        return Response(generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering does not call :meth:`collect`."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        statistics, admission = self._proxy.statistics, self._proxy.admission
        info = GaugeMetricFamily("kvtier_proxy_info", "The proxy's version.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        for name, text, value in (
            ("requests_in_flight", "Requests in flight.", admission.in_flight),
            ("held_bytes", "Bodies of requests in flight.", admission.held_bytes),
            ("draining", "1 while the proxy shuts down and accepts no requests.", admission.draining),
        ):
            yield GaugeMetricFamily(f"kvtier_proxy_{name}", text, value)
        yield _counter("requests", "Completed requests.", "outcome", OUTCOMES, statistics.requests)
        text = "Requests sent to a prefill engine."
        yield _counter("prefills", text, "outcome", PREFILL_OUTCOMES, statistics.prefills)
        text = "Requests decoded without a remote prefill."
        yield _counter("skipped_prefills", text, "reason", SKIP_REASONS, statistics.skipped)
        text = "Requests retried after an engine failed."
        yield _counter("retries", text, "role", tuple(Role), statistics.retries)
        yield CounterMetricFamily(
            "kvtier_proxy_transferred_tokens",
            "Tokens that prefill engines report as transferred.",
            statistics.transferred_tokens,
        )
        text = "Lookups at the controller."
        yield _counter("lookups", text, "outcome", LOOKUP_OUTCOMES, statistics.lookups)
        text = "Time from sending a prefill request to its response."
        yield _histogram("prefill_seconds", text, statistics.prefill)
        text = "Time from a request's arrival to the first byte of its response."
        yield _histogram("first_byte_seconds", text, statistics.first_byte)
        yield from self._engine_metrics()

    def _engine_metrics(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("kvtier_proxy_engine_up", "1 while the engine is up.", labels=ENGINE_LABELS)
        load = GaugeMetricFamily(
            "kvtier_proxy_engine_requests_in_flight",
            "Requests in flight at the engine.",
            labels=ENGINE_LABELS,
        )
        served = CounterMetricFamily(
            "kvtier_proxy_engine_responses", "Responses that the engine started.", labels=ENGINE_LABELS
        )
        failed = CounterMetricFamily(
            "kvtier_proxy_engine_failures", "Requests that failed at the engine.", labels=ENGINE_LABELS
        )
        for engine in self._proxy.fleet:
            labels = [engine.role, engine.url]
            up.add_metric(labels, engine.state == State.UP)
            load.add_metric(labels, engine.load)
            served.add_metric(labels, engine.served)
            failed.add_metric(labels, engine.failed)
        yield from (up, load, served, failed)


def _counter(
    name: str, text: str, label: str, values: Iterable[str], counts: Counter[str]
) -> CounterMetricFamily:
    """Return a counter with all label values, even at 0: a late series hides its first increase."""
    family = CounterMetricFamily(f"kvtier_proxy_{name}", text, labels=[label])
    for value in values:
        family.add_metric([value], counts[value])
    return family


def _histogram(name: str, text: str, durations: Durations) -> HistogramMetricFamily:
    bounds = [*map(floatToGoString, BOUNDS), "+Inf"]
    buckets = list(zip(bounds, accumulate(map(float, durations.buckets)), strict=True))
    return HistogramMetricFamily(f"kvtier_proxy_{name}", text, buckets=buckets, sum_value=durations.seconds)
