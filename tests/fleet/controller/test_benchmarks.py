"""The controller's benchmarks run at a small size."""

from __future__ import annotations

from tests.rigs.benchmark import run_benchmark


def test_controller() -> None:
    shown = run_benchmark("controller", "--quick")
    for row in ("lookups/s, known keys", "POST /lookup", "from another process", "bytes per key"):
        assert row in shown


def test_controller_instances() -> None:
    shown = run_benchmark("controller_instances", "--quick")
    for row in ("all connected", "GET /instances", "all back after"):
        assert row in shown
