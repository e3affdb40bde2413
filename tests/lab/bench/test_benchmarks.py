"""The benchmarks run at a small size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.peer import VERSION
from tests.rigs.benchmark import run_benchmark

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
PEER = CACHE / "kvtier" / f"lmcache-{VERSION}" / "installed"


@pytest.mark.slow
def test_growth(tmp_path: Path) -> None:
    shown = run_benchmark("growth", "--quick", "--folder", str(tmp_path))
    for row in ("memory: put a chunk", "disk: index", "replace the coldest", "lookup of 32,768 tokens"):
        assert row in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not PEER.exists(), reason="python -m benchmarks.compare installs LMCache")
def test_compare(tmp_path: Path) -> None:
    rows = ("--rows", "cpu", "disk", "direct", "tokens")
    small = ("--pairs", "1", "--chunks", "2", "--size", "1", "--layers", "1", "--tokens", "1024")
    shown = run_benchmark("compare", *rows, *small, "--folder", str(tmp_path))
    for row in ("cpu", "disk buffered, plain", "disk O_DIRECT, sealed", "1,024 tokens, 1 layers"):
        assert row in shown
    assert list(tmp_path.iterdir()) == []
