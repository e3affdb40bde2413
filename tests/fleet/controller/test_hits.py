"""The hit rate of an instance, which is the same wherever it is shown."""

from __future__ import annotations

import pytest

from kvtier.fleet.controller.member import STEP_SECONDS, WINDOW_SECONDS, HitWindow
from kvtier.fleet.member.protocol import Heartbeat
from tests.fleet.controller.controlling import RunningController
from tests.fleet.controller.registering import heartbeat


def counters(looked_up: int, found: int) -> Heartbeat:
    return heartbeat(looked_up=looked_up, found=found)


def test_window() -> None:
    window = HitWindow()
    assert window.hits().rate is None
    window.add(counters(1000, 300), 0.0)
    assert window.hits().rate is None, "what the process counted before is older"
    window.add(counters(1030, 301), 100.0)
    assert (window.hits().looked_up, window.hits().rate) == (30, 3 / 30)
    window.add(counters(1130, 331), 250.0)
    assert (window.hits().looked_up, window.hits().rate) == (130, 93 / 130)
    window.add(counters(1130, 331), 100.0 + WINDOW_SECONDS)
    assert (window.hits().looked_up, window.hits().rate) == (100, 90 / 100)
    window.add(counters(1130, 331), 250.0 + WINDOW_SECONDS)
    assert window.hits().rate is None, "no lookup in the last five minutes"


def test_number_of_reports_is_bounded() -> None:
    window = HitWindow()
    for number in range(100_000):
        window.add(counters(number, 0), number / 100)
    assert len(window._reports) <= 1.1 * WINDOW_SECONDS / STEP_SECONDS
    assert window.hits().looked_up == pytest.approx(100 * WINDOW_SECONDS, abs=200)


@pytest.mark.anyio
async def test_restarted_instance_has_no_hit_rate_of_its_former_process(
    controller: RunningController,
) -> None:
    async with controller.instance("a") as one:
        await one.send(heartbeat(looked_up=100, found=30))
        await controller.wait_until(lambda: controller.registry.find("a").hit_window.hits().looked_up)
        described = await controller.get("/instances/a")
        assert (described["hit_rate"], described["looked_up_tokens"]) == (0.9, 100)
        assert [tier["hit_rate"] for tier in described["tiers"]] == [0.3, 0.3, 0.3], "its part in each tier"
    await controller.wait_until(lambda: not controller.registry.members)
    async with controller.instance("a") as one:
        described = await controller.get("/instances/a")
        assert (described["hit_rate"], described["looked_up_tokens"]) == (None, 0)
        assert [tier["hit_rate"] for tier in described["tiers"]] == [None] * 3
