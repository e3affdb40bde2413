"""What other settings would bring is reported to the controller, and again whenever it has changed."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from kvtier.fleet.member import session
from kvtier.fleet.member.protocol import WhatIf
from kvtier.instance import Instance
from kvtier.observability.whatif.report import Report
from tests.fleet.member.conftest import OpenNode
from tests.fleet.member.controlling import controlling
from tests.rigs.waiting import until
from tests.rigs.whatif_reports import REPORT

pytestmark = pytest.mark.anyio


async def test_report_is_sent_when_there_is_one_and_when_it_changes(
    open_node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[Report | None] = [None]
    monkeypatch.setattr(Instance, "what_if", lambda _: known[-1])
    monkeypatch.setattr(session, "WHAT_IF_SECONDS", 0.01)
    async with controlling() as controller, open_node(controller):
        conversation = await controller.up_to_date()
        later = replace(REPORT, sampled=REPORT.sampled + 1)
        for report in (REPORT, later):
            seen = len(conversation.heartbeats)
            known.append(report)
            await until(lambda report=report: conversation.what_ifs[-1:] == [WhatIf(report)])
            await until(lambda seen=seen: len(conversation.heartbeats) > seen + 2)
        assert conversation.what_ifs == [WhatIf(REPORT), WhatIf(later)]


async def test_changes_are_reported_at_an_interval(
    open_node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count(1)
    monkeypatch.setattr(Instance, "what_if", lambda _: replace(REPORT, sampled=next(calls)))
    monkeypatch.setattr(session, "WHAT_IF_SECONDS", 600.0)
    async with controlling() as controller, open_node(controller):
        conversation = await controller.up_to_date()
        await until(lambda: len(conversation.heartbeats) > 5)
        assert [message.report.sampled for message in conversation.what_ifs] == [1]


async def test_new_connection_gets_the_report_again(
    open_node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Instance, "what_if", lambda _: REPORT)
    async with controlling() as controller, open_node(controller):
        first = await controller.up_to_date()
        await until(lambda: first.what_ifs)
        await controller.kill()
        await controller.start()
        second = await controller.up_to_date(1)
        await until(lambda: second.what_ifs)
        assert first.what_ifs == second.what_ifs == [WhatIf(REPORT)]


async def test_reason_of_a_stopped_estimate_is_printable_and_short(
    open_node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Instance, "what_if", lambda _: replace(REPORT, stopped="ValueError: \n" * 100))
    async with controlling() as controller, open_node(controller):
        conversation = await controller.up_to_date()
        await until(lambda: conversation.what_ifs)
    (message,) = conversation.what_ifs
    assert message.report.stopped.startswith("ValueError: ?ValueError")
    assert len(message.report.stopped) == 256
