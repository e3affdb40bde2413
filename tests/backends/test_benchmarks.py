"""The benchmarks run, in small, so that they cannot rot."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import disk, memory, pools
from kvtier.testing.servers import RedisServer


@pytest.mark.parametrize("buffered", [[], ["--buffered"]])
def test_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], buffered: list[str]) -> None:
    disk.main(["--small", "--runs", "1", "--folder", str(tmp_path), *buffered])
    shown = capsys.readouterr().out
    for row in ("write 4 x 1 MiB", "cold read 4 x 1 MiB"):
        assert shown.count(f" {row}") == 2, "one for each depth"
    assert list(tmp_path.iterdir()) == []


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    memory.main(["--small", "--runs", "1"])
    shown = capsys.readouterr().out
    for row in ("cpu put 32 x 256 KiB", "cpu get 8 x 1024 KiB", "hugepage adopt 32 x 256 KiB"):
        assert row in shown


@pytest.mark.skipif(RedisServer.missing() is not None, reason=str(RedisServer.missing()))
def test_pools(capsys: pytest.CaptureFixture[str]) -> None:
    pools.main(["--quick", "--pool", "redis"])
    shown = capsys.readouterr().out
    for row in ("put 1 x 1 MiB", "get 4 x 1 MiB", "contains"):
        assert row in shown
