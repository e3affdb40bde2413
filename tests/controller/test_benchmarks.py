"""The controller's benchmark runs at a small size."""

from __future__ import annotations

from tests.benchmark import run_benchmark


def test_controller() -> None:
    shown = run_benchmark("controller", "--quick")
    for row in ("lookups/s, known keys", "POST /lookup", "from another process", "bytes per key"):
        assert row in shown
