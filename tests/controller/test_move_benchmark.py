"""The benchmark of moves runs, in small, so that it cannot rot."""

from __future__ import annotations

from tests.benchmark import run_benchmark


def test_move() -> None:
    assert "4 x 1,024 KiB" in run_benchmark("move", "--transport", "tcp", "--quick")
