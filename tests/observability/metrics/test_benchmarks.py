"""A small run of the metrics benchmark, so that it stays usable."""

from __future__ import annotations

from tests.rigs.benchmark import run_benchmark


def test_metrics() -> None:
    output = run_benchmark("metrics", "--runs", "5", "--chunks", "2000")
    for row in ("count a batch of 128 chunks", "scrape, 2,000 chunks held", "of which reading the values"):
        assert row in output
