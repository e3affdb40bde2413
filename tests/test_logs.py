"""Rate-limited warnings: one message per interval, and a count of the suppressed ones."""

from __future__ import annotations

import logging

import pytest

from kvtier.logs import MAX_CHANGES, MAX_REMEMBERED, ChangedWarnings, Finding, Findings, RateLimitedLog
from tests.rigs.clock import Clock


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


def test_changed_warnings_have_one_limit_for_all_peers(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    warnings = ChangedWarnings("%s: %s", clock=lambda: now)
    with caplog.at_level(logging.WARNING, "kvtier"):
        for number in range(1000):
            warnings.note(f"10.0.{number // 256}.{number % 256}", "no answer")
        warnings.note("b", "an error that lasts")
        assert len(caplog.records) == MAX_CHANGES
        now = 60
        for _ in range(3):
            warnings.note("b", "an error that lasts")
    assert [record.getMessage() for record in caplog.records][MAX_CHANGES:] == [
        f"b: an error that lasts (and {1001 - MAX_CHANGES} more since the last such message)"
    ]


def test_finding_is_logged_once_an_hour_and_the_latest_one_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    findings = Findings(logging.getLogger("kvtier"), clock=clock)
    for minute in range(130):
        clock.now = 60.0 * minute
        findings.note("slow ssd", f"slow at minute {minute}", "use a faster one")
    findings.note("long", "too long", "more memory")
    assert [record.getMessage() for record in caplog.records] == [
        "slow at minute 0: use a faster one",
        "slow at minute 60: use a faster one",
        "slow at minute 120: use a faster one",
        "too long: more memory",
    ]
    assert findings.latest() == [
        Finding("slow at minute 129", "use a faster one"),
        Finding("too long", "more memory"),
    ]
    clock.now += 7200
    assert findings.latest() == []


def test_few_kinds_of_findings_are_remembered() -> None:
    findings = Findings(logging.getLogger("kvtier.quiet"))
    for number in range(MAX_REMEMBERED + 10):
        findings.note(f"engine {number}", "found", "remedy")
    assert len(findings.latest()) == MAX_REMEMBERED
