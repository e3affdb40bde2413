"""The controller's page in a real browser, Debian's Chromium, with all requests and errors recorded."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, ConsoleMessage, Locator, Page, Request, async_playwright, expect

from tests.fleet.controller.scripted_api import ScriptedAPI, instance

REMEDY = "Chromium is not installed: apt-get install chromium"
ARGUMENTS = [
    "--no-sandbox",  # The sandbox does not work for root.
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
MEASURES = (Path(__file__).with_name("measures.js")).read_text()
"""JavaScript functions that take measurements in the page."""
FAILED_REQUEST = "Failed to load resource"
"""Chromium's message for a response such as 401, or for a missing one. Tests check these elsewhere."""

expect.set_options(timeout=30_000)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Run a browser; skip the test if none is installed."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip(REMEDY)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        await browser.close()


class Visit:
    """One open page, with locators of its parts."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requested: list[str] = []
        self.problems: list[str] = []
        page.on("request", self._note_request)
        page.on("console", self._note_console)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.connection = page.locator("#connection")
        self.rows = page.locator("#rows > .row")
        self.events = page.locator("#events > li")
        self.found = page.locator("#found")
        self.outcome = page.locator("#found .outcome")
        self.look_up_outcome = page.locator("#look-up-outcome")

    def row(self, instance: str) -> Locator:
        """Return the row of an instance in the table."""
        return self.rows.filter(has=self.page.get_by_role("button", name=instance, exact=True))

    def detail(self, instance: str) -> Locator:
        """Return the details of an instance, which are below its row while they are open."""
        return self.page.get_by_role("article", name=f"Instance {instance}", exact=True)

    async def open(self, instance: str) -> Locator:
        """Open the details of an instance."""
        await self.row(instance).get_by_role("button").click()
        await expect(self.detail(instance)).to_be_visible()
        return self.detail(instance)

    def held(self, instance: str, tier: str) -> Locator:
        """Return the radio button of a tier that holds some of the prompt."""
        return self.found.get_by_role("radio", name=f"{instance} · {tier}")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    async def look_up(self, text: str, *, tokens: bool = False) -> None:
        await self.page.get_by_text("Token ids" if tokens else "Prompt", exact=True).first.click()
        await self.page.locator("#text").fill(text)
        await self.button("Look up").click()

    async def choose(self, action: str) -> None:
        await self.found.locator(".segments").get_by_text(action, exact=True).click()

    async def wait_until_live(self) -> None:
        await expect(self.connection).to_have_text("Live")

    async def measure(self, name: str) -> Any:
        """Run a function of ``measures.js``, and return its result."""
        return await self.page.evaluate(f"{MEASURES}\n{name}()")

    def _note_request(self, request: Request) -> None:
        self.requested.append(request.url)

    def _note_console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.startswith(FAILED_REQUEST):
            self.problems.append(message.text)


@asynccontextmanager
async def visiting(
    browser: Browser, url: str, *, clock: bool = False, at: datetime | None = None, **context: Any
) -> AsyncIterator[Visit]:
    """Open the page. With ``clock`` a test can advance its time; ``at`` sets it.

    At the end the page must have had no errors and no requests to other hosts.
    """
    async with await browser.new_context(**context) as opened:
        page = await opened.new_page()
        visit = Visit(page)
        if clock or at is not None:
            await page.clock.install(time=at)
        await page.goto(url)
        yield visit
        assert not visit.problems
        assert {urlsplit(address)[:2] for address in visit.requested} == {urlsplit(url)[:2]}


@asynccontextmanager
async def scripted(browser: Browser, **visit: Any) -> AsyncIterator[tuple[ScriptedAPI, Visit]]:
    """Run a scripted controller and its page. One of its two instances holds a part of every prompt."""
    controller = ScriptedAPI()
    controller.instances = [instance("decode-1"), instance("decode-2")]
    found = {"decode-1": {"ram": 1024}}
    controller.answers["lookup"] = 200, {"model": "llama", "num_tokens": 1100, "instances": found}
    async with controller.serving() as url, visiting(browser, url, **visit) as page:
        await page.wait_until_live()
        yield controller, page
