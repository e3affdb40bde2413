"""What other settings would bring to an instance, on the controller's page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from kvtier.fleet.member.protocol import WhatIf
from kvtier.observability.whatif.sentences import basis, findings
from tests.fleet.controller.browser import scripted, visiting
from tests.fleet.controller.scripted_api import instance, what_if
from tests.fleet.controller.test_page import registered
from tests.rigs.running_controller import running_controller
from tests.rigs.waiting import until
from tests.rigs.whatif_reports import REPORT

pytestmark = pytest.mark.anyio


async def test_findings_and_curves_of_a_real_controller(browser: Browser, tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as controller,
        registered(controller) as one,
        visiting(browser, controller.url) as page,
    ):
        section = page.card("decode-1").locator("details")
        await expect(page.card("decode-1")).to_contain_text("up to date")
        await expect(section).to_be_hidden()
        await one.send(WhatIf(REPORT))
        await section.get_by_text("What if").click()
        await expect(section.locator(".findings li")).to_have_text(findings(REPORT))
        await expect(section.locator(".basis li")).to_have_text(basis(REPORT))
        captions = section.locator("figcaption")
        await expect(captions).to_have_text(
            [re.compile(r"ram, policy lru100\sGiB\s+60\s%"), re.compile(r"ssd, policy lru1000\sGiB\s+60\s%")]
        )
        ram = section.get_by_role("img", name="capacity of ram")
        await expect(ram).to_have_accessible_name(
            re.compile(r"today 100\sGiB: 30\s% with 25.0\sGiB, 10\s% in ram or faster; 45")
        )
        await ram.hover(position={"x": 1, "y": 5})
        await expect(captions.first).to_have_text(re.compile(r"ram, policy lru25.0\sGiB\s+30\s%"))
        assert await ram.locator(".line").get_attribute("d") == (
            "M18.8 70.0L37.5 55.0L75.0 40.0L112.5 33.0L150.0 30.0L300.0 29.0"
        )
        area = await ram.locator(".area").get_attribute("d")
        assert area is not None
        assert area.startswith("M18.8 90.0L")
        assert area.endswith("L300.0 49.0L300.0 100.0L18.8 100.0Z")
        better = replace(REPORT, measured_hit_rate=0.65)
        await one.send(WhatIf(better))
        await until(lambda: controller.registry.find("decode-1").what_if == better)
        await expect(section.locator(".basis li")).to_have_text(basis(better))


async def test_estimates_are_loaded_only_for_what_is_open(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        names = [f"decode-{number}" for number in range(1, 6)]
        for reported in (1.0, 2.0, 3.0):
            controller.instances = [instance(name, what_if_at=reported) for name in names]
            controller.what_ifs = {name: what_if("ram", [], [f"finding {reported}"]) for name in names}
            controller.publish_instances()
            section = page.card("decode-3").locator("details")
            if reported == 1.0:
                await section.get_by_text("What if").click()
            await expect(section.locator(".findings li")).to_have_text(f"finding {reported}")
        assert controller.what_ifs_asked == ["decode-3"] * 3
        await section.get_by_text("What if").click()
        await expect(section.locator(".findings")).to_be_hidden()
        controller.instances = [instance(name, what_if_at=4.0) for name in names]
        controller.publish_instances()
        await page.card("decode-5").get_by_text("What if").click()
        await expect(page.card("decode-5").locator(".findings li")).to_have_text("finding 3.0")
        assert controller.what_ifs_asked == [*["decode-3"] * 3, "decode-5"]


async def test_error_is_shown_until_the_next_report(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        controller.instances = [instance("decode-1", what_if_at=1.0)]
        controller.publish_instances()
        section = page.card("decode-1").locator("details")
        await section.get_by_text("What if").click()
        await expect(section.get_by_role("status")).to_have_text(
            "Controller error: there is no instance 'decode-1'."
        )
        controller.what_ifs["decode-1"] = what_if("ram", [], ["found"])
        controller.instances = [instance("decode-1", what_if_at=2.0)]
        controller.publish_instances()
        await expect(section.locator(".findings li")).to_have_text("found")
        await expect(section.get_by_role("status")).to_be_hidden()
