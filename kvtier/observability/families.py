"""Families of Prometheus metrics, made at each scrape from the counters that a process keeps anyway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

Samples = Iterable[tuple[Sequence[str], float]]
"""Values of a metric, each with the values of its labels."""


def gauge(name: str, text: str, samples: Samples | float, *labels: str) -> Metric:
    """Return the gauge ``kvtier_NAME`` with one value, or the values by their labels."""
    return _filled(GaugeMetricFamily(f"kvtier_{name}", text, labels=labels), samples)


def counter(name: str, text: str, samples: Samples | float, *labels: str) -> Metric:
    """Return the counter ``kvtier_NAME_total`` with one value, or the values by their labels."""
    return _filled(CounterMetricFamily(f"kvtier_{name}", text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples | float) -> Metric:
    for values, number in [((), samples)] if isinstance(samples, int | float) else samples:
        family.add_metric(values, number)
    return family


def histogram(
    name: str,
    text: str,
    bounds: Sequence[float],
    samples: Iterable[tuple[Sequence[str], Sequence[int], float]],
    *labels: str,
) -> Metric:
    """Return the histogram ``kvtier_NAME``. A sample: label values, the count of each bucket, and the sum."""
    family = HistogramMetricFamily(f"kvtier_{name}", text, labels=labels)
    names = [*map(floatToGoString, bounds), "+Inf"]
    for values, counts, total in samples:
        family.add_metric(values, list(zip(names, accumulate(counts), strict=True)), total)
    return family
