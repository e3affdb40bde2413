"""The transports' benchmark runs, in small, so that it cannot rot."""

from __future__ import annotations

import pytest

from tests.benchmark import run_benchmark


@pytest.mark.parametrize("transport", ["tcp", pytest.param("nixl", marks=pytest.mark.slow)])
def test_transports(transport: str) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu13")
    shown = run_benchmark("transports", "--transport", transport, "--quick")
    for row in ("read 4 in flight", "write 1 in flight", "processor seconds a GB", "99 %"):
        assert row in shown
