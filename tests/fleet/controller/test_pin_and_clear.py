"""Pins and clears."""

from __future__ import annotations

import anyio
import pytest

from kvtier.fleet.controller import operation
from kvtier.fleet.member.protocol import Command, Delete, Lost, Pin
from kvtier.memory.keys import chunk_keys, root_key, split_keys
from tests.rigs.running_controller import (
    A_TO_B,
    B_TO_A,
    CHUNK,
    DISK,
    KEYS,
    MODEL,
    RAM,
    REST,
    TOKENS,
    WHOLE,
    Gate,
    RunningController,
    keys_of,
    tokens_of,
)

pytestmark = pytest.mark.anyio


# Pins


async def test_pins_are_restored_for_a_reconnected_instance(
    controller: RunningController,
) -> None:
    async with controller.instance("a", ram=KEYS[:3], disk=KEYS) as a:
        event = await controller.done("/pin", instance="a", tier="ram", tokens=TOKENS)
        assert (event["kind"], event["target"], event["num_tokens"]) == ("pin", ["a", "ram"], 3 * CHUNK)
        assert event["result"]["chunks"] == 3
        assert a.pinned == dict.fromkeys(KEYS[:3])
        await controller.done("/pin", instance="a", tier="ssd", tokens=TOKENS, ttl="10m")
        assert a.pinned[KEYS[4]] == 600
    await controller.wait_until(lambda: not controller.registry.members)
    async with controller.instance("a", disk=KEYS[:4]) as a:
        await controller.wait_until(lambda: len(a.commands) == 2)
        assert set(a.pinned) == set(KEYS[:4])
        assert 500 < max(seconds or 0 for seconds in a.pinned.values()) <= 600
        event = await controller.done("/unpin", instance="a", tier="ssd", tokens=TOKENS)
        assert (event["num_tokens"], event["result"]["chunks"]) == (WHOLE, 4)
        assert not a.pinned
    await controller.wait_until(lambda: not controller.registry.members)
    async with controller.instance("a", disk=KEYS) as a:
        await controller.done("/pin", instance="a", tier="ram", tokens=TOKENS)
        assert not a.commands, "nothing is held there, and no pin is left"


async def test_pin_ends_with_the_last_copy(controller: RunningController) -> None:
    pins = controller.controller.operations.pins
    async with controller.instance("a", ram=KEYS, disk=KEYS[:2]), controller.instance("b"):
        await controller.done("/pin", instance="a", tier="ram", tokens=TOKENS)
        await controller.done("/move", **A_TO_B)
        assert set(pins.keys("a")) == set(KEYS[:2]), "the disk still holds these"
        await controller.done("/clear", instance="a", tier="ssd")
        assert pins.keys("a") == []


async def test_instance_is_told_of_pins_that_end(controller: RunningController) -> None:
    """It would keep that on a chunk that it is storing again, and protect what no list contains."""
    async with controller.instance("a", ram=KEYS) as a, controller.instance("b"):
        await controller.done("/pin", instance="a", tier="ram", tokens=TOKENS)
        await controller.done("/move", **{**A_TO_B, "tokens": tokens_of(2)})
        assert set(a.pinned) == set(KEYS[2:])
        await controller.done("/clear", instance="a", tier="ram")
        assert not a.pinned


async def test_chunks_that_are_stored_again_while_they_are_cleared_stay_pinned(
    controller: RunningController,
) -> None:
    """They are still listed. The instance has forgotten their pins, and holds unpinned copies."""
    async with controller.instance("a", ram=KEYS) as a:
        await controller.done("/pin", instance="a", tier="ram", tokens=TOKENS, ttl="10m")

        async def lose_and_store_again(command: Command) -> None:
            if isinstance(command, Delete):
                for key in split_keys(command.keys):
                    del a.held[RAM][key], a.pinned[key]
                await a.store(RAM, KEYS[:3])
                a.held[RAM].clear()  # The command itself finds nothing.
            elif not a.held[RAM]:
                a.held[RAM].update(dict.fromkeys(KEYS[:2]))  # The third one has been evicted since.

        a.before = lose_and_store_again
        event = await controller.done("/clear", instance="a", tier="ram", tokens=TOKENS)
        assert set(a.pinned) == set(KEYS[:2]) == set(controller.controller.operations.pins.keys("a"))
        assert all(seconds is not None and 500 < seconds <= 600 for seconds in a.pinned.values())
        assert event["result"]["unpinned"] == len(KEYS) - 2


async def test_an_unpin_waits_for_pins(controller: RunningController) -> None:
    """Else the pin would be listed when it is confirmed, after the unpin has ended it on the instance."""
    async with controller.instance("a", ram=KEYS) as a:
        pin, gate = await controller.post_held("/pin", a, Pin, instance="a", tier="ram", tokens=TOKENS)
        unpin = await controller.post("/unpin", instance="a", tier="ram", tokens=TOKENS)
        await anyio.sleep(0.05)
        assert [type(command) for command in a.commands] == [Pin]
        gate.opened.set()
        for event in (pin, unpin):
            await controller.wait_for_end(event)
        assert not a.pinned
        assert not controller.controller.operations.pins.keys("a")


@pytest.mark.parametrize("path", ["/unpin", "/clear"])
async def test_what_ends_pins_waits_until_they_are_restored(controller: RunningController, path: str) -> None:
    """Else those that are still to be restored would be in force, and in no list."""
    async with controller.instance("a", ram=KEYS, disk=KEYS[:2]):
        for tier, ttl in (("ram", "1h"), ("ssd", "2h")):
            await controller.done("/pin", instance="a", tier=tier, tokens=TOKENS, ttl=ttl)
    await controller.wait_until(lambda: not controller.registry.members)
    gate = Gate(Pin)
    async with controller.instance("a", ram=KEYS, before=gate) as a:
        await gate.reached.wait()
        ended = await controller.post(path, instance="a", tier="ram", tokens=TOKENS)
        await anyio.sleep(0.05)
        assert [type(command) for command in a.commands] == [Pin]
        gate.opened.set()
        await controller.wait_for_end(ended)
        await controller.wait_until(lambda: len(a.commands) >= 3)
        assert not a.pinned
        assert not controller.controller.operations.pins.keys("a")


async def test_an_instance_that_restores_no_pins_delays_their_end_once(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pin without an answer ends the restoring, and what has waited for it goes on."""
    async with controller.instance("a", ram=KEYS, disk=KEYS[:2]):
        for tier, ttl in (("ram", "1h"), ("ssd", "2h")):
            await controller.done("/pin", instance="a", tier=tier, tokens=TOKENS, ttl=ttl)
    await controller.wait_until(lambda: not controller.registry.members)
    monkeypatch.setattr(operation, "STALL_SECONDS", 0.2)
    gate = Gate(Pin)
    async with controller.instance("a", ram=KEYS, before=gate) as a:
        await gate.reached.wait()
        await controller.done("/unpin", instance="a", tier="ram", tokens=TOKENS)
        assert [type(command) for command in a.commands].count(Pin) == len(a.cancelled) == 1
        assert not controller.controller.operations.pins.keys("a")


async def test_move_and_clear_report_the_pins_that_they_end(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS, disk=KEYS[:2]), controller.instance("b"):
        await controller.done("/pin", instance="a", tier="ram", tokens=TOKENS)
        await controller.done("/pin", instance="a", tier="ram", tokens=tokens_of(3), ttl="10m")
        copied = await controller.done("/move", **A_TO_B, copy=True)
        assert copied["result"]["unpinned"] == 0
        moved = await controller.done("/move", **A_TO_B)
        assert moved["result"]["unpinned"] == 3, "the disk still holds two; one was pinned twice"
        cleared = await controller.done("/clear", instance="a", tier="ssd", tokens=TOKENS)
        assert cleared["result"]["unpinned"] == 2
        await controller.done("/pin", instance="b", tier="ram", tokens=TOKENS)
        assert (await controller.done("/move", **B_TO_A))["result"]["unpinned"] == 5
        await controller.done("/pin", instance="a", tier="ram", tokens=TOKENS)
        unpinned = await controller.done("/unpin", instance="a", tier="ram", tokens=TOKENS)
        assert unpinned["result"]["unpinned"] == 5


async def test_pins_are_listed(controller: RunningController) -> None:
    assert await controller.get("/pins") == {"pins": [], "total": 0}
    async with controller.instance("a", ram=KEYS), controller.instance("b", ram=KEYS[:1]) as b:
        await controller.done("/pin", instance="a", tier="ram", tokens=TOKENS)
        await controller.done("/pin", instance="b", tier="ram", tokens=TOKENS, ttl="10m")
        listed = await controller.get("/pins")
        assert listed["total"] == 2
        second, first = listed["pins"]
        assert (first["instance"], first["chunks"], first["held"], first["until"]) == ("a", 5, 5, None)
        assert (second["instance"], second["chunks"], second["held"]) == ("b", 1, 1)
        assert second["until"] - second["pinned_at"] == pytest.approx(600)
        assert await controller.get("/pins", instance="a") == {"pins": [first], "total": 1}
        assert await controller.get("/pins", limit=1) == {"pins": [second], "total": 2}
        assert (await controller.get("/instances/a"))["pinned"] == 5
        metrics = (await controller.client.get("/metrics")).text
        assert 'kvtier_controller_pinned_chunks{instance="a"} 5.0' in metrics
        await b.remove(RAM, KEYS)
        await controller.wait_until(
            lambda: not controller.registry.holders.count(controller.registry.find("b").places[RAM])
        )
        [lost] = (await controller.get("/pins", instance="b"))["pins"]
        assert lost == second | {"held": 0}
    await controller.wait_until(lambda: not controller.registry.members)
    assert [pin["held"] for pin in (await controller.get("/pins"))["pins"]] == [0, 0]


# Clearing


async def test_clear_of_a_prompt_from_one_tier_or_all(controller: RunningController) -> None:
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
        assert (event["num_tokens"], event["chunks"], event["result"]["removed"]) == (2 * CHUNK + REST, 6, 6)
        assert list(a.held[RAM]) == keys_of("other", 3)
        assert not a.held[DISK]


async def test_prompts_that_were_stored_up_to_their_end_are_found_and_cleared(
    controller: RunningController,
) -> None:
    """As transfers to decode instances and programs do. Another engine has stored its whole blocks."""
    tokens = [*TOKENS, 7, 8, 9]
    last = chunk_keys(root_key(MODEL.namespace), tokens, CHUNK, tail=True)[-1]
    async with (
        controller.instance("a", ram=[*KEYS, last], disk=KEYS) as a,
        controller.instance("b", ram=KEYS),
    ):
        found = await controller.post("/lookup", tokens=tokens)
        assert found["num_tokens"] == len(tokens)
        held = {"a": {"ram": len(tokens), "ssd": len(TOKENS)}, "b": {"ram": len(TOKENS)}}
        assert found["instances"] == held
        event = await controller.done("/clear", instance="a", tier="ram", tokens=tokens)
        assert (event["num_tokens"], event["chunks"], event["result"]["removed"]) == (len(tokens), 6, 6)
        assert not a.held[RAM]
        event = await controller.done("/clear", instance="a", tokens=tokens)
        assert (event["num_tokens"], event["chunks"], event["result"]["removed"]) == (len(TOKENS), 5, 5)


async def test_clear_of_everything_from_one_tier_or_all(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS, disk=KEYS) as a:
        accepted = await controller.post("/clear", instance="a", tier="disk")
        assert accepted["num_tokens"] == 0, "chunks are not looked up"
        event = await controller.wait_for_end(accepted)
        assert (event["chunks"], event["result"]["removed"], event["model"]) == (5, 5, None)
        assert (len(a.held[RAM]), len(a.held[DISK])) == (5, 0)
        await controller.done("/clear", instance="a")
        assert not a.held[RAM]
        count = len(a.commands)
        own = await controller.done("/clear", instance="a", tier="ssd")
        assert (own["started_at"], len(a.commands)) == (None, count), "nothing left to do"


async def test_unreported_chunks_are_cleared_as_well(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS) as a:
        await a.send(Lost())
        await controller.wait_until(lambda: not controller.registry.find("a").up_to_date)
        event = await controller.done("/clear", instance="a", tier="ram", tokens=TOKENS)
        assert event["result"]["removed"] == 5
        a.held[RAM] = dict.fromkeys(KEYS)
        assert (await controller.done("/clear", instance="a"))["result"]["removed"] == 5
