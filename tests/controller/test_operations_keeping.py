"""Pins and clears: what is kept, for how long, and what is not."""

from __future__ import annotations

import pytest

from kvtier.agent.protocol import Lost
from tests.controller.controlling import (
    A_TO_B,
    CHUNK,
    KEYS,
    TOKENS,
    WHOLE,
    RunningController,
    tokens_of,
)
from tests.controller.registering import DISK, RAM, keys_of

pytestmark = pytest.mark.anyio


# Pins


async def test_what_is_pinned_is_pinned_again_for_an_instance_anew(
    controller: RunningController,
) -> None:
    async with controller.instance("a", ram=KEYS[:3], disk=KEYS) as a:
        event = await controller.done("/pin", instance="a", tier="ram", tokens=TOKENS)
        assert (event["kind"], event["target"], event["num_tokens"]) == ("pin", ["a", "ram"], 3 * CHUNK)
        assert event["result"]["chunks"] == 3
        assert a.pinned == dict.fromkeys(KEYS[:3])
        await controller.done("/pin", instance="a", tier="ssd", tokens=TOKENS, ttl="10m")
        assert a.pinned[KEYS[4]] == 600
    await controller.until(lambda: not controller.registry.members)
    async with controller.instance("a", disk=KEYS[:4]) as a:
        await controller.until(lambda: len(a.commands) == 2)
        assert set(a.pinned) == set(KEYS[:4])
        assert 500 < max(seconds or 0 for seconds in a.pinned.values()) <= 600
        event = await controller.done("/unpin", instance="a", tier="ssd", tokens=TOKENS)
        assert (event["num_tokens"], event["result"]["chunks"]) == (WHOLE, 4)
        assert not a.pinned
    await controller.until(lambda: not controller.registry.members)
    async with controller.instance("a", disk=KEYS) as a:
        await controller.done("/pin", instance="a", tier="ram", tokens=TOKENS)
        assert not a.commands, "nothing is held there, and nothing was left of the pins"


async def test_a_pin_ends_with_the_last_copy(controller: RunningController) -> None:
    pins = controller.controller.operations._pins
    async with controller.instance("a", ram=KEYS, disk=KEYS[:2]), controller.instance("b"):
        await controller.done("/pin", instance="a", tier="ram", tokens=TOKENS)
        await controller.done("/move", **A_TO_B)
        assert set(pins.keys("a")) == set(KEYS[:2]), "which the disk still has"
        await controller.done("/clear", instance="a", tier="ssd")
        assert pins.keys("a") == []


# Clearing


async def test_a_prompt_is_cleared_from_one_tier_or_from_all(controller: RunningController) -> None:
    async with controller.instance("a", ram=[*KEYS, *keys_of("other", 3)], disk=KEYS[2:]) as a:
        event = await controller.done("/clear", instance="a", tier="ram", tokens=tokens_of(2))
        assert (event["num_tokens"], event["result"]["removed"], event["result"]["bytes"]) == (
            2 * CHUNK,
            2,
            200,
        )
        assert event["target"] == ["a", "ram"]
        event = await controller.done("/clear", instance="a", tokens=TOKENS)
        assert event["target"] == ["a", None]
        assert (event["num_tokens"], event["chunks"], event["result"]["removed"]) == (2 * CHUNK + 44, 6, 6)
        assert list(a.held[RAM]) == keys_of("other", 3)
        assert not a.held[DISK]


async def test_everything_is_cleared_from_one_tier_or_from_all(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS, disk=KEYS) as a:
        accepted = await controller.ask("/clear", instance="a", tier="disk")
        assert accepted["num_tokens"] == 0, "whose they are is not asked"
        event = await controller.ended(accepted)
        assert (event["chunks"], event["result"]["removed"], event["model"]) == (5, 5, None)
        assert (len(a.held[RAM]), len(a.held[DISK])) == (5, 0)
        await controller.done("/clear", instance="a")
        assert not a.held[RAM]
        count = len(a.commands)
        own = await controller.done("/clear", instance="a", tier="ssd")
        assert (own["started_at"], len(a.commands)) == (None, count), "there was nothing left to do"


async def test_what_has_not_been_told_yet_is_cleared_all_the_same(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS) as a:
        await a.say(Lost())
        await controller.until(lambda: not controller.registry.find("a").in_step)
        event = await controller.done("/clear", instance="a", tier="ram", tokens=TOKENS)
        assert event["result"]["removed"] == 5
        a.held[RAM] = dict.fromkeys(KEYS)
        assert (await controller.done("/clear", instance="a"))["result"]["removed"] == 5
