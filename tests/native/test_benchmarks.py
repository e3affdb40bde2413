"""The benchmark of copies in small: it must not rot."""

from __future__ import annotations

from tests.benchmark import run_benchmark


def test_copies() -> None:
    told = run_benchmark("copies", "--small", "--runs", "1")
    assert "Llama 3.1 8B, bf16, save" in told
    assert "memcpy GB/s" in told
