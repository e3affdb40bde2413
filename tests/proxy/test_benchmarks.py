"""The benchmark of the proxy runs at a small size."""

from __future__ import annotations

from tests.benchmark import run_benchmark


def test_proxy() -> None:
    shown = run_benchmark("proxy", "--quick")
    for row in (
        "prefilled by another engine",
        "time per token of a stream",
        "delay of a token",
        "concurrent streams",
    ):
        assert row in shown
