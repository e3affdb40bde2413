"""Operations that cannot complete: an instance disconnects or fails, or the controller stops."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kvtier.errors import ControllerError
from kvtier.fleet.controller import operation
from kvtier.fleet.controller import operations as operations_module
from kvtier.fleet.controller.bodies import ClearBody, PinBody
from kvtier.fleet.controller.pin_and_clear import PinChunks
from kvtier.fleet.controller.state import OPERATIONS, FileState
from kvtier.fleet.member.protocol import Command, Delete, Pin
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


async def test_operation_that_cannot_be_stored_fails_and_blocks_no_other(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: FileState) -> None:
        raise ControllerError("it does not answer")

    async with controller.instance("a", ram=KEYS) as a:
        with monkeypatch.context() as patched:
            patched.setattr(FileState, "saved", fail)
            refused = await controller.post_refused("/clear", 503, instance="a")
            assert refused["detail"] == "it does not answer"
            await controller.post_refused("/clear", 503, instance="a", tier="ssd")
        assert not a.commands
        await controller.done("/clear", instance="a")
        states = [event["state"] for event in (await controller.get("/events"))["events"]]
        assert states == ["done", "done", "failed"], "there was nothing to clear on the second one"


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


async def test_operations_that_a_shutdown_interrupts_are_continued_by_the_next_controller(
    tmp_path: Path,
) -> None:
    async with (
        running_controller(tmp_path) as controller,
        controller.instance("a", ram=KEYS) as a,
        controller.instance("b") as b,
    ):
        b.before = Gate()
        accepted = [await controller.post("/move", **body) for body in (A_TO_B, B_TO_A)]
        await controller.controller.operations.finish(0.01)
        controller.controller.operations.stop()
        await controller.wait_until(lambda: b.cancelled)
        events = [await controller.get(f"/events/{each['event_id']}") for each in accepted]
        assert [event["state"] for event in events] == ["running", "queued"]
        assert list(a.held[RAM]) == KEYS
    async with running_controller(tmp_path) as controller, controller.instance("a", ram=KEYS) as a:
        await controller.wait_until(lambda: controller.registry.members["a"].up_to_date)
        # Not before both are connected.
        assert controller.events.find(accepted[0]["event_id"]).state == "queued"
        async with controller.instance("b") as b:
            events = [await controller.wait_for_end(each) for each in accepted]
            assert [event["state"] for event in events] == ["done", "done"]
            # There and back again, in the order in which they were requested.
            assert [event["result"]["removed"] for event in events] == [5, 5]
            assert (list(a.held[RAM]), list(b.held[RAM])) == (KEYS, [])


async def test_operation_is_not_continued_without_its_instances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations_module, "RECONNECT_SECONDS", 0.05)
    async with running_controller(tmp_path) as controller, controller.instance("a", ram=KEYS) as a:
        event = await controller.controller.operations.clear(ClearBody(instance="a"))
        controller.controller.operations.stop()
        await anyio.sleep(0.1)
        assert not a.commands, "it had not begun"
    async with running_controller(tmp_path) as controller:
        assert "there is no instance 'a'" in await controller.error_of({"event_id": event.event_id})


async def test_damaged_operation_fails_alone(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as controller, controller.instance("a", ram=KEYS):
        operations = controller.controller.operations
        damaged, whole = [await operations.clear(ClearBody(instance="a")) for _ in range(2)]
        operations.stop()
    async with FileState.open(tmp_path / "controller.sqlite") as state:
        state.put(OPERATIONS, (damaged.event_id, b"\xc1"))
    async with running_controller(tmp_path) as controller, controller.instance("a", ram=KEYS):
        assert "is damaged" in await controller.error_of({"event_id": damaged.event_id})
        assert (await controller.wait_for_end({"event_id": whole.event_id}))["state"] == "done"


async def test_deadline_of_a_continued_operation_is_that_of_the_request(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as controller, controller.instance("a", ram=KEYS):
        operations = controller.controller.operations
        body = PinBody(instance="a", tier="ram", tokens=TOKENS, ttl="30s")
        event = await operations.start(PinChunks, body)
        operations.stop()
    async with running_controller(tmp_path) as controller, controller.instance("a", ram=KEYS) as a:
        assert (await controller.wait_for_end({"event_id": event.event_id}))["state"] == "done"
        [pin] = [command for command in a.commands if isinstance(command, Pin)]
        assert pin.seconds is not None
        assert 0 < pin.seconds < 30
