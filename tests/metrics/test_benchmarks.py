"""The benchmark of metrics runs, in small, so that it cannot rot."""

from __future__ import annotations

from tests.benchmark import run_benchmark


def test_metrics() -> None:
    shown = run_benchmark("metrics", "--runs", "5", "--chunks", "2000")
    for row in ("count a batch of 128 chunks", "scrape, 2,000 chunks held", "of that reading the values"):
        assert row in shown
