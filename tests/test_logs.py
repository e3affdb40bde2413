"""Rate-limited warnings: one message per interval, and a count of the suppressed ones."""

from __future__ import annotations

import logging

import pytest

from kvtier.logs import RateLimitedLog


def test_logs_one_warning_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    warn = RateLimitedLog(logging.getLogger("kvtier"), interval=60, clock=lambda: now)
    with caplog.at_level(logging.WARNING, "kvtier"):
        for second in (0, 1, 59.9, 60, 119, 500):
            now = second
            warn("at %g", second)
    assert [record.getMessage() for record in caplog.records] == [
        "at 0",
        "at 60 (and 2 more since the last such message)",
        "at 500 (and 1 more since the last such message)",
    ]
