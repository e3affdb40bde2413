"""Run the benchmark of transports in quick mode, to keep it working."""

from __future__ import annotations

import pytest

from tests.rigs.benchmark import run_benchmark


@pytest.mark.parametrize("transport", ["tcp", pytest.param("nixl", marks=pytest.mark.slow)])
def test_transports(transport: str) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu13")
    output = run_benchmark("transports", "--transport", transport, "--quick")
    for row in ("read 4 in flight", "write 1 in flight", "CPU seconds per GB", "p99"):
        assert row in output
