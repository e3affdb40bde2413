"""A request is logged and counted once, with a reason for each token that was computed."""

from __future__ import annotations

import pytest

from kvtier.bridge.protocol import Explanation, Outcome
from kvtier.catalog.misses import Miss, MissReason
from kvtier.integrations.vllm import request_reports
from kvtier.integrations.vllm.metrics import TransferStats
from kvtier.integrations.vllm.request_reports import RequestReports

OUTCOME = Outcome(1, "cmpl-1", 100, 20, {"ram": 30})
EXPLANATION = Explanation(1, 40, [Miss(MissReason.EVICTED, 44, "ram")])


@pytest.fixture(autouse=True)
def shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm.kvtier")


@pytest.mark.parametrize("explained_first", [True, False])
def test_explanation_may_come_before_or_after_the_outcome(
    caplog: pytest.LogCaptureFixture, *, explained_first: bool
) -> None:
    reports = RequestReports(TransferStats())
    if explained_first:
        reports.explain(EXPLANATION)
    reports.add(OUTCOME)
    if not explained_first:
        assert not caplog.messages
        reports.explain(EXPLANATION)
    assert caplog.messages == [
        "request cmpl-1: 30 of 100 tokens hit (ram 30), 20 more in vLLM's own cache; "
        "missed: 34 evicted (from ram), 16 shorter_than_a_block"
    ]


def test_request_whose_explanation_is_lost_was_not_looked_up(caplog: pytest.LogCaptureFixture) -> None:
    """The cache process has ended before it could explain."""
    reports = RequestReports(TransferStats())
    reports.add(OUTCOME)
    reports.lost()
    assert caplog.messages[0].endswith("missed: 50 not_looked_up")
    reports.explain(EXPLANATION)
    assert len(caplog.messages) == 1


def test_what_is_never_explained_is_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_reports, "MAX_AWAITED", 3)
    reports = RequestReports(TransferStats())
    for ticket in range(1, 9):
        reports.add(Outcome(ticket, f"cmpl-{ticket}", 10, 0))
    assert [message.split(":")[0] for message in caplog.messages] == [
        f"request cmpl-{n}" for n in range(1, 6)
    ]
