"""The controller's page, used in a real browser: mostly of a real controller, whose instances say what a test
has them say; of a scripted one where a real one would never be so slow, so broken or so full."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, expect
from websockets.asyncio.client import connect

from kvtier.agent.protocol import CONNECT_PATH, Delete, Done, Failed, Fetch, InStep, Progress, Serves
from kvtier.controller.models import Models
from kvtier.controller.page import FILES
from kvtier.controller.serve import Controller, controlling
from kvtier.controller.settings import service_settings
from kvtier.keys import ChunkKey, split_keys
from tests.cli.fleet import CHUNK_TOKENS, fleet
from tests.controller.registering import DISK, MODEL, RAM, RegisteringInstance, heartbeat
from tests.controller.scripted import RESULT, event, tier
from tests.controller.visiting import scripted, visiting
from tests.peers.serving import until

pytestmark = pytest.mark.anyio

TOKEN = "a token that is long enough"
TOKENS = list(range(1000, 2100))
"""Four whole chunks and a part of one."""
TEXT = " ".join(map(str, TOKENS))
NO_COMMANDS: Any = None
"""A fleet can run commands; this one need not."""
RAM_1 = ["decode-1", "ram"]
AT_RAM_1 = {"instance": "decode-1", "tier": "ram"}


@asynccontextmanager
async def real(folder: Path, port: int = 0, **settings: Any) -> AsyncIterator[tuple[Controller, str]]:
    """A real controller, and its URL."""
    values = {"listen": f"127.0.0.1:{port}", "state": folder / "state.sqlite", **settings}
    async with controlling(service_settings(**values)) as controller:
        yield controller, f"http://127.0.0.1:{controller.address[1]}"


@asynccontextmanager
async def registered(
    controller: Controller,
    name: str = "decode-1",
    keys: Sequence[ChunkKey] = (),
    place: int = RAM,
    token: str | None = None,
) -> AsyncIterator[RegisteringInstance]:
    """An instance that has told of a model and of what it holds."""
    url = f"ws://127.0.0.1:{controller.address[1]}{CONNECT_PATH}"
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with connect(url, compression=None, proxy=None, additional_headers=headers) as websocket:
        one = RegisteringInstance(websocket)
        await one.register(name)
        await one.say(Serves([MODEL]))
        await one.tell(keys, place)
        await one.say(InStep(), heartbeat(used=1 << 29, looked_up=10, found=2))
        await until(lambda: controller.registry.find(name).heartbeat is not None)
        yield one


KEYS = list(Models().prompt(MODEL, TOKENS).keys)[:4]
"""Of the whole chunks."""


async def test_instances_come_and_go(browser: Browser, tmp_path: Path) -> None:
    async with real(tmp_path) as (controller, url), visiting(browser, url, clock=True) as page:
        await expect(page.page.locator("#register")).to_contain_text(f"url: {url}\n  instance_id:")
        async with registered(controller) as one:
            card = page.card("decode-1")
            await expect(card).to_contain_text("in step")
            for fact in ("Host test-host, process 4242", "Peers decode-1:8200 over tcp", "Engines engine"):
                name, _, value = fact.partition(" ")
                await expect(card.locator("dl > div").filter(has_text=name)).to_have_text(name + value)
            await expect(card.get_by_role("meter", name="Fill of tier ram")).to_have_attribute(
                "aria-valuetext", re.compile(r"512\sMiB of 1\.00\sGiB")
            )
            await expect(card.get_by_text("found 60 % of 10 chunks")).to_be_visible()
            await expect(page.page.locator("#no-instances")).to_be_hidden()
            await one.say(heartbeat(used=1 << 28))
            await expect(card.get_by_text("256 MiB of 1.00 GiB · 25 %")).to_be_visible()
        await expect(card.locator("header")).to_contain_text("gone")
        await page.page.clock.fast_forward(121_000)
        await expect(page.cards).to_have_count(0)
        await expect(page.page.locator("#register")).to_be_visible()


async def test_a_move(browser: Browser, tmp_path: Path) -> None:
    async with (
        real(tmp_path) as (controller, url),
        registered(controller, "one", KEYS) as one,
        registered(controller, "two") as two,
        visiting(browser, url) as page,
    ):
        await expect(page.cards).to_have_count(2)
        await page.look_up(TEXT, tokens=True)
        await expect(page.found).to_contain_text("1,100 tokens for meta/llama. The first 1,024 (93 %)")
        await expect(page.held("one", "ram")).to_be_checked()
        await page.button("Move").click()
        fetch = await two.hear()
        assert isinstance(fetch, Fetch)
        assert (fetch.peer, split_keys(fetch.keys)) == ("one:8200", KEYS)
        await two.say(Progress(fetch.ticket, 2, 1 << 20))
        for bar in (page.found, page.events.first):
            await expect(bar.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "50")
        await expect(page.events.first).to_contain_text("one · ram → two · ram")
        await expect(page.events.first).to_contain_text("2 of 4 chunks, 1.00 MiB")
        await two.tell(KEYS)
        await two.say(Done(fetch.ticket, fetch.keys, 4, 1 << 21))
        delete = await one.hear()
        assert isinstance(delete, Delete)
        assert split_keys(delete.keys) == KEYS
        await one.tell([], removed=KEYS)
        await one.say(Done(delete.ticket, delete.keys, 4, 0))
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
        await expect(page.card("two")).to_contain_text("in step")


async def test_a_move_that_fails(browser: Browser, tmp_path: Path) -> None:
    async with (
        real(tmp_path) as (controller, url),
        registered(controller, "one", KEYS, DISK),
        registered(controller, "two") as two,
        visiting(browser, url) as page,
    ):
        await page.look_up(TEXT, tokens=True)
        await page.button("Move").click()
        fetch = await two.hear()
        assert isinstance(fetch, Fetch)
        await two.say(Failed(fetch.ticket, "tier ram is full of pinned chunks"))
        for said in (page.outcome, page.events.first):
            await expect(said).to_contain_text(re.compile(r"Failed: .*tier ram is full of pinned chunks"))
        await expect(page.held("one", "ssd")).to_be_checked()


CALLS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("Copy", "", "move", {"old_position": RAM_1, "new_position": ["decode-2", "ram"], "copy": True}),
    ("Pin", "", "pin", AT_RAM_1),
    ("Pin", "10m", "pin", {**AT_RAM_1, "ttl": "10m"}),
    ("Pin", "2.5", "pin", {**AT_RAM_1, "ttl": 2.5}),
    ("Unpin", "", "unpin", AT_RAM_1),
    ("Prefetch", "5s", "prefetch", {**AT_RAM_1, "tier": "ssd", "deadline": "5s"}),
]


async def test_what_is_asked_for(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        controller.instances[0]["tiers"].append(tier("ssd", "disk", 1 << 40, 0))
        controller.tell_instances()
        await page.page.get_by_label("Salt").fill("tenant-1")
        await page.look_up("a prompt")
        await expect(page.held(*RAM_1)).to_be_checked()
        asked = {"prompt": "a prompt", "salt": "tenant-1"}
        assert controller.asked == [("lookup", asked)]
        for number, (action, field, path, body) in enumerate(CALLS):
            controller.asked.clear()
            controller.answers[path] = 200, {"event_id": f"e{number}", "num_tokens": 1024}
            await page.choose(action)
            if field:
                await page.page.locator("#seconds").fill(field)
            await page.button(action).click()
            await expect(page.outcome).to_have_text("Asked for …")
            assert controller.asked == [(path, {**asked, "model": "llama", **body})]
            result = RESULT | {"tokens": 2048, "chunks": 8}
            controller.tell_event(event(f"e{number}", action.lower(), "done", result=result))
            await expect(page.outcome).to_have_attribute("data-state", "done")
            await expect(page.outcome).to_contain_text("2,048 tokens")


async def test_nothing_is_cleared_unless_confirmed(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        controller.answers["clear"] = 200, {"event_id": "e1", "num_tokens": 1024}
        await page.look_up("a prompt")
        await page.choose("Clear")
        dialog = page.page.get_by_role("dialog")
        for refuse in (page.button("Keep it").click, lambda: page.page.keyboard.press("Escape")):
            await page.button("Clear …").click()
            await expect(dialog).to_contain_text(
                "1,024 tokens of this prompt will be removed from decode-1 · ram."
            )
            await expect(page.button("Keep it")).to_be_focused()
            await refuse()
            await expect(dialog).to_be_hidden()
        assert [path for path, _ in controller.asked] == ["lookup"]
        await page.button("Clear …").click()
        await page.button("Clear").click()
        await expect(page.outcome).to_have_text("Asked for …")
        assert controller.asked[1][0] == "clear"
        controller.answers["lookup"] = 200, {"model": "llama", "num_tokens": 1100, "instances": {}}
        result = RESULT | {"tokens": 1024, "chunks": 4, "removed": 4, "bytes": 1 << 20}
        controller.tell_event(event("e1", "clear", "done", num_tokens=1024, result=result))
        await expect(page.found).to_contain_text("No instance holds any of it.")
        await expect(page.events.first).to_contain_text("1,024 tokens removed, 1.00 MiB.")
        await expect(page.found.locator(".segments")).to_be_hidden()


async def test_the_token(browser: Browser, tmp_path: Path) -> None:
    async with (
        real(tmp_path, token=TOKEN) as (controller, url),
        visiting(browser, url) as page,
        registered(controller, token=TOKEN),
    ):
        dialog = page.page.get_by_role("dialog")
        await expect(page.page.get_by_label("Token", exact=True)).to_be_focused()
        await page.page.keyboard.type("a token that is wrong")
        await page.page.keyboard.press("Enter")
        await expect(dialog).to_contain_text("The controller does not accept this token.")
        await expect(page.cards).to_have_count(0)
        await page.button("Not now").click()
        await expect(page.connection).to_have_text("No token")
        await page.button("Enter the token").click()
        await page.page.get_by_label("Token", exact=True).fill(TOKEN)
        await page.button("Connect").click()
        await page.live()
        await expect(dialog).to_be_hidden()
        await expect(page.card("decode-1")).to_be_visible()
        await page.page.reload()
        await expect(page.card("decode-1")).to_be_visible()
        assert not [one for one in page.requested if TOKEN in one or "token" in one]


async def test_a_restarted_controller(browser: Browser, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with real(tmp_path) as (controller, url), registered(controller):
            page = await stack.enter_async_context(visiting(browser, url))
            await expect(page.card("decode-1")).to_contain_text("in step")
            await page.look_up(TEXT, tokens=True)
            await expect(page.found).to_contain_text("No instance holds any of it.")
        await expect(page.connection).to_have_text("Disconnected")
        await expect(page.page.locator("#banner")).to_contain_text("What is shown is of")
        await page.button("Look up").click()
        await expect(page.look_up_outcome).to_have_text("The controller cannot be reached.")
        async with real(tmp_path, controller.address[1]) as (controller, url), registered(controller):
            await page.live()
            await expect(page.page.locator("#banner")).to_be_hidden()
            await expect(page.card("decode-1")).to_contain_text("in step")
            await stack.aclose()


async def test_a_stream_that_is_refused_cut_or_silent(browser: Browser) -> None:
    async with scripted(browser, clock=True) as (controller, page):
        controller.refuse_streams = 503
        controller.cut()
        await expect(page.page.locator("#banner")).to_contain_text("The controller says: not now.")
        await expect(page.page.locator("#banner-next")).to_have_text(re.compile(r"Next try in \d+ s\."))
        controller.refuse_streams = None
        await page.button("Try now").click()
        await page.live()
        # In pieces that no sender would choose, and with what the format allows beside.
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
        await expect(page.page.locator("#banner")).to_contain_text("The controller has gone silent.")
        await page.page.clock.fast_forward(1_000)
        await page.live()


async def test_events_out_of_order_and_too_many(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        controller.tell_event(
            event("e1", state="done", created_at=2e9, result=RESULT | {"tokens": 2048, "chunks": 8})
        )
        controller.tell_event(event("e1", state="running", created_at=2e9, chunks_done=3))
        for number in range(250):
            controller.tell_event(event(f"old-{number}", "pin", "queued", created_at=1e9 + number))
        await expect(page.events).to_have_count(100)
        await expect(page.events.first).to_contain_text("2,048 tokens moved.")
        await expect(page.events.nth(1)).to_contain_text("Waits for its turn")


async def test_what_is_no_token_id(browser: Browser) -> None:
    async with scripted(browser) as (controller, page):
        for text, said in [
            ("", "Write the token ids first."),
            ("1, 2, x<b>3", "“x<b>3” is no token id: these are whole numbers from 0 to 4,294,967,295."),
            ("-1", "“-1” is no token id"),
            ("4294967296", "“4294967296” is no token id"),
        ]:
            await page.look_up(text, tokens=True)
            await expect(page.look_up_outcome).to_contain_text(said)
            await expect(page.page.locator("#text")).to_be_focused()
        assert not controller.asked
        await page.look_up("[0, 4294967295\n 7]", tokens=True)
        await expect(page.held(*RAM_1)).to_be_checked()
        assert controller.asked == [("lookup", {"tokens": [0, 4294967295, 7]})]


async def test_what_the_controller_refuses(browser: Browser, tmp_path: Path) -> None:
    async with real(tmp_path) as (controller, url), visiting(browser, url) as page:
        await page.live()
        await page.look_up("1", tokens=True)
        await expect(page.look_up_outcome).to_have_text(
            "The controller says: there is no model yet: no engine has said to an instance here which one it "
            "serves."
        )
        async with registered(controller, "one", KEYS):
            await page.look_up(TEXT, tokens=True)
            await page.choose("Pin")
            await page.page.locator("#seconds").fill("soon")
            await page.button("Pin").click()
            await expect(page.outcome).to_contain_text("The controller says: ttl: 'soon' is no duration")
        await expect(page.found).to_contain_text("one is not connected any more.")


async def test_with_the_keyboard_alone(browser: Browser) -> None:
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
        for _ in range(4):  # Model, salt, the button, who holds it.
            await keyboard.press("Tab")
        await keyboard.press("ArrowDown")
        await expect(page.held("decode-2", "ram")).to_be_checked()
        await keyboard.press("Tab")
        for _ in range(3):  # Copy, Pin, Unpin.
            await keyboard.press("ArrowRight")
        await keyboard.press("Enter")
        await expect(page.outcome).to_have_text("Asked for …")
        path, body = controller.asked[-1]
        assert (path, body["instance"]) == ("unpin", "decode-2")


async def test_how_the_files_are_served(tmp_path: Path) -> None:
    async with real(tmp_path, token=TOKEN) as (_, url), httpx.AsyncClient(base_url=url) as client:
        for path in FILES.iterdir():
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


async def test_a_clock_that_is_wrong(browser: Browser) -> None:
    async with scripted(browser, at=datetime.now(UTC) + timedelta(hours=2)) as (_, page):
        await expect(page.card("decode-1")).to_contain_text(re.compile(r"heard \d+\ss ago"))
