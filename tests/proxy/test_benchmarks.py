"""The benchmark of the proxy runs, in small, so that it cannot rot."""

from __future__ import annotations

from tests.benchmark import run_benchmark


def test_proxy() -> None:
    shown = run_benchmark("proxy", "--quick")
    for row in (
        "prefilled at another engine",
        "a token of a stream",
        "a token's way",
        "many streams at once",
    ):
        assert row in shown
