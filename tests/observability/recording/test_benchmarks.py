"""A small run of the benchmark, so that it stays usable."""

from __future__ import annotations

from tests.rigs.benchmark import run_benchmark


def test_recording() -> None:
    output = run_benchmark("recording", "--seconds", "1", "--turns", "1")
    for row in ("in the event loop", "in the thread", "% of a core", "MB an hour", "reading"):
        assert row in output
