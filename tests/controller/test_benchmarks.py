"""The controller's benchmark runs, in small, so that it cannot rot."""

from __future__ import annotations

from tests.benchmark import run_benchmark


def test_controller() -> None:
    shown = run_benchmark("controller", "--quick")
    for row in ("look-ups/s, keys known", "POST /lookup", "updated keys/s, sent to it", "bytes a key"):
        assert row in shown
