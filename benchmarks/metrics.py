"""Measure the cost of metrics: reporting a batch on the data path, and a scrape in the event loop.

::

    python -m benchmarks.metrics
    python -m benchmarks.metrics --chunks 10000

A batch consists of the chunks of one transfer between two tiers. For comparison, the cost of creating the
report is measured, which is shared by all observers. Scrapes are served over HTTP in the event loop of a real
cache; the time includes the client, which is in the same process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import httpx

from benchmarks.common import parse, show
from kvtier import Settings, TieredCache
from kvtier.backends.base import Outcome
from kvtier.catalog.catalog import State
from kvtier.events import Prefetch, Report
from kvtier.http import serving
from kvtier.observability.metrics import CacheMetrics, application
from kvtier.testing.backend import make_key
from kvtier.tiers.planner import FIRST, Transfer

CHUNK_BYTES = 4096
FEW_CHUNKS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of metrics.")
    parser.add_argument(
        "--chunks", type=int, default=1_000_000, help="held during scrapes; default: %(default)s"
    )
    parser.add_argument("--runs", type=int, default=200, help="default: %(default)s")
    options = parse(parser, runs=5, chunks=2000)
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(measure, Path(folder), options.chunks, options.runs)


async def measure(folder: Path, chunks: int, runs: int) -> None:
    disk = {"name": "ssd", "type": "disk", "path": str(folder), "capacity": f"{chunks * CHUNK_BYTES}B"}
    settings = Settings(tiers=[{"name": "ram", "type": "cpu", "capacity": "16MiB"}, disk])
    async with TieredCache.open(settings) as cache:
        with CacheMetrics.of(cache) as metrics:
            rows = [row for size in (1, 16, 128) for row in batches(cache, metrics, size, runs)]
            show("batch, µs", ("call", "median", "p99"), rows)
            rows = [(f"scrape, {FEW_CHUNKS:,} chunks held", *await scrapes(cache, metrics, FEW_CHUNKS, runs))]
            rows.append((f"scrape, {chunks:,} chunks held", *await scrapes(cache, metrics, chunks, runs)))
            generate = timed(lambda: list(metrics.registry.collect()), runs)
            median, slow = generate
            rows.append(("  of which reading the values", median / 1000, slow / 1000))
            show("scrape, ms", ("call", "median", "p99"), rows)


def batches(
    cache: TieredCache, metrics: CacheMetrics, size: int, runs: int
) -> list[tuple[str, float, float]]:
    keys = [make_key(number) for number in range(size)]
    event = Prefetch(keys=keys)
    cache.remove_observer(metrics.transfers)
    report = Report(event, "ssd", "ram", keys, [Outcome.OK] * size, size * CHUNK_BYTES, 0.004)

    def make_report() -> None:
        with cache._hierarchy.reporting(event, Transfer(1, FIRST, keys)) as outcomes:
            outcomes += [Outcome.OK] * size

    rows = [
        (f"count a batch of {size} chunks", *timed(lambda: metrics.transfers.observe(report), runs)),
        ("  for comparison: report the batch", *timed(make_report, runs)),
    ]
    cache.add_observer(metrics.transfers)
    return rows


def timed(call: Callable[[], object], runs: int, repeats: int = 50) -> tuple[float, float]:
    """Return the median and the 99th percentile of the microseconds per call."""
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        seconds.append((time.perf_counter() - started) / repeats * 1e6)
    return statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]


async def scrapes(cache: TieredCache, metrics: CacheMetrics, chunks: int, runs: int) -> tuple[float, float]:
    catalog = cache.catalog
    for number in range(catalog.count(1), chunks):
        catalog.add(make_key(number), 1, CHUNK_BYTES, State.READY)
    seconds = []
    async with serving(application(metrics), "127.0.0.1:0") as (host, port), httpx.AsyncClient() as client:
        for _ in range(runs):
            started = time.perf_counter()
            answer = await client.get(f"http://{host}:{port}/metrics")
            seconds.append((time.perf_counter() - started) * 1e3)
            assert answer.status_code == 200
    return statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]


if __name__ == "__main__":
    main()
