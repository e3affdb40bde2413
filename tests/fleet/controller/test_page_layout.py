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
from tests.fleet.controller.browser import Visit, scripted
from tests.fleet.controller.scripted_api import asked, breaker, event, instance, missed, sample, tier, what_if

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
        controller.histories[""] = [sample(time.time(), hit_tokens={script: 5}, missed_tokens={image: 5})]
        controller.totals["model"] = {quoted: sample(time.time(), hit_tokens={"any": 5})}
        link = {"instance": image, "address": address, "peer": script, "state": quoted}
        controller.lists["peers"] = {
            "peers": [{**link, "read_bytes": 1, "bytes_per_second": None}], "total": 1,
        }  # fmt: skip
        controller.what_ifs[image] = what_if(script, [quoted], [image])
        request = asked(script, image, {quoted: 500}, missed(500, image, script, advice=quoted))
        place = breaker(5, text=image)
        controller.lists["why"] = {"requests": [request], "breakers": [place], "unanswered": {script: quoted}}
        held = asked("", image, [[script, 9]], missed(1, quoted, image), text=script)
        controller.answers["why"] = 200, {"prompts": [held], "unanswered": {}}
        controller.publish_instances()
        controller.answers["lookup"] = (
            200,
            {"model": quoted, "num_tokens": 9, "instances": {image: {script: 9}}},
        )
        controller.answers["pin"] = 404, {"detail": f"there is no instance {image}"}
        controller.publish_event(event("e1", "move", "failed", source=[image, script], error=quoted))
        controller.cut_streams()  # The page loads everything when it connects.
        detail = await page.open(image)
        await expect(detail).to_contain_text(script)
        await detail.get_by_text("What if").click()
        await expect(detail.locator(".findings li")).to_have_text(image)
        await expect(detail.locator(".basis li")).to_have_text(quoted)
        await expect(detail.locator(".what-if figcaption")).to_contain_text(f"{script}, policy lru")
        await expect(page.page.locator("#peers-rows th")).to_have_text(f"{image} ← {script}")
        await expect(page.page.locator("#models-rows th")).to_have_text(quoted)
        await expect(page.page.locator("#fleet-charts")).to_contain_text(script)
        await expect(page.events.first).to_contain_text(f"Failed: {quoted}.")
        await page.look_up(image)
        await expect(page.found).to_contain_text(f"9 tokens for {quoted}")
        await expect(page.found).to_contain_text(f"9 from {script}")
        await page.page.locator("#why-rows .toggle").click()
        await expect(page.page.locator("#why-rows")).to_contain_text(f"{script} {quoted}")
        await expect(page.page.locator("#breakers q")).to_have_text(image)
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
        now = time.time()
        many = {f"tier-{number}-{'y' * 40}": 1000 + number for number in range(9)}
        samples = [
            sample(now - 10 * n, hit_tokens=many, missed_tokens={"diverges": 7}, outages=1, moved_bytes=many)
            for n in range(60, -1, -1)
        ]
        controller.histories = {"": samples, long: samples}
        controller.totals = {"model": {"m" * 200: samples[0]}, "tenant": {"t" * 100: samples[0]}}
        link = {"instance": long, "address": "a" * 200, "peer": "", "state": "paused: " + "s" * 100}
        finding = {"instance": long, "change": "f" * 200, "gpu_seconds_a_day": 1.0}
        many_misses = [missed(50, f"reason-{number}-" + "z" * 40, advice="w" * 120) for number in range(8)]
        requests = [
            asked("r" * 90, long, {"t" * 60: 600}, *many_misses, engine_tokens=1, at=now - number)
            for number in range(3)
        ]
        unanswered = {long: "n" * 100, "decode-2": "no answer within 30 s"}
        places = [breaker(720, text="q" * 150), breaker(9)]
        controller.answers["why"] = (
            200,
            {
                "prompts": [asked("", long, [["t" * 60, 999]], missed(1, "evicted"), text="q" * 150)] * 7,
                "unanswered": unanswered,
            },
        )
        pin = {"instance": long, "chunks": 3, "held": 1, "pinned_at": now, "until": None}
        controller.lists |= {
            "peers": {"peers": [{**link, "read_bytes": 1 << 40, "bytes_per_second": 1e9}], "total": 200},
            "whatif": {"improvements": [finding], "estimating": 2},
            "pins": {"pins": [pin], "total": 20},
            "why": {"requests": requests, "breakers": places, "unanswered": unanswered},
            "about": {"version": "0.1.0", "grafana": "http://127.0.0.1:1/d/kvtier"},
        }
        controller.cut_streams()
        await expect(page.page.locator("#pins-more")).to_contain_text("… and 19 more pins")
        controller.publish_instances()
        await expect(page.rows).to_have_count(4)
        detail = await page.open(long)
        await detail.get_by_text("What if").click()
        await expect(detail.locator(".findings")).to_be_visible()
        await page.page.locator("#why-rows .toggle").first.click()
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


def test_page_loads_nothing_from_other_hosts() -> None:
    sources = {path.name: path.read_text() for path in PAGE_FILES.iterdir()}
    assert set(sources) >= {"index.html", "style.css", "main.js"}
    for name, text in sources.items():
        assert re.findall(r"https?://[^\s\"']+", text) in ([], ["http://www.w3.org/2000/svg"]), name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|\bstyle=", text
        ), name


def test_files_are_in_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PAGE_FILES.parents[3])
    # Without the native core, which saves seconds.
    wheel = build_wheel(str(tmp_path), {"wheel.cmake": "false"})
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        packed = {
            Path(name).name for name in archive.namelist() if name.startswith("kvtier/fleet/controller/page/")
        }
    assert packed == {path.name for path in PAGE_FILES.iterdir()}
