"""The controller's page: escaping, contrast, layout, accessible names, charts, packaging."""

from __future__ import annotations

import re
import time
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, expect
from scikit_build_core.build import build_wheel

from kvtier.fleet.controller.app import PAGE_FILES
from tests.fleet.controller.browser import Visit, scripted, visiting
from tests.fleet.controller.scripted_api import ScriptedAPI, event, instance, tier, what_if

pytestmark = pytest.mark.anyio

PAYLOADS = [
    "<img src=x onerror=window.hacked=1>",
    "<script>window.hacked=1</script>",
    '"><svg onload=window.hacked=1>',
    "javascript:window.hacked=1//",
]


async def test_names_are_shown_as_text(browser: Browser) -> None:
    image, script, quoted, address = PAYLOADS
    async with scripted(browser) as (controller, page):
        parts = {
            "host": script,
            "peer": address,
            "models": [quoted, image],
            "engines": [script],
            "version": image,
        }
        controller.instances = [
            instance(image, tier(script, quoted, 1 << 30, 1 << 20), what_if_at=time.time(), **parts)
        ]
        controller.what_ifs[image] = what_if(script, [quoted], [image])
        controller.publish_instances()
        controller.answers["lookup"] = (
            200,
            {"model": quoted, "num_tokens": 9, "instances": {image: {script: 9}}},
        )
        controller.answers["pin"] = 404, {"detail": f"there is no instance {image}"}
        controller.publish_event(event("e1", "move", "failed", source=[image, script], error=quoted))
        await expect(page.card(image)).to_contain_text(script)
        await page.card(image).get_by_text("What if").click()
        await expect(page.card(image).locator(".findings li")).to_have_text(image)
        await expect(page.card(image).locator(".basis li")).to_have_text(quoted)
        await expect(page.card(image).locator(".what-if figcaption")).to_contain_text(f"{script}, policy lru")
        await expect(page.events.first).to_contain_text(f"Failed: {quoted}.")
        await page.look_up(image)
        await expect(page.found).to_contain_text(f"9 tokens for {quoted}")
        await page.choose("Pin")
        await page.button("Pin").click()
        await expect(page.outcome).to_have_text(f"Controller error: there is no instance {image}.")
        assert await page.page.evaluate("window.hacked") is None
        assert await page.page.locator("img, body script, body svg[onload], [onerror], #main a").count() == 0
        with pytest.raises(Exception, match="TrustedHTML"):
            await page.page.evaluate("document.body.innerHTML = '<b></b>'")
        assert "Trusted" in page.problems.pop()


@pytest.fixture(scope="module")
async def full_page(browser: Browser) -> AsyncIterator[Visit]:
    """A page with every kind of content, and names of maximum length."""
    async with scripted(browser) as (controller, page):
        long = "a-name-of-an-instance-that-someone-thought-was-a-good-idea." * 2
        full = tier("ram", "hugepage", 20 << 30, 19 << 30)
        pool = tier("pool-" + "x" * 60, "redis", None, 0, available=False)
        parts = {"models": ["m" * 200], "host": "h" * 120, "what_if_at": time.time()}
        controller.what_ifs[long] = what_if("t" * 120, ["b" * 200], ["f" * 200])
        controller.instances = [
            instance(long, full, pool, up_to_date=False, **parts),
            instance("decode-2", peer=None, models=[], engines=[], hit_rate=None),
            instance("gone"),
        ]
        controller.answers["lookup"] = (
            200,
            {
                "model": "m" * 200,
                "num_tokens": 3000,
                "instances": {long: {"ram": 2000, pool["name"]: 1000}, "decode-2": {"ram": 500}},
            },
        )
        controller.answers["move"] = 503, {"detail": "x" * 300}
        controller.publish_instances()
        await expect(page.cards).to_have_count(4)
        await page.card(long).get_by_text("What if").click()
        await expect(page.card(long).locator(".findings")).to_be_visible()
        controller.instances.pop()
        controller.publish_instances()
        states = ("queued", "running", "done", "failed")
        for number, state in enumerate(states):
            controller.publish_event(
                event(f"e{number}", state=state, source=[long, pool["name"]], chunks_done=3)
            )
        await page.look_up("word " * 400)
        await page.button("Move").click()
        await expect(page.outcome).to_contain_text("Controller error: xxx")
        controller.refuse_streams = 503
        controller.cut_streams()
        await expect(page.page.locator("#banner")).to_be_visible()
        yield page


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_contrast(full_page: Visit, scheme: Any) -> None:
    page = full_page
    await page.page.emulate_media(color_scheme=scheme)
    measured = await page.measure("contrast")
    assert measured["poor"] == []
    assert measured["texts"] > 100
    await page.choose("Clear")
    await page.button("Clear …").click()
    assert (await page.measure("contrast"))["poor"] == []
    await page.button("Keep it").click()
    surface = await page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", surface)[0]) < 60) == (scheme == "dark")


@pytest.mark.parametrize("width", [320, 360, 700, 1100, 1600])
async def test_nothing_overflows_the_window(full_page: Visit, width: int) -> None:
    await full_page.page.set_viewport_size({"width": width, "height": 740})
    for action in ("Move", "Pin", "Prefetch"):
        await full_page.choose(action)
        assert await full_page.measure("overflowing") == [0]


async def test_controls_have_accessible_names(full_page: Visit) -> None:
    assert await full_page.measure("nameless") == []


async def test_charts(browser: Browser) -> None:
    controller = ScriptedAPI()
    now = time.time()
    ram = tier("ram", "cpu", 100, 80, found=30)
    controller.instances = [instance("one", ram, tier("pool", "redis", None, 0, found=0), hit_rate=0.75)]
    samples = [(20, None), (20, 0.25), (40, 0.5), (60, 0.6), (80, 0.75)]
    controller.histories["one"] = [
        {"time": now - 600 + 30 * n, "hit_rate": rate, "tiers": [{"used": used}, {"used": 0}]}
        for n, (used, rate) in enumerate(samples)
    ]
    # Without connection for 7 minutes.
    controller.histories["one"] += [
        controller.histories["one"][-1] | {"time": now - 30 * n, "hit_rate": 0.7} for n in (2, 1, 0)
    ]
    async with controller.serving() as url, visiting(browser, url) as page:
        fill = page.page.get_by_role("img", name="Fill of each tier in the last 10 min")
        await expect(fill).to_have_accessible_name(
            re.compile(r"ram last 80\s%, lowest 20\s%, highest 80\s%$")
        )
        hits = page.page.get_by_role(
            "img", name="tokens looked up in the last 5 minutes that were found in the last"
        )
        await expect(hits).to_have_accessible_name(
            re.compile(r"hit rate last 75\s%, lowest 25\s%, highest 75\s%$")
        )
        captions = page.cards.locator("figcaption")
        await expect(captions).to_have_text(["Fill80 %", "Hit rate, 5 min75 %"])
        for chart in (fill, hits):
            await expect(chart.locator(".line")).to_have_count(2)
        left, right = [await fill.locator(".line").nth(n).get_attribute("d") for n in (0, 1)]
        assert left is not None
        assert right is not None
        assert (left.count("L"), right.count("L")) == (4, 2)
        await fill.hover(position={"x": 1, "y": 5})
        await expect(captions.first).to_have_text(re.compile(r"Fill\d\d:\d\d\s+20\s%"))
        width = (await fill.bounding_box() or {"width": 0})["width"]
        await fill.hover(position={"x": width / 2, "y": 5})
        await expect(captions.first).not_to_have_text(re.compile(r"Fill\d\d:\d\d\s+80\s%"))


async def test_charts_after_a_disconnection(browser: Browser) -> None:
    """A disconnected instance has no current values. The page keeps samples that the controller has lost."""
    controller = ScriptedAPI()
    now = time.time()
    connected = instance("one", tier("ram", "cpu", 100, 80), hit_rate=0.75)
    old = [
        {"time": now - seconds, "hit_rate": 0.25, "tiers": [{"used": 20}]} for seconds in range(300, 100, -10)
    ]
    new = {"time": now, "hit_rate": 0.75, "tiers": [{"used": 80}]}
    controller.instances, controller.histories["one"] = [connected], [*old, new]
    async with controller.serving() as url, visiting(browser, url) as page:
        captions = page.cards.locator("figcaption")
        fill = page.page.get_by_role("img", name=re.compile(r"Fill of each.* lowest 20\s%, highest 80\s%$"))
        await expect(fill).to_be_visible()
        await expect(captions).to_have_text(["Fill80 %", "Hit rate, 5 min75 %"])
        controller.instances = []
        controller.publish_instances()
        await expect(captions).to_have_text(["Fill-", "Hit rate, 5 min-"])
        # The controller has restarted.
        controller.instances = [connected | {"registered_at": now}]
        controller.histories["one"] = [new | {"time": time.time()}]
        controller.cut_streams()
        await expect(captions).to_have_text(["Fill80 %", "Hit rate, 5 min75 %"])
        await expect(fill).to_be_visible()
        await expect(fill.locator(".line")).to_have_count(2)
        # The samples of other tiers are not those of these.
        controller.instances = [instance("one", tier("ssd", "disk", 100, 50))]
        controller.publish_instances()
        await expect(captions).to_have_text(["Fill50 %", "Hit rate, 5 min80 %"])
        await expect(page.cards.locator(".chart").first.locator(".line")).to_have_count(1)


def test_page_loads_nothing_from_other_hosts() -> None:
    sources = {path.name: path.read_text() for path in PAGE_FILES.iterdir()}
    assert set(sources) >= {"index.html", "style.css", "main.js"}
    for name, text in sources.items():
        assert re.findall(r"https?://[^\s\"']+", text) in ([], ["http://www.w3.org/2000/svg"]), name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|\bstyle=", text
        ), name
        assert len(text.splitlines()) <= 500


def test_files_are_in_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PAGE_FILES.parents[3])
    # Without the native core, which saves seconds.
    wheel = build_wheel(str(tmp_path), {"wheel.cmake": "false"})
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        packed = {
            Path(name).name for name in archive.namelist() if name.startswith("kvtier/fleet/controller/page/")
        }
    assert packed == {path.name for path in PAGE_FILES.iterdir()}
