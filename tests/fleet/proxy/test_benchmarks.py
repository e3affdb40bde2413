"""The benchmarks of the proxy run at a small size."""

from __future__ import annotations

from tests.rigs.benchmark import run_benchmark


def test_proxy() -> None:
    shown = run_benchmark("proxy", "--quick")
    for row in (
        "prefilled by another engine",
        "time per token of a stream",
        "delay of a token",
        "concurrent streams",
    ):
        assert row in shown


def test_proxy_streams() -> None:
    shown = run_benchmark("proxy_streams", "--quick")
    assert shown.count("40 right") == 2
    assert "20 dropped, 20 right" in shown
