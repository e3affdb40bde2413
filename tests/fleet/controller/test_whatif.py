"""What other settings would bring to an instance: as it reports it, and as the HTTP API returns it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from kvtier.fleet.controller.answers import WhatIfAnswer
from kvtier.fleet.controller.checks import MAX_CHANGES, MAX_POINTS
from kvtier.fleet.controller.connection import MAX_SMALL_BYTES
from kvtier.fleet.member.protocol import TierDescription, WhatIf
from kvtier.observability.whatif.report import Change, Point, Report
from kvtier.observability.whatif.sentences import NOTHING_REPORTED, basis, findings
from kvtier.rpc.frames import encode_body
from tests.rigs.running_controller import RunningController
from tests.rigs.whatif_reports import (
    GIB,
    RAM,
    REPORT,
    SSD,
)

pytestmark = pytest.mark.anyio


async def test_report_is_returned_with_its_sentences(controller: RunningController) -> None:
    async with controller.instance("a") as one:
        empty = await controller.get("/instances/a/whatif")
        assert empty == {"what_if_at": None, "basis": [NOTHING_REPORTED], "findings": [], "report": None}
        assert (await controller.get("/instances/a"))["what_if_at"] is None
        began = time.time()
        for report in (replace(REPORT, sampled=1), REPORT):
            await one.send(WhatIf(report))
        await controller.wait_until(lambda: controller.registry.find("a").what_if == REPORT)
        described = await controller.get("/instances/a/whatif")
        assert began <= described["what_if_at"] <= time.time()
        assert (await controller.get("/instances"))["instances"][0]["what_if_at"] == described["what_if_at"]
        assert (described["basis"], described["findings"]) == (basis(REPORT), findings(REPORT))
        assert described["report"]["tiers"][0]["points"][1] == {
            "capacity_bytes": 50 * GIB,
            "hit_rate": 0.45,
            "fast_hit_rate": 0.25,
        }
        assert described["report"]["changes"][1] == {
            "tier": "ram",
            "capacity_bytes": None,
            "policy": "arc",
            "hit_rate": 0.63,
            "gained": 0.03,
            "gpu_seconds_a_day": 797.0,
            "codec": None,
        }
        assert WhatIfAnswer.model_validate(described).report == REPORT
    assert (await controller.client.get("/instances/z/whatif")).status_code == 404


def with_ram(**fields: Any) -> Report:
    return replace(REPORT, tiers=[replace(RAM, **fields), SSD])


def with_change(**fields: Any) -> Report:
    return replace(REPORT, changes=[replace(REPORT.changes[0], **fields)])


POINT = Point(GIB, 0.5)
INVALID = {
    "other tier": (with_ram(tier="tape"), "not about its own tiers"),
    "tier twice": (replace(REPORT, tiers=[RAM, RAM]), "not about its own tiers"),
    "change of another tier": (with_change(tier="tape"), "not about its own tiers"),
    "too many points": (with_ram(points=[POINT] * (MAX_POINTS + 1)), "65 capacities"),
    "too many changes": (replace(REPORT, changes=[REPORT.changes[0]] * (MAX_CHANGES + 1)), "513 changes"),
    "policy of a tier": (with_ram(policy="<b>\n"), "not printable"),
    "policy of a change": (with_change(policy="p" * 300), "longer than 256"),
    "codec of a change": (with_change(codec="<b>\n"), "not printable"),
    "capacity": (with_ram(capacity_bytes=-1), "`int` >= 0 - at `$[1].tiers[0].capacity_bytes`"),
    "useful": (with_ram(useful_bytes=-2), "tiers[0].useful_bytes"),
    "point": (with_ram(points=[Point(-3, 0.5)]), "tiers[0].points[0].capacity_bytes"),
    "new capacity": (with_change(capacity_bytes=-4), "changes[0].capacity_bytes"),
    "chunks": (replace(REPORT, chunks=1 << 63), ".chunks"),
    "sampled": (replace(REPORT, sampled=-5), ".sampled"),
    "dropped": (replace(REPORT, dropped=-6), ".dropped"),
    "hit rate of a tier": (with_ram(hit_rate=1.5), "`float` <= 1.0 - at `$[1].tiers[0].hit_rate`"),
    "hit rate of a point": (with_ram(points=[Point(GIB, math.nan)]), "points[0].hit_rate"),
    "fast hits": (with_ram(points=[Point(GIB, 0.5, -0.25)]), "points[0].fast_hit_rate"),
    "stopped": (replace(REPORT, stopped="why" * 100), "longer than 256"),
    "hit rate of a change": (with_change(hit_rate=-0.5), "changes[0].hit_rate"),
    "measured": (replace(REPORT, measured_hit_rate=math.inf), ".measured_hit_rate"),
    "sampling": (replace(REPORT, sampling=2.0), ".sampling"),
    "gained": (with_change(gained=-2.0), "`float` >= -1.0"),
    "seconds": (replace(REPORT, seconds=-1.0), ".seconds"),
    "cpu share": (replace(REPORT, cpu_share=math.nan), ".cpu_share"),
    "prefill": (replace(REPORT, prefill_tokens_per_second=-7.0), ".prefill_tokens_per_second"),
    "gpu seconds": (with_change(gpu_seconds_a_day=-math.inf), "changes[0].gpu_seconds_a_day"),
}


@pytest.mark.parametrize("name", INVALID)
async def test_invalid_report_ends_only_that_connection(running: RunningController, name: str) -> None:
    report, reason = INVALID[name]
    async with running.connect("well"), running.connect("bad") as bad:
        await bad.send(WhatIf(report))
        assert reason in await bad.refusal()
        assert list(running.registry.members) == ["well"]


async def test_largest_report_fits_in_a_message(running: RunningController) -> None:
    names = [f"tier-{n}" for n in range(16)]
    points = [Point((1 << 60) + n, 1 / (n + 3), 1 / 7) for n in range(MAX_POINTS)]
    changes = [
        Change(name, 1 << 61, None, 1 / 3, 1 / 3, 1 / 3) for name in names for _ in range(MAX_CHANGES // 16)
    ]
    curves = [replace(RAM, tier=name, points=points) for name in names]
    report = replace(REPORT, tiers=curves, changes=changes)
    assert len(encode_body(WhatIf(report))) < MAX_SMALL_BYTES
    async with running.connect(
        "one", tiers=[TierDescription(name, "cpu", 1 << 30, False) for name in names]
    ) as one:
        await one.send(WhatIf(report))
        await running.wait_until(lambda: running.member().what_if == report)
