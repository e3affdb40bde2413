"""Small runs of the benchmarks, so that they stay usable."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.benchmark import run_benchmark
from tests.rigs.servers import RedisServer


@pytest.mark.parametrize("buffered", [[], ["--buffered"]])
def test_disk(tmp_path: Path, buffered: list[str]) -> None:
    output = run_benchmark("disk", "--small", "--runs", "1", "--folder", str(tmp_path), *buffered)
    for row in ("write 4 x 1MiB", "cold read 4 x 1MiB"):
        assert output.count(f" {row}") == 4, "one row for each depth, in both tables"
    assert list(tmp_path.iterdir()) == []


def test_memory() -> None:
    output = run_benchmark("memory", "--small", "--runs", "1")
    for row in ("cpu put 32 x 256 KiB", "cpu get 8 x 1024 KiB", "hugepage adopt 32 x 256 KiB"):
        assert row in output


@pytest.mark.skipif(RedisServer.missing() is not None, reason=str(RedisServer.missing()))
def test_pools() -> None:
    output = run_benchmark("pools", "--quick", "--pool", "redis")
    for row in ("put 1 x 1 MiB", "get 4 x 1 MiB", "contains"):
        assert row in output
