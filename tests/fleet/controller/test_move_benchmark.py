"""The benchmark of moves runs at a small size."""

from __future__ import annotations

from tests.rigs.benchmark import run_benchmark


def test_move() -> None:
    assert "4 x 1,024 KiB" in run_benchmark("move", "--transport", "tcp", "--quick")
