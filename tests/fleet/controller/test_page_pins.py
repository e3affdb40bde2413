"""Pins on the controller's page."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Browser, expect

from tests.fleet.controller.browser import visiting
from tests.fleet.controller.controlling import CHUNK, KEYS, TOKENS, RunningController
from tests.fleet.controller.registering import heartbeat

pytestmark = pytest.mark.anyio


async def test_pins_and_what_a_move_does_to_them(browser: Browser, controller: RunningController) -> None:
    async with (
        controller.instance("decode-1", ram=KEYS) as one,
        controller.instance("decode-2"),
        visiting(browser, controller.url) as page,
    ):
        pins = page.card("decode-1").locator(".pins")
        await expect(page.card("decode-1")).to_contain_text("up to date")
        await expect(pins).to_be_hidden()
        for ttl in ({}, {"ttl": "10m", "tokens": TOKENS[:CHUNK]}):
            prompt = {"tokens": TOKENS} | ttl
            await controller.done("/pin", instance="decode-1", tier="ram", **prompt)
        await one.send(heartbeat())
        lines = [re.compile(r"1 chunk, until [\d -]*\d\d:\d\d:\d\d$"), "5 chunks, until unpinned"]
        await expect(pins.locator("li")).to_have_text(lines)
        move = {"old_position": ["decode-1", "ram"], "new_position": ["decode-2", "ram"], "tokens": TOKENS}
        await controller.done("/move", **move)
        await one.send(heartbeat())
        await expect(page.events.first).to_contain_text("5 of its pinned chunks unpinned.")
        await expect(pins).to_be_hidden()
