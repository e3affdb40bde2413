"""The bridge's benchmark runs, in small, so that it cannot rot."""

from __future__ import annotations

from tests.benchmark import run_benchmark


def test_look_up() -> None:
    shown = run_benchmark("look_up", "--runs", "2", "--tokens", "2048")
    for row in ("look-up: hashing and the socket", "limit: a bare round trip", "confirm all chunks"):
        assert row in shown
