"""What Prometheus is told of the proxy. ``docs/proxy.md`` lists all of it."""

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

import kvtier
from kvtier.proxy.engine import Role, State
from kvtier.proxy.statistics import BOUNDS, Durations

if TYPE_CHECKING:
    from kvtier.proxy.proxy import Proxy

OUTCOMES = ("ok", "error", "refused", "interrupted", "cancelled")
PREFILLS = ("handed_over", "kept", "refused", "failed")
REASONS = ("short", "cached", "no_prefiller", "no_peer", "unsuitable")
LOOK_UPS = ("answered", "refused", "failed")
ENGINE = ("role", "engine")


class ProxyMetrics(Collector):
    """Reads everything when it is asked: nothing is counted twice, and nothing in between."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def answer(self) -> Response:
        """All of it, in Prometheus' text format."""
        return Response(generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def describe(self) -> Iterable[Metric]:
        """Nothing that must be asked for when it is registered."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """What it is now."""
        statistics, admission = self._proxy.statistics, self._proxy.admission
        info = GaugeMetricFamily("kvtier_proxy_info", "The proxy's version.", labels=["version"])
        info.add_metric([kvtier.__version__], 1)
        yield info
        for name, text, value in (
            ("requests_under_way", "Requests that have not ended.", admission.under_way),
            ("held_bytes", "Bodies of requests that are under way.", admission.held_bytes),
            ("draining", "1 while no more requests are let in.", admission.draining),
        ):
            yield GaugeMetricFamily(f"kvtier_proxy_{name}", text, value)
        yield _counter("requests", "Requests that have ended.", "outcome", OUTCOMES, statistics.requests)
        yield _counter(
            "prefills", "Requests that a prefiller was sent.", "outcome", PREFILLS, statistics.prefills
        )
        text = "Requests that no prefiller was sent."
        yield _counter("skipped_prefills", text, "reason", REASONS, statistics.skipped)
        text = "Requests that went to one more engine, as one had failed."
        yield _counter("retries", text, "role", tuple(Role), statistics.retries)
        yield CounterMetricFamily(
            "kvtier_proxy_handed_over_tokens",
            "Tokens that prefillers have pushed, as they say.",
            statistics.handed_over_tokens,
        )
        yield _counter("lookups", "Questions to the controller.", "outcome", LOOK_UPS, statistics.look_ups)
        text = "From sending a prefiller a request until it has answered."
        yield _histogram("prefill_seconds", text, statistics.prefill)
        text = "From a request's arrival until its answer begins."
        yield _histogram("first_byte_seconds", text, statistics.first_byte)
        yield from self._of_engines()

    def _of_engines(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("kvtier_proxy_engine_up", "1 while an engine answers.", labels=ENGINE)
        load = GaugeMetricFamily(
            "kvtier_proxy_engine_requests_under_way", "Requests of an engine.", labels=ENGINE
        )
        served = CounterMetricFamily(
            "kvtier_proxy_engine_answers", "Answers that an engine has begun.", labels=ENGINE
        )
        failed = CounterMetricFamily(
            "kvtier_proxy_engine_failures", "Requests that an engine has failed.", labels=ENGINE
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
    """Shown as 0 from the start: a counter that appears late hides its first increase."""
    family = CounterMetricFamily(f"kvtier_proxy_{name}", text, labels=[label])
    for value in values:
        family.add_metric([value], counts[value])
    return family


def _histogram(name: str, text: str, durations: Durations) -> HistogramMetricFamily:
    bounds = [*map(floatToGoString, BOUNDS), "+Inf"]
    buckets = list(zip(bounds, accumulate(map(float, durations.buckets)), strict=True))
    return HistogramMetricFamily(f"kvtier_proxy_{name}", text, buckets=buckets, sum_value=durations.seconds)
