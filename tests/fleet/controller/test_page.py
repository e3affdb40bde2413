"""The controller's page in a real browser.

Most tests use a real controller with scripted instances. A scripted controller covers delays, faults and
amounts of data that a real one does not produce.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, expect

from kvtier.fleet.controller.app import PAGE_FILES
from kvtier.fleet.controller.prompts import PromptChunks
from kvtier.fleet.member.protocol import Delete, Done, Failed, Fetch, Progress
from kvtier.memory.keys import ChunkKey, split_keys
from tests.fleet.controller.browser import scripted, visiting
from tests.fleet.controller.scripted_api import RESULT, event, tier
from tests.rigs import running_controller as rig
from tests.rigs.fleet import CHUNK_TOKENS, fleet
from tests.rigs.running_controller import (
    CHUNK,
    DISK,
    MODEL,
    RAM,
    RegisteringInstance,
    RunningController,
    heartbeat,
    running_controller,
)

pytestmark = pytest.mark.anyio

TOKEN = "a token that is long enough"
TOKENS = list(range(1000, 2100))
"""Four whole chunks and a partial one."""
TEXT = " ".join(map(str, TOKENS))
NO_COMMANDS: Any = None
"""In place of the function that runs commands, which is not needed here."""
RAM_1 = ["decode-1", "ram"]
AT_RAM_1 = {"instance": "decode-1", "tier": "ram"}


KEYS = list(PromptChunks.of(MODEL, TOKENS).keys)[:4]
"""Keys of the whole chunks."""


def registered(
    controller: RunningController, name: str = "decode-1", keys: Sequence[ChunkKey] = (), tier: int = RAM
) -> AbstractAsyncContextManager[RegisteringInstance]:
    """Connect an instance that has reported a model and the chunks that it holds."""
    return controller.holding(name, keys, tier, heartbeat(used=1 << 29, looked_up=10, found=2))


async def test_instances_connect_and_disconnect(browser: Browser, tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as controller,
        visiting(browser, controller.url, clock=True) as page,
    ):
        await expect(page.page.locator("#register")).to_contain_text(f"url: {controller.url}\n  instance_id:")
        async with registered(controller) as one:
            row = page.row("decode-1")
            await expect(row).to_contain_text("up to date")
            card = await page.open("decode-1")
            for fact in ("Host test-host, process 4242", "Peers decode-1:8200 over tcp", "Engines engine"):
                name, _, value = fact.partition(" ")
                await expect(card.locator("dl > div").filter(has_text=name)).to_have_text(name + value)
            await expect(card.get_by_role("meter", name="Fill of tier ram")).to_have_attribute(
                "aria-valuetext", re.compile(r"512\sMiB of 1\.00\sGiB")
            )
            await one.send(heartbeat(used=1 << 29, looked_up=20, found=4))
            await expect(row.locator(".column-hits")).to_have_text(re.compile(r"60\s%"))
            await expect(row.locator(".column-looked")).to_have_text("10")
            await expect(page.page.locator("#no-instances")).to_be_hidden()
            await one.send(heartbeat(used=1 << 28))
            await expect(card.get_by_text("256 MiB of 1.00 GiB · 25 %")).to_be_visible()
        await expect(row).to_contain_text("disconnected")
        problem = page.page.locator("#problems")
        await expect(problem).to_contain_text(
            re.compile(r"1 problem\s*decode-1\s*on test-host disconnected .* ago: ")
        )
        await page.page.clock.fast_forward(121_000)
        await expect(page.rows).to_have_count(0)
        await expect(problem).to_contain_text("1 problem")
        await expect(page.page.locator("#register")).to_be_visible()


async def test_move(browser: Browser, tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as controller,
        registered(controller, "one", KEYS) as one,
        registered(controller, "two") as two,
        visiting(browser, controller.url) as page,
    ):
        await expect(page.rows).to_have_count(2)
        await page.look_up(TEXT, tokens=True)
        await expect(page.found).to_contain_text("1,100 tokens for meta/llama. The first 1,024 (93 %)")
        await expect(page.held("one", "ram")).to_be_checked()
        await page.button("Move").click()
        fetch = await two.receive()
        assert isinstance(fetch, Fetch)
        assert (fetch.peer, split_keys(fetch.keys)) == ("one:8200", KEYS)
        await two.send(Progress(fetch.ticket, 2, 1 << 20))
        for bar in (page.found, page.events.first):
            await expect(bar.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "50")
        await expect(page.events.first).to_contain_text("one · ram → two · ram")
        await expect(page.events.first).to_contain_text("2 of 4 chunks, 1.00 MiB")
        await two.report(KEYS)
        await two.send(Done(fetch.ticket, fetch.keys, 4, 1 << 21))
        delete = await one.receive()
        assert isinstance(delete, Delete)
        assert split_keys(delete.keys) == KEYS
        await one.report([], removed=KEYS)
        await one.send(Done(delete.ticket, delete.keys, 4, 0))
        await expect(page.outcome).to_have_text("1,024 tokens moved, 2.00 MiB.")
        await expect(page.held("two", "ram")).to_be_checked()
        await expect(page.found.get_by_role("radio", name="·")).to_have_count(1)
        await expect(page.events.first).to_contain_text("done")


async def test_real_instances(browser: Browser, tmp_path: Path) -> None:
    tokens = list(range(3 * CHUNK_TOKENS + 5))
    async with (
        fleet(tmp_path, NO_COMMANDS, "one", "two") as running,
        visiting(browser, running.url) as page,
    ):
        await running.store("one", tokens)
        await page.look_up(str(tokens), tokens=True)
        await expect(page.held("one", "ram")).to_be_checked()
        await expect(page.page.locator("#to-tier option")).to_have_text(["ram (cpu)", "ssd (disk)"])
        await page.button("Move").click()
        await expect(page.outcome).to_contain_text("53 tokens moved")
        await expect(page.held("two", "ram")).to_be_checked()
        await expect(page.found.get_by_role("radio", name="·")).to_have_count(1)
        await page.choose("Pin")
        await page.button("Pin").click()
        await expect(page.outcome).to_contain_text("53 tokens pinned")
        await page.choose("Prefetch")
        await page.page.locator("#to-tier").select_option("ssd")
        await page.button("Prefetch").click()
        await expect(page.held("two", "ssd")).to_be_visible()
        await page.choose("Clear")
        await page.button("Clear …").click()
        await page.button("Clear").click()
        await expect(page.outcome).to_contain_text("53 tokens removed")
        await expect(page.held("two", "ssd")).to_be_checked()
        await expect(page.events).to_have_count(4)
        await expect(page.row("two")).to_contain_text("up to date")


async def test_failed_move(browser: Browser, tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as controller,
        registered(controller, "one", KEYS, DISK),
        registered(controller, "two") as two,
        visiting(browser, controller.url) as page,
    ):
        await page.look_up(TEXT, tokens=True)
        await page.button("Move").click()
        fetch = await two.receive()
        assert isinstance(fetch, Fetch)
        await two.send(Failed(fetch.ticket, "tier ram is full of pinned chunks"))
        for message in (page.outcome, page.events.first):
            await expect(message).to_contain_text(re.compile(r"Failed: .*tier ram is full of pinned chunks"))
        await expect(page.held("one", "ssd")).to_be_checked()


CALLS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("Copy", "", "move", {"old_position": RAM_1, "new_position": ["decode-2", "ram"], "copy": True}),
    ("Pin", "", "pin", AT_RAM_1),
    ("Pin", "10m", "pin", {**AT_RAM_1, "ttl": "10m"}),
    ("Pin", "2.5", "pin", {**AT_RAM_1, "ttl": 2.5}),
    ("Unpin", "", "unpin", AT_RAM_1),
    ("Prefetch", "5s", "prefetch", {**AT_RAM_1, "tier": "ssd", "deadline": "5s"}),
]


async def test_requests_of_the_actions(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        controller.instances[0]["tiers"].append(tier("ssd", "disk", 1 << 40, 0))
        controller.publish_instances()
        await page.page.get_by_label("Salt").fill("tenant-1")
        await page.look_up("a prompt")
        await expect(page.held(*RAM_1)).to_be_checked()
        query = {"prompt": "a prompt", "salt": "tenant-1"}
        assert controller.requests == [("lookup", query)]
        for number, (action, field, path, body) in enumerate(CALLS):
            controller.requests.clear()
            controller.answers[path] = 200, {"event_id": f"e{number}", "num_tokens": 1024}
            await page.choose(action)
            if field:
                await page.page.locator("#seconds").fill(field)
            await page.button(action).click()
            await expect(page.outcome).to_have_text("Requested …")
            # The lookup after the previous action may be late.
            requested = [request for request in controller.requests if request[0] != "lookup"]
            assert requested == [(path, {**query, "model": "llama", **body})]
            result = RESULT | {"tokens": 2048, "chunks": 8}
            controller.publish_event(event(f"e{number}", action.lower(), "done", result=result))
            await expect(page.outcome).to_have_attribute("data-state", "done")
            await expect(page.outcome).to_contain_text("2,048 tokens")


async def test_clear_asks_for_confirmation(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        controller.answers["clear"] = 200, {"event_id": "e1", "num_tokens": 1024}
        await page.look_up("a prompt")
        await page.choose("Clear")
        dialog = page.page.get_by_role("dialog")
        for dismiss in (page.button("Keep it").click, lambda: page.page.keyboard.press("Escape")):
            await page.button("Clear …").click()
            await expect(dialog).to_contain_text(
                "1,024 tokens of this prompt will be removed from decode-1 · ram."
            )
            await expect(page.button("Keep it")).to_be_focused()
            await dismiss()
            await expect(dialog).to_be_hidden()
        assert [path for path, _ in controller.requests] == ["lookup"]
        await page.button("Clear …").click()
        await page.button("Clear").click()
        await expect(page.outcome).to_have_text("Requested …")
        assert controller.requests[1][0] == "clear"
        controller.answers["lookup"] = 200, {"model": "llama", "num_tokens": 1100, "instances": {}}
        result = RESULT | {"tokens": 1024, "chunks": 4, "removed": 4, "bytes": 1 << 20}
        controller.publish_event(event("e1", "clear", "done", num_tokens=1024, result=result))
        await expect(page.found).to_contain_text("No instance holds any of it.")
        await expect(page.events.first).to_contain_text("1,024 tokens removed, 1.00 MiB.")
        await expect(page.found.locator(".segments")).to_be_hidden()


async def test_token(browser: Browser, tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path, token=TOKEN) as controller,
        visiting(browser, controller.url) as page,
        registered(controller),
    ):
        dialog = page.page.get_by_role("dialog")
        await expect(page.page.get_by_label("Token", exact=True)).to_be_focused()
        await page.page.keyboard.type("a token that is wrong")
        await page.page.keyboard.press("Enter")
        await expect(dialog).to_contain_text("The controller does not accept this token.")
        await expect(page.rows).to_have_count(0)
        await page.button("Not now").click()
        await expect(page.connection).to_have_text("No token")
        await page.button("Enter the token").click()
        await page.page.get_by_label("Token", exact=True).fill(TOKEN)
        await page.button("Connect").click()
        await page.wait_until_live()
        await expect(dialog).to_be_hidden()
        await expect(page.row("decode-1")).to_be_visible()
        await page.page.reload()
        await expect(page.row("decode-1")).to_be_visible()
        assert not [url for url in page.requested if TOKEN in url or "token" in url]


async def test_controller_restart(browser: Browser, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with running_controller(tmp_path) as controller, registered(controller):
            page = await stack.enter_async_context(visiting(browser, controller.url))
            await expect(page.row("decode-1")).to_contain_text("up to date")
            await page.look_up(TEXT, tokens=True)
            await expect(page.found).to_contain_text("No instance holds any of it.")
        await expect(page.connection).to_have_text("Disconnected")
        await expect(page.page.locator("#banner")).to_contain_text("The data shown is from")
        await page.button("Look up").click()
        await expect(page.look_up_outcome).to_have_text("The controller cannot be reached.")
        async with (
            running_controller(tmp_path, listen=f"127.0.0.1:{controller.port}") as controller,
            registered(controller),
        ):
            await page.wait_until_live()
            await expect(page.page.locator("#banner")).to_be_hidden()
            await expect(page.row("decode-1")).to_contain_text("up to date")
            await stack.aclose()


async def test_stream_is_refused_interrupted_or_idle(browser: Browser) -> None:
    async with scripted(browser, clock=True) as (controller, page):
        controller.refuse_streams = 503
        controller.cut_streams()
        await expect(page.page.locator("#banner")).to_contain_text("Controller error: not now.")
        await expect(page.page.locator("#banner-next")).to_have_text(re.compile(r"Retrying in \d+ s\."))
        controller.refuse_streams = None
        await page.button("Retry now").click()
        await page.wait_until_live()
        # In odd pieces, and with comments and other fields that the format allows.
        message = b': a remark\r\nid: 7\r\nevent: event\r\ndata: {"event_id": "e1",\r\ndata:'
        rest = str(event("e1", "pin", "done")).replace("'", '"').replace("None", "null")
        for piece in (
            message[:5],
            message[5:40],
            message[40:],
            rest[rest.index(",") + 1 :].encode(),
            b"\r",
            b"\n\r\n",
        ):
            controller.send(piece)
        await expect(page.events).to_have_count(1)
        await page.page.clock.fast_forward(26_000)
        await expect(page.page.locator("#banner")).to_contain_text("The controller has stopped sending data.")
        await page.page.clock.fast_forward(1_000)
        await page.wait_until_live()


async def test_events_out_of_order_and_too_many(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        controller.publish_event(
            event("e1", state="done", created_at=2e9, result=RESULT | {"tokens": 2048, "chunks": 8})
        )
        controller.publish_event(event("e1", state="running", created_at=2e9, chunks_done=3))
        for number in range(250):
            controller.publish_event(event(f"old-{number}", "pin", "queued", created_at=1e9 + number))
        await expect(page.events).to_have_count(100)
        await expect(page.events.first).to_contain_text("2,048 tokens moved.")
        await expect(page.events.nth(1)).to_contain_text("Queued")


async def test_invalid_token_ids(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        for text, message in [
            ("", "Enter token ids."),
            ("1, 2, x<b>3", "“x<b>3” is not a token id: token ids are integers from 0 to 4,294,967,295."),
            ("-1", "“-1” is not a token id"),
            ("4294967296", "“4294967296” is not a token id"),
        ]:
            await page.look_up(text, tokens=True)
            await expect(page.look_up_outcome).to_contain_text(message)
            await expect(page.page.locator("#text")).to_be_focused()
        assert not controller.requests
        await page.look_up("[0, 4294967295\n 7]", tokens=True)
        await expect(page.held(*RAM_1)).to_be_checked()
        assert controller.requests == [("lookup", {"tokens": [0, 4294967295, 7]})]


async def test_errors_of_the_controller(browser: Browser, tmp_path: Path) -> None:
    async with running_controller(tmp_path) as controller, visiting(browser, controller.url) as page:
        await page.wait_until_live()
        await page.look_up("1", tokens=True)
        await expect(page.look_up_outcome).to_have_text(
            "Controller error: no model is known yet: no engine has connected to a registered instance."
        )
        async with registered(controller, "one", KEYS):
            await page.look_up(TEXT, tokens=True)
            await page.choose("Pin")
            await page.page.locator("#seconds").fill("soon")
            await page.button("Pin").click()
            await expect(page.outcome).to_contain_text("Controller error: ttl: 'soon' is not a duration")
        await expect(page.found).to_contain_text("one is disconnected.")


async def test_keyboard_only(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        controller.answers["lookup"] = (
            200,
            {
                "model": "llama",
                "num_tokens": 1100,
                "instances": {"decode-1": {"ram": 1024}, "decode-2": {"ram": 256}},
            },
        )
        controller.answers["unpin"] = 200, {"event_id": "e1", "num_tokens": 256}
        keyboard = page.page.keyboard
        await keyboard.press("Tab")
        await expect(page.page.get_by_text("Skip to the instances")).to_be_focused()
        await page.page.locator("#text").focus()
        await keyboard.type("a prompt")
        await keyboard.press("Control+Enter")
        await expect(page.held("decode-1", "ram")).to_be_checked()
        for _ in range(4):  # Model, salt, the button, the holders.
            await keyboard.press("Tab")
        await keyboard.press("ArrowDown")
        await expect(page.held("decode-2", "ram")).to_be_checked()
        await keyboard.press("Tab")
        for _ in range(3):  # Copy, Pin, Unpin.
            await keyboard.press("ArrowRight")
        await keyboard.press("Enter")
        await expect(page.outcome).to_have_text("Requested …")
        path, body = controller.requests[-1]
        assert (path, body["instance"]) == ("unpin", "decode-2")


async def test_files_are_served_with_their_headers(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path, token=TOKEN) as controller,
        httpx.AsyncClient(base_url=controller.url, verify=False) as client,
    ):
        for path in PAGE_FILES.iterdir():
            at = "/" if path.name == "index.html" else f"/page/{path.name}"
            answer = await client.get(at)
            assert answer.content == path.read_bytes()
            assert answer.headers["content-type"].split(";")[0] in {
                "text/html", "text/css", "text/javascript", "image/svg+xml",
            }  # fmt: skip
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'self';" in answer.headers["content-security-policy"]
            for known in (answer.headers["etag"], f'"other", W/{answer.headers["etag"]}'):
                again = await client.get(at, headers={"If-None-Match": known})
                assert (again.status_code, again.content) == (304, b"")
            assert (await client.head(at)).headers["content-length"] == str(len(path.read_bytes()))
        assert (await client.get("/page/..%2fpage.py")).status_code == 404
        assert (await client.get("/page/index.html")).status_code == 404


async def test_wrong_browser_clock(browser: Browser) -> None:
    async with scripted(browser, at=datetime.now(UTC) + timedelta(hours=2)) as (_, page):
        await expect(page.row("decode-1")).to_contain_text(re.compile(r"heartbeat \d+\ss ago"))


async def test_pins_and_what_a_move_does_to_them(browser: Browser, controller: RunningController) -> None:
    async with (
        controller.instance("decode-1", ram=rig.KEYS) as one,
        controller.instance("decode-2"),
        visiting(browser, controller.url) as page,
    ):
        await expect(page.row("decode-1")).to_contain_text("up to date")
        pins = (await page.open("decode-1")).locator(".pins").filter(has_text="Pins")
        await expect(pins).to_be_hidden()
        for ttl in ({}, {"ttl": "10m", "tokens": rig.TOKENS[:CHUNK]}):
            prompt = {"tokens": rig.TOKENS} | ttl
            await controller.done("/pin", instance="decode-1", tier="ram", **prompt)
        await one.send(heartbeat())
        lines = [re.compile(r"1 chunk, until [\d -]*\d\d:\d\d:\d\d$"), "5 chunks, until unpinned"]
        await expect(pins.locator("li")).to_have_text(lines)
        positions = {"old_position": ["decode-1", "ram"], "new_position": ["decode-2", "ram"]}
        await controller.done("/move", **positions, tokens=rig.TOKENS)
        await one.send(heartbeat())
        await expect(page.events.first).to_contain_text("5 of its pinned chunks unpinned.")
        await expect(pins).to_be_hidden()
