"""The parts of the controller's page about the whole fleet: problems, totals, charts, tables and lists."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Locator, expect

from kvtier.catalog.misses import Miss, MissReason
from kvtier.fleet.member.protocol import Counters, PeerCount, RouteCount, TokenCount
from kvtier.observability.requests import PromptReport, readable
from tests.fleet.controller.browser import Visit, scripted, visiting
from tests.fleet.controller.scripted_api import (
    GIB,
    ScriptedAPI,
    asked,
    breaker,
    instance,
    missed,
    sample,
    tier,
)
from tests.rigs.running_controller import MODEL, heartbeat, running_controller

pytestmark = pytest.mark.anyio

NOW = time.time()


def chart(page: Visit, title: str) -> Locator:
    return page.page.locator("#fleet-charts figure").filter(has_text=title)


async def test_problems_are_listed_the_urgent_ones_first(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        problems = page.page.locator("#problems")
        await expect(problems.get_by_role("heading")).to_have_text("No problems")
        differ = {"found": "kvtier 0.1.0 and 0.2.0", "remedy": "install the same"}
        controller.lists["findings"] = {"findings": [differ]}
        controller.cut_streams()
        controller.instances = [
            instance("decode-1", failed=3, peers=4, peers_down=1),
            instance("decode-2", tier("ssd", "disk", 100, 50, available=False)),
            instance("decode-3"),
        ]
        await expect(problems.get_by_role("heading")).to_have_text("4 problems")
        await expect(problems.get_by_role("listitem")).to_have_text(
            [
                "decode-2tier ssd is unavailable",
                "decode-13 failed transfers in 5 min",
                "decode-11 of 4 peers out of reach",
                "kvtier 0.1.0 and 0.2.0: install the same",
            ]
        )
        await problems.get_by_role("button", name="decode-2").click()
        await expect(page.detail("decode-2")).to_contain_text("unavailable")
        await expect(page.rows).to_have_count(1)
        gone = {
            "instance": "lost",
            "host": "gpu-9",
            "disconnected_at": time.time() - 700,
            "reason": "it was quiet",
        }
        controller.instances = [instance("decode-3")]
        controller.publish("instances", {"instances": controller.instances, "gone": [gone]})
        await expect(problems).to_contain_text("on gpu-9 disconnected 11 min ago: it was quiet")


async def test_totals_and_charts_of_a_span(browser: Browser) -> None:
    controller = ScriptedAPI()
    controller.instances = [instance("decode-1")]
    now = time.time()
    controller.histories[""] = [
        sample(now - 10 * n, hit_tokens={"ram": 100 * (n + 1), "ssd": 50}) for n in range(29, -1, -1)
    ]
    async with controller.serving() as url, visiting(browser, url) as page:
        await expect(page.page.locator("#tile-served")).to_have_text(
            "Tokens served48Kram 97\u00a0%, ssd 3\u00a0%"
        )
        await expect(page.page.locator("#tile-rate")).to_contain_text("of 30K tokens looked up")
        await expect(page.page.locator("#tile-saved")).to_contain_text("30\u00a0s")
        await expect(page.page.locator("#tile-gpus")).to_contain_text("2\u00a0min")
        await expect(page.page.locator("#tile-held")).to_contain_text(
            "9.00\u00a0GiB45\u00a0% of 20.0\u00a0GiB"
        )
        served = chart(page, "Tokens served, by tier")
        await expect(served.locator(".legend li")).to_have_text(["ram10/s", "ssd5/s"])
        await expect(served.locator(".axis-y span")).to_have_text(["400/s", "200/s", "0/s"])
        await expect(served.locator(".axis-x span").last).to_have_text("now")
        plot = served.get_by_role("img")
        await expect(plot).to_have_accessible_name(
            re.compile("ram last 10/s, lowest 10/s, highest 300/s; ssd last 5/s, lowest 5/s, highest 5/s")
        )
        await plot.hover(position={"x": 2, "y": 40})
        await expect(served.locator(".legend li").first).to_have_text("ram300/s")
        await expect(served.locator(".chart-at")).to_have_text(re.compile(r"\d\d:\d\d:\d\d"))
        await plot.press("Home")
        await plot.press("ArrowRight")
        await expect(served.get_by_role("status")).to_have_text(re.compile(r"\d\d: ram 290/s, ssd 5/s"))
        await plot.press("End")
        await expect(served.locator(".legend li").first).to_have_text("ram10/s")
        await expect(chart(page, "Missed tokens")).to_be_hidden()
        await expect(chart(page, "Outages and errors")).to_contain_text("None.")
        controller.histories[""] = [
            sample(now - 600 * n, seconds=600, missed_tokens={"evicted": 600, "diverges": 60})
            for n in (3, 2, 1)
        ]
        await page.page.get_by_text("1 day", exact=True).click()
        await expect(page.page.locator("#span-text")).to_have_text("Last 1 day, 30\u00a0min observed")
        await expect(chart(page, "Missed tokens").locator(".legend li")).to_have_text(
            ["evicted1/s", "diverges0.1/s"]
        )
        assert controller.spans_asked[-1] == "day"


async def test_lines_are_interrupted_where_there_are_no_samples(browser: Browser) -> None:
    controller = ScriptedAPI()
    now = time.time()
    times = [*range(600, 400, -10), *range(100, -1, -10)]
    controller.histories[""] = [sample(now - seconds) for seconds in times]
    controller.instances = [instance("decode-1")]
    async with controller.serving() as url, visiting(browser, url) as page:
        await expect(chart(page, "GPUs saved").locator(".line")).to_have_count(2)
        await expect(chart(page, "GPUs saved").locator(".legend li")).to_have_text("GPUs0.4")
        controller.histories[""] = [sample(now - 300)]
        await page.page.get_by_text("1 day", exact=True).click()
        await page.page.get_by_text("1 hour", exact=True).click()
        await expect(chart(page, "GPUs saved").locator(".legend li")).to_have_text("GPUs-")


async def test_many_instances_are_sorted_filtered_and_few_at_first(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        controller.instances = [
            instance(f"decode-{n}", tier("ram", "cpu", 100, n % 100), hit_rate=n / 200, host=f"rack-{n % 7}")
            for n in range(200)
        ]
        controller.instances[7]["up_to_date"] = False
        controller.instances[120]["corrupt"] = 2
        controller.publish_instances()
        await expect(page.rows).to_have_count(25)
        await expect(page.rows.first).to_contain_text("decode-120up to date2 corrupt chunks in 5 min")
        await expect(page.rows.nth(1)).to_contain_text("decode-7catching up")
        await expect(page.rows.nth(2).get_by_role("button")).to_have_text("decode-0")
        header = page.page.get_by_role("columnheader", name="Hit rate")
        await header.get_by_role("button").click()
        await expect(header).to_have_attribute("aria-sort", "descending")
        await expect(page.rows.first.get_by_role("button")).to_have_text("decode-199")
        await header.get_by_role("button").press("Enter")
        await expect(page.rows.first.get_by_role("button")).to_have_text("decode-0")
        await page.button("Show 175 more instances").click()
        await expect(page.rows).to_have_count(200)
        search = page.page.get_by_label("Filter instances")
        await search.fill("RACK-3 decode-1")
        await expect(page.page.locator("#filtered")).to_have_text("17 of 200")
        await expect(page.rows).to_have_count(17)
        await search.fill("nothing like it")
        await expect(page.page.get_by_text("No instance matches the filter.")).to_be_visible()
        await search.fill("")
        await page.page.get_by_label("State", exact=True).select_option("With problems")
        await expect(page.rows).to_have_count(1 + 1)
        await expect(page.page.locator("#problems li")).to_have_count(2)


async def test_details_load_the_history_of_their_instance(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        controller.histories["decode-1"] = [sample(time.time(), hit_tokens={"ram": 250})]
        controller.instances[0]["peers"] = 1
        link = {"instance": "decode-1", "address": "10.0.0.2:8200", "peer": "decode-2", "state": "connected"}
        listed = {"peers": [{**link, "read_bytes": GIB, "bytes_per_second": 2.0 * GIB}], "total": 1}
        controller.lists["peers"] = listed
        controller.publish_instances()
        detail = await page.open("decode-1")
        figure = detail.locator("figure").filter(has_text="Hit rate")
        await expect(figure.locator(".legend")).to_have_text("hit rate25\u00a0%")
        await expect(detail).to_contain_text(
            "decode-2 at 10.0.0.2:8200: connected, 1.00\u00a0GiB fetched, 2.00\u00a0GiB/s"
        )
        toggle = page.row("decode-1").get_by_role("button")
        await expect(toggle).to_have_attribute("aria-expanded", "true")
        await toggle.press("Enter")
        await expect(detail).to_be_hidden()


async def test_lists_and_the_link_to_the_dashboard(browser: Browser) -> None:
    controller = ScriptedAPI()
    controller.instances = [instance("decode-1")]
    controller.totals["model"] = {"llama": sample(NOW), "qwen": sample(NOW, looked_up_tokens=5000)}
    controller.totals["tenant"] = {"team-a": sample(NOW)}
    controller.lists["about"] = {"version": "0.3.0", "grafana": "https://grafana.example/d/kvtier"}
    pin = {"instance": "decode-1", "chunks": 8, "held": 4, "pinned_at": NOW, "until": None}
    controller.lists["pins"] = {"pins": [pin], "total": 3}
    finding = {"instance": "decode-1", "change": "+50GiB of ram: +7.0 points", "gpu_seconds_a_day": 60.0}
    controller.lists["whatif"] = {"improvements": [finding], "estimating": 1}
    async with controller.serving() as url, visiting(browser, url) as page:
        models = page.page.locator("#models-rows tr")
        await expect(models.nth(0)).to_have_text("qwen25K50010\u00a0%1\u00a0s4\u00a0s")
        await expect(models.nth(1)).to_contain_text("llama")
        await expect(page.page.locator("#tenants-rows tr")).to_contain_text("team-a")
        await expect(page.page.locator("#peers")).to_contain_text("No instance fetches from another one.")
        await expect(page.page.locator("#pins-rows tr")).to_contain_text("decode-1850\u00a0%")
        await expect(page.page.locator("#pins-more")).to_have_text("… and 2 more pins")
        await expect(page.page.locator("#improvements-rows tr")).to_have_text(
            "decode-1+50GiB of ram: +7.0 points"
        )
        link = page.page.get_by_role("link", name="Grafana")
        await expect(link).to_have_attribute("href", "https://grafana.example/d/kvtier")
        await expect(page.page.locator("#version")).to_have_text("0.3.0")


async def test_every_reason_is_shown_with_what_to_do(browser: Browser) -> None:
    controller = ScriptedAPI()
    controller.instances = [instance("decode-1")]
    every = [Miss(reason, 40, "ssd", 2.0, 1.0) for reason in MissReason]
    misses = readable(PromptReport("llama", 0, [], every))["misses"]
    request = asked("cmpl-1", "decode-1", {}, *misses)
    controller.lists["why"] = {"requests": [request], "breakers": [], "unanswered": {}}
    async with controller.serving() as url, visiting(browser, url) as page:
        rows = page.page.locator("#why-rows > .request")
        name = "Prompt of 1,000 tokens: " + "; ".join(miss["text"] for miss in misses)
        await expect(rows.get_by_role("img")).to_have_accessible_name(name)
        await expect(page.page.locator("#why-legend li")).to_have_count(len(misses))
        await rows.get_by_role("button", name="cmpl-1").press("Enter")
        await expect(page.page.locator("#why-rows .prompt-parts li")).to_have_text(
            [f"{miss['text']} {miss['advice']}" for miss in misses]
        )


async def test_last_requests_are_bars_of_what_was_held_and_missed(browser: Browser) -> None:
    controller = ScriptedAPI()
    controller.instances = [instance("decode-1")]
    parts = missed(
        600, "diverges", "600 diverges (from token 400 on)", advice="keep what changes at the end."
    )
    first = asked("cmpl-2", "decode-1", {"ram": 300}, parts, engine_tokens=100)
    requests = [first, asked("cmpl-1", "decode-2", {}, missed(1000, "never_stored"), at=NOW - 60)]
    controller.lists["why"] = {
        "requests": requests,
        "breakers": [breaker(720, text="Today is ▸Friday")],
        "unanswered": {"decode-3": "no answer within 30 s"},
    }
    async with controller.serving() as url, visiting(browser, url) as page:
        rows = page.page.locator("#why-rows > .request")
        await expect(rows).to_have_count(2)
        bar = rows.first.get_by_role("img")
        await expect(bar).to_have_accessible_name(
            "Prompt of 1,000 tokens: 100 in the engine's own cache; 300 from ram; "
            "600 diverges (from token 400 on)"
        )
        widths = await bar.locator("span").evaluate_all("nodes => nodes.map(node => node.offsetWidth)")
        assert widths[2] == pytest.approx(2 * widths[1], abs=3)
        await expect(page.page.locator("#breakers")).to_have_text(
            "75\u00a0% of 100 prompts that begin alike part at token 720; 80\u00a0% of these go on with the "
            "same text: 2M tokens a day, 31\u00a0min of prefill.Today is ▸Friday"
        )
        await expect(page.page.locator("#why-more")).to_have_text(
            "Not answered: decode-3 (no answer within 30 s)."
        )
        await expect(page.page.locator("#why-legend li")).to_have_text(
            ["the engine's own cache", "ram", "diverges", "never_stored"]
        )
        toggle = rows.first.get_by_role("button", name="cmpl-2")
        await expect(toggle).to_have_attribute("aria-expanded", "false")
        await toggle.press("Enter")
        await expect(toggle).to_have_attribute("aria-expanded", "true")
        await expect(page.page.locator("#why-rows .prompt-parts li")).to_have_text(
            [
                "100 in the engine's own cache",
                "300 from ram",
                "600 diverges (from token 400 on) keep what changes at the end.",
            ]
        )
        controller.lists["why"] = {"requests": [], "breakers": [], "unanswered": {}}
        search = page.page.get_by_label("Find a request")
        await search.fill("chat-9")
        await search.press("Enter")
        await expect(page.page.locator("#why-more")).to_have_text("No request has such an id.")
        await expect(rows).to_have_count(0)
        assert page.requested[-1].endswith("/why?last=20&request=chat-9")


async def test_a_prompt_that_is_looked_up_is_a_bar_for_each_instance(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        prompts = [
            asked("", "decode-1", [["ram", 512], ["ssd", 256]], missed(232, "evicted"), text="a ▸b"),
            asked("", "decode-2", [], missed(1000, "never_stored")),
        ]
        controller.answers["why"] = 200, {"prompts": prompts, "unanswered": {"old": "its version"}}
        await page.page.get_by_text("Messages", exact=True).click()
        await page.page.locator("#text").fill("{")
        await page.button("Look up").click()
        await expect(page.look_up_outcome).to_have_text("Enter a JSON list of chat messages.")
        await page.page.locator("#text").fill('[{"role": "user", "content": "Hi"}]')
        await page.button("Look up").click()
        bars = page.found.locator(".prompt-bar")
        await expect(bars).to_have_count(2)
        await expect(bars.first).to_have_accessible_name(
            "Prompt of 1,000 tokens: 512 from ram; 256 from ssd; 232 evicted"
        )
        await expect(page.found.locator(".prompts")).to_contain_text("232 evicted do this")
        await expect(page.found).to_contain_text("Not answered: old (its version).")
        [(path, body)] = controller.requests
        assert (path, body["messages"]) == ("lookup", [{"role": "user", "content": "Hi"}])
        controller.answers["why"] = 422, {"detail": "the prompt is too long", "known": []}
        await page.look_up("x")
        await expect(page.found).to_contain_text("Controller error: the prompt is too long.")
        await expect(bars).to_have_count(0)


async def test_a_real_controller_has_all_of_it(browser: Browser, tmp_path: Path) -> None:
    async with running_controller(tmp_path) as controller, controller.holding("one", []) as one:
        history, members = controller.controller.history, controller.registry.members
        await history.sample(members.values(), time.time() - 20)
        name = MODEL.namespace.hex()
        counts: Any = {
            "models": [TokenCount(name, 1000, 600, 12.0)],
            "tenants": [TokenCount("team-a", 1000, 600, 12.0)],
            "routes": [RouteCount("peers", "ram", 1 << 20, 4)],
            "peers": [PeerCount("two:8200", "two", "does not answer", 1 << 20, 1e6)],
            "misses": {"never_stored": 400},
        }
        counters = Counters([0, 1, 0], [0, 0, 0], **counts)
        await one.send(heartbeat(1 << 29, 1000, 200, counters))
        await controller.wait_until(lambda: members["one"].heartbeat.looked_up == 1000)
        await history.sample(members.values(), time.time() - 10)
        async with visiting(browser, controller.url) as page:
            await expect(page.page.locator("#tile-served")).to_contain_text("600")
            await expect(page.page.locator("#tile-saved")).to_contain_text("12\u00a0s")
            await expect(page.page.locator("#tile-moved")).to_contain_text("1.00\u00a0MiB between instances")
            await expect(page.page.locator("#problems")).to_contain_text("1 outage of a tier in 5 min")
            await expect(page.page.locator("#problems")).to_contain_text("1 of 1 peer out of reach")
            await expect(page.page.locator("#models-rows")).to_contain_text("meta/llama")
            await expect(page.page.locator("#tenants-rows")).to_contain_text("team-a")
            await expect(page.page.locator("#peers-rows")).to_contain_text("one ← twodoes not answer")
            missed = chart(page, "Missed tokens").get_by_role("img")
            await expect(missed).to_have_accessible_name(re.compile("never_stored .* highest 40/s"))
            await expect(chart(page, "Outages and errors").locator(".legend li")).to_have_count(3)
            await expect((await page.open("one")).locator("figure .line")).not_to_have_count(0)
