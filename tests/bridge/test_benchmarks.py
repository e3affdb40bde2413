"""The bridge's benchmark runs, in small, so that it cannot rot."""

from __future__ import annotations

import pytest

from benchmarks import look_up


def test_look_up(capsys: pytest.CaptureFixture[str]) -> None:
    look_up.main(["--runs", "2", "--tokens", "2048"])
    shown = capsys.readouterr().out
    for row in ("look-up: hashing and the socket", "limit: a bare round trip", "confirm all chunks"):
        assert row in shown
