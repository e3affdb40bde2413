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
        await expect(page.row("decode-1")).to_contain_text("up to date")
        section = (await page.open("decode-1")).locator("details")
        await expect(section).to_be_hidden()
        await one.send(WhatIf(REPORT))
        await section.get_by_text("What if").click()
        await expect(section.locator(".findings li")).to_have_text(findings(REPORT))
        await expect(section.locator(".basis li")).to_have_text(basis(REPORT))
        charts = section.locator("figure")
        await expect(charts.locator(".chart-title")).to_have_text(
            ["Hit rate by capacity of ram, policy lru", "Hit rate by capacity of ssd, policy lru"]
        )
        ram = section.get_by_role("img", name="capacity of tier ram; the mark is the capacity of today")
        await expect(ram).to_have_accessible_name(re.compile(r"today, 100\sGiB: hit rate .* lowest 30\s%"))
        await ram.hover(position={"x": 1, "y": 5})
        await expect(charts.first.locator(".chart-at")).to_have_text(re.compile(r"25.0\sGiB"))
        legend = charts.first.locator(".legend li")
        await expect(legend).to_have_text(
            [re.compile(r"hit rate30\s%"), re.compile(r"in ram or faster10\s%")]
        )
        assert await ram.locator(".line").first.get_attribute("d") == (
            "M37.5 112.0L75.0 88.0L150.0 64.0L225.0 52.8L300.0 48.0L600.0 46.4"
        )
        await expect(ram.locator(".mark")).to_have_attribute("x1", "150")
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
            section = page.detail("decode-3").locator("details")
            if reported == 1.0:
                await page.open("decode-3")
                await section.get_by_text("What if").click()
            await expect(section.locator(".findings li")).to_have_text(f"finding {reported}")
        assert controller.what_ifs_asked == ["decode-3"] * 3
        await section.get_by_text("What if").click()
        await expect(section.locator(".findings")).to_be_hidden()
        controller.instances = [instance(name, what_if_at=4.0) for name in names]
        controller.publish_instances()
        await (await page.open("decode-5")).get_by_text("What if").click()
        await expect(page.detail("decode-5").locator(".findings li")).to_have_text("finding 3.0")
        assert controller.what_ifs_asked == [*["decode-3"] * 3, "decode-5"]


async def test_error_is_shown_until_the_next_report(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        controller.instances = [instance("decode-1", what_if_at=1.0)]
        controller.publish_instances()
        section = (await page.open("decode-1")).locator("details")
        await section.get_by_text("What if").click()
        await expect(section.locator(".problem")).to_have_text(
            "Controller error: there is no instance 'decode-1'."
        )
        controller.what_ifs["decode-1"] = what_if("ram", [], ["found"])
        controller.instances = [instance("decode-1", what_if_at=2.0)]
        controller.publish_instances()
        await expect(section.locator(".findings li")).to_have_text("found")
        await expect(section.locator(".problem")).to_be_hidden()
