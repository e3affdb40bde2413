"""Operations that cannot complete: an instance disconnects or fails, or the controller stops."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kvtier.fleet.controller import operation
from kvtier.fleet.controller.bodies import ClearBody, PinBody
from kvtier.fleet.controller.pin_and_clear import PinChunks
from kvtier.fleet.member.protocol import Command, Delete
from tests.rigs.running_controller import (
    A_TO_B,
    B_TO_A,
    KEYS,
    RAM,
    TOKENS,
    Gate,
    RunningController,
    running_controller,
)

pytestmark = pytest.mark.anyio


# Disconnected instances


async def test_disconnected_target_fails_the_move_and_the_source_keeps_everything(
    controller: RunningController,
) -> None:
    async with controller.instance("a", ram=KEYS) as a, controller.instance("b") as b:
        accepted, _ = await controller.post_held("/move", b, **A_TO_B)
        await b.websocket.close()
        assert "the target 'b' disconnected" in await controller.error_of(accepted)
        assert list(a.held[RAM]) == KEYS
        assert not a.commands


async def test_disconnected_source_leaves_the_confirmed_chunks_at_the_target(
    controller: RunningController,
) -> None:
    async with controller.instance("a", ram=KEYS) as a, controller.instance("b") as b:
        accepted, _ = await controller.post_held("/move", a, Delete, **A_TO_B)
        await a.websocket.close()
        event = await controller.wait_for_end(accepted)
        assert event["state"] == "failed"
        assert "the target has confirmed 5 chunks, but the source may still hold them" in event["error"]
        assert event["result"]["chunks"] == 5
        assert list(b.held[RAM]) == KEYS


async def test_disconnected_source_is_the_reason_for_missing_chunks(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS) as a, controller.instance("b") as b:

        async def disconnect(command: Command) -> None:
            await a.websocket.close()
            await controller.wait_until(lambda: "a" not in controller.registry.members)
            del controller.network.instances["a:8200"]

        b.before = disconnect
        assert "the source 'a' disconnected: the peer does not hold it" in await controller.failed(
            "/move", **A_TO_B
        )


async def test_queued_operation_fails_if_its_instance_has_disconnected(controller: RunningController) -> None:
    async with controller.instance("b") as b:
        async with controller.instance("a", ram=KEYS):
            first, gate = await controller.post_held("/move", b, **A_TO_B)
            second = await controller.post("/move", **A_TO_B)
        await controller.wait_until(lambda: "a" not in controller.registry.members)
        gate.opened.set()
        assert (await controller.wait_for_end(first))["state"] == "failed"
        assert "there is no instance 'a'; known: b" in await controller.error_of(second)


async def test_stalled_instance_fails_the_operation(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation, "STALL_SECONDS", 0.05)
    async with controller.instance("a", ram=KEYS), controller.instance("b") as b:
        b.before = Gate()
        assert "made no progress for 0.05 s" in await controller.failed("/move", **A_TO_B)
        await controller.wait_until(lambda: b.cancelled)


async def test_error_of_an_instance_is_the_reason(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS) as a, controller.instance("b") as b:
        b.refuse = "its transport is broken"
        assert await controller.failed("/move", **A_TO_B) == "b: its transport is broken"
        b.refuse, a.refuse = None, "its disk is read-only"
        assert "its disk is read-only" in await controller.failed("/move", **A_TO_B)


async def test_internal_error_fails_the_event(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with controller.instance("a", ram=KEYS), controller.instance("b"):
        monkeypatch.setattr("kvtier.fleet.controller.moves.fetch_chunks", lambda *_: 1 / 0)
        assert "see the controller's log" in await controller.failed("/move", **A_TO_B)


# Shutdown


async def test_shutdown_completes_operations_in_flight(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS), controller.instance("b") as b:
        accepted, gate = await controller.post_held("/move", b, **A_TO_B)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.controller.operations.finish, 10)
            await anyio.lowlevel.checkpoint()
            problem = await controller.post_refused("/move", 503, **A_TO_B)
            assert "is shutting down" in problem["detail"]
            gate.opened.set()
        assert (await controller.wait_for_end(accepted))["state"] == "done"


async def test_shutdown_fails_operations_after_its_timeout(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as controller,
        controller.instance("a", ram=KEYS) as a,
        controller.instance("b") as b,
    ):
        b.before = Gate()
        move = await controller.post("/move", **A_TO_B)
        queued = await controller.post("/move", **B_TO_A)
        operations = controller.controller.operations
        await operations.finish(0.01)
        operations.stop()
        for accepted in (move, queued):
            assert "the controller was stopped" in await controller.error_of(accepted)
        await controller.wait_until(lambda: b.cancelled)
        assert list(a.held[RAM]) == KEYS


async def test_shutdown_fails_operations_that_have_not_started(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as controller, controller.instance("a", ram=KEYS):
        operations = controller.controller.operations
        event = await operations.clear(ClearBody(instance="a"))
        other = await operations.start(PinChunks, PinBody(instance="a", tier="ram", tokens=TOKENS))
        operations.stop()
    assert (event.state, other.state) == ("failed", "failed")
