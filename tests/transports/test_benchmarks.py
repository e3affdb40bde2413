"""The transports' benchmark runs, in small, so that it cannot rot."""

from __future__ import annotations

import pytest

from benchmarks import transports


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_transports(transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu13")
    transports.main(["--transport", transport, "--quick"])
    shown = capsys.readouterr().out
    for row in ("read 4 in flight", "write 1 in flight", "processor seconds a GB", "99 %"):
        assert row in shown
