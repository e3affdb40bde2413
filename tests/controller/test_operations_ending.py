"""Operations that cannot be carried out to their end: somebody goes away, fails, or has to stop."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kvtier.agent.protocol import Command, Delete
from kvtier.controller import operation
from kvtier.controller.prompts import Asked
from tests.controller.controlling import (
    A_TO_B,
    B_TO_A,
    KEYS,
    TOKENS,
    Gate,
    RunningController,
    running_controller,
)
from tests.controller.registering import RAM

pytestmark = pytest.mark.anyio


# Who is gone


async def test_a_target_that_goes_away_fails_the_move_and_the_source_keeps_everything(
    controller: RunningController,
) -> None:
    async with controller.instance("a", ram=KEYS) as a, controller.instance("b") as b:
        gate = b.before = Gate()
        accepted = await controller.ask("/move", **A_TO_B)
        await gate.reached.wait()
        await b.websocket.close()
        event = await controller.ended(accepted)
        assert event["state"] == "failed"
        assert "the target 'b' went away" in event["error"]
        assert list(a.held[RAM]) == KEYS
        assert not a.commands


async def test_a_source_that_goes_away_before_the_end_leaves_what_was_confirmed(
    controller: RunningController,
) -> None:
    async with controller.instance("a", ram=KEYS) as a, controller.instance("b") as b:
        gate = a.before = Gate(Delete)
        accepted = await controller.ask("/move", **A_TO_B)
        await gate.reached.wait()
        await a.websocket.close()
        event = await controller.ended(accepted)
        assert event["state"] == "failed"
        assert "the target has confirmed 5 chunks, but they may still be in the source" in event["error"]
        assert event["result"]["chunks"] == 5
        assert list(b.held[RAM]) == KEYS


async def test_a_source_that_is_gone_is_blamed_for_what_is_missing(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS) as a, controller.instance("b") as b:

        async def die(command: Command) -> None:
            await a.websocket.close()
            await controller.until(lambda: "a" not in controller.registry.members)
            del controller.world.instances["a:8200"]

        b.before = die
        event = await controller.ended(await controller.ask("/move", **A_TO_B))
        assert event["state"] == "failed"
        assert "the source 'a' went away: the peer has it not" in event["error"]


async def test_who_is_gone_when_its_turn_comes_fails_the_operation(controller: RunningController) -> None:
    async with controller.instance("b") as b:
        async with controller.instance("a", ram=KEYS):
            gate = b.before = Gate()
            first = await controller.ask("/move", **A_TO_B)
            await gate.reached.wait()
            second = await controller.ask("/move", **A_TO_B)
        await controller.until(lambda: "a" not in controller.registry.members)
        gate.opened.set()
        assert (await controller.ended(first))["state"] == "failed"
        event = await controller.ended(second)
        assert event["state"] == "failed"
        assert "there is no instance 'a'; known: b" in event["error"]


async def test_an_instance_that_comes_no_further_is_given_up(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation, "STALL_SECONDS", 0.05)
    async with controller.instance("a", ram=KEYS), controller.instance("b") as b:
        b.before = Gate()
        event = await controller.ended(await controller.ask("/move", **A_TO_B))
        assert event["state"] == "failed"
        assert "has come no further for 0.05 s" in event["error"]
        await controller.until(lambda: b.cancelled)


async def test_what_an_instance_says_that_it_cannot_do_is_the_reason(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS) as a, controller.instance("b") as b:
        b.refuse = "its transport is broken"
        event = await controller.ended(await controller.ask("/move", **A_TO_B))
        assert (event["state"], event["error"]) == ("failed", "b: its transport is broken")
        b.refuse, a.refuse = None, "its disk is read-only"
        event = await controller.ended(await controller.ask("/move", **A_TO_B))
        assert event["state"] == "failed"
        assert "its disk is read-only" in event["error"]


async def test_a_mistake_of_ours_ends_the_event_too(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with controller.instance("a", ram=KEYS), controller.instance("b"):
        monkeypatch.setattr("kvtier.controller.moves.confirmed", lambda *_: 1 / 0)
        event = await controller.ended(await controller.ask("/move", **A_TO_B))
        assert event["state"] == "failed"
        assert "which its log describes" in event["error"]


# The end


async def test_who_is_told_to_stop_lets_what_is_under_way_end(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS), controller.instance("b") as b:
        gate = b.before = Gate()
        accepted = await controller.ask("/move", **A_TO_B)
        await gate.reached.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.controller.operations.finish, 10)
            await anyio.lowlevel.checkpoint()
            problem = await controller.refused("/move", 503, **A_TO_B)
            assert "is being stopped" in problem["detail"]
            gate.opened.set()
        assert (await controller.ended(accepted))["state"] == "done"


async def test_what_does_not_end_in_time_has_failed(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as controller,
        controller.instance("a", ram=KEYS) as a,
        controller.instance("b") as b,
    ):
        b.before = Gate()
        move = await controller.ask("/move", **A_TO_B)
        queued = await controller.ask("/move", **B_TO_A)
        operations = controller.controller.operations
        await operations.finish(0.01)
        operations.stop()
        for accepted in (move, queued):
            event = await controller.ended(accepted)
            assert event["state"] == "failed"
            assert "the controller was stopped" in event["error"]
        await controller.until(lambda: b.cancelled)
        assert list(a.held[RAM]) == KEYS


async def test_what_has_not_even_begun_at_the_end_has_failed(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as controller, controller.instance("a", ram=KEYS):
        operations = controller.controller.operations
        event = await operations.clear(("a", None), None)
        asked = Asked(TOKENS, None, None)
        other = await operations.pin(("a", "ram"), asked, seconds=None)
        operations.stop()
    assert (event.state, other.state) == ("failed", "failed")
