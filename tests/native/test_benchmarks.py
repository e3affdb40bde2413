"""A small run of the copy benchmark, so that it stays usable."""

from __future__ import annotations

from tests.rigs.benchmark import run_benchmark


def test_copies() -> None:
    output = run_benchmark("copies", "--small", "--runs", "1")
    assert "Llama 3.1 8B, bf16, save" in output
    assert "memcpy GB/s" in output
