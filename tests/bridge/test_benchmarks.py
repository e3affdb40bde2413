"""The bridge's benchmarks run, in small, so that they cannot rot."""

from __future__ import annotations

import pytest

from tests.benchmark import run_benchmark


def test_look_up() -> None:
    shown = run_benchmark("look_up", "--runs", "2", "--tokens", "2048")
    for row in ("look-up: hashing and the socket", "limit: a bare round trip", "confirm all chunks"):
        assert row in shown


@pytest.mark.vllm
def test_steps() -> None:
    shown = run_benchmark("steps", "--small")
    for row in ("stopped: first step", "killed: first step", "until it stores again", "nice 19, beside them"):
        assert row in shown
