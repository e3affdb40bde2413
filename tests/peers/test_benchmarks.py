"""The peers' benchmark runs, in small, so that it cannot rot."""

from __future__ import annotations

import pytest

from benchmarks import peers


def test_peers(capsys: pytest.CaptureFixture[str]) -> None:
    peers.main(["--transport", "tcp", "--quick"])
    shown = capsys.readouterr().out
    for row in ("PeersBackend.held_prefix, 2 peers", "look-up and answered, 1 peer", "4 x 2 MiB, 2 peers"):
        assert row in shown
