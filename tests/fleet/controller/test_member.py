"""Commands to an instance: answered, failed, cancelled and interrupted."""

from __future__ import annotations

import anyio
import pytest
from anyio.abc import TaskGroup

from kvtier.errors import ControllerError
from kvtier.fleet.controller import member as member_module
from kvtier.fleet.controller.errors import CommandFailed, MemberGone
from kvtier.fleet.controller.member import STEP_SECONDS, WINDOW_SECONDS, HitWindow, Member
from kvtier.fleet.member.protocol import (
    Cancel,
    Command,
    Delete,
    DeleteAll,
    Done,
    Failed,
    Fetch,
    Heartbeat,
    Pin,
    Progress,
    Tokenize,
    Unpin,
)
from kvtier.memory.keys import join_keys
from tests.rigs.running_controller import (
    MODEL,
    RAM,
    RegisteringInstance,
    RunningController,
    heartbeat,
    keys_of,
)

pytestmark = pytest.mark.anyio

KEYS = keys_of("prompt", 4)
JOINED = join_keys(KEYS)


def fetch(ticket: int) -> Fetch:
    return Fetch(ticket, RAM, "other:8200", MODEL.namespace, JOINED, [4096] * 4, 5.0)


class RunningCommand:
    """A command in its own task, and its outcome."""

    def __init__(self, tasks: TaskGroup, member: Member, command: Command) -> None:
        self.progress: list[tuple[int, int]] = []
        self.outcome: Done | ControllerError | None = None
        self.scope = anyio.CancelScope()
        self._ended = anyio.Event()
        tasks.start_soon(self._wait, member, command)

    async def _wait(self, member: Member, command: Command) -> None:
        def build(ticket: int) -> Command:
            return type(command)(ticket, *_fields(command)[1:])

        with self.scope:
            try:
                self.outcome = await member.execute(build, self._note)
            except ControllerError as error:
                self.outcome = error
        self._ended.set()

    def _note(self, progress: Progress) -> None:
        self.progress.append((progress.chunks, progress.bytes))

    async def result(self) -> Done | ControllerError | None:
        with anyio.fail_after(30):
            await self._ended.wait()
        return self.outcome


def _fields(command: Command) -> list[object]:
    return [getattr(command, name) for name in command.__struct_fields__]


async def test_command_is_executed(running: RunningController) -> None:
    async with running.connect("one") as instance, anyio.create_task_group() as tasks:
        waiting = RunningCommand(tasks, running.member(), fetch(0))
        received = await instance.receive()
        assert received == fetch(received.ticket)  # type: ignore[union-attr]
        await instance.send(Progress(1, 1, 4096), Progress(1, 3, 12288))
        done = Done(1, join_keys(KEYS[:3]), 3, 12288, reason="no room for the last")
        await instance.send(done)
        assert await waiting.result() == done
        assert waiting.progress == [(1, 4096), (3, 12288)]


async def test_commands_are_answered_in_any_order(running: RunningController) -> None:
    async with running.connect("one") as instance, anyio.create_task_group() as tasks:
        commands: list[Command] = [
            Delete(0, RAM, JOINED),
            DeleteAll(0, None),
            Pin(0, JOINED, 5.0),
            Unpin(0, JOINED),
            Tokenize(0, MODEL.namespace, "a prompt"),
        ]
        waiting = [RunningCommand(tasks, running.member(), command) for command in commands]
        received = [await instance.receive() for _ in commands]
        assert [type(message) for message in received] == [type(command) for command in commands]
        await instance.send(
            Done(5, b"", 0, 0, tokens=[1, 2, 3]), Done(4, JOINED, 4, 0), Done(3, JOINED, 4, 0)
        )
        await instance.send(Failed(2, "it cannot"), Done(1, b"", 0, 0))
        outcomes = [await command.result() for command in waiting]
        assert outcomes[0] == Done(1, b"", 0, 0)
        assert isinstance(outcomes[1], CommandFailed)
        assert str(outcomes[1]) == "one: it cannot"
        assert outcomes[2:] == [
            Done(3, JOINED, 4, 0),
            Done(4, JOINED, 4, 0),
            Done(5, b"", 0, 0, tokens=[1, 2, 3]),
        ]


async def test_abandoned_command_is_cancelled(running: RunningController) -> None:
    async with running.connect("one") as instance, anyio.create_task_group() as tasks:
        waiting = RunningCommand(tasks, running.member(), fetch(0))
        await instance.receive()
        waiting.scope.cancel()
        assert await instance.receive() == Cancel(1)
        assert await waiting.result() is None
        await instance.send(Progress(1, 1, 4096), Done(1, b"", 0, 0, reason="cancelled"))
        again = RunningCommand(tasks, running.member(), fetch(0))
        assert (await instance.receive()).ticket == 2  # type: ignore[union-attr]
        await instance.send(Done(2, JOINED, 4, 0))
        assert isinstance(await again.result(), Done)
        assert not waiting.progress


async def test_commands_fail_when_the_connection_ends(running: RunningController) -> None:
    async with anyio.create_task_group() as tasks:
        async with running.connect("one") as instance:
            member = running.member()
            waiting = RunningCommand(tasks, member, fetch(0))
            await instance.receive()
        outcome = await waiting.result()
        assert isinstance(outcome, MemberGone)
        assert str(outcome) == "instance 'one' has disconnected: the other side has closed the connection"
    with pytest.raises(MemberGone, match="'one' has disconnected: the other side"):
        await member.execute(fetch)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Done(9, b"", 0, 0), "Done answers a request that was not sent"),
        (Progress(0, 1, 1), "Progress answers a request that was not sent"),
        (Progress(1, -1, 0), "Expected `int` >= 0"),
        (Done(1, b"x" * 31, 0, 0), "malformed keys: 31 bytes"),
        (Done(1, join_keys(keys_of("other", 1)), 1, 0), "names chunks that the command did not"),
        (Done(1, b"", 0, 0, tokens=[1]), "has tokens, but the command was not to tokenize"),
        (Done(1, b"", 0, 0, tokens=[-1]), "Expected `int` >= 0"),
        (Done(1, b"", 0, -1), "Expected `int` >= 0"),
    ],
)
async def test_invalid_answer_ends_the_connection(
    running: RunningController, answer: Done | Progress, reason: str
) -> None:
    async with running.connect("one") as instance, anyio.create_task_group() as tasks:
        waiting = RunningCommand(tasks, running.member(), fetch(0))
        await instance.receive()
        await instance.send(answer)
        assert reason in await instance.refusal()
        assert isinstance(await waiting.result(), MemberGone)


async def test_number_of_concurrent_commands_is_limited(
    running: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_module, "MAX_COMMANDS", 2)
    async with running.connect("one") as instance, anyio.create_task_group() as tasks:
        waiting = [RunningCommand(tasks, running.member(), fetch(0)) for _ in range(3)]
        refused = await waiting[2].result()
        assert isinstance(refused, CommandFailed)
        assert "busy with 2 commands" in str(refused)
        waiting[0].scope.cancel()
        await waiting[0].result()
        with pytest.raises(CommandFailed, match="busy"):
            await running.member().execute(fetch)
        await instance.send(Failed(1, "cancelled"), Failed(2, "cannot"))
        assert isinstance(await waiting[1].result(), CommandFailed)


async def test_too_long_command_is_not_sent(running: RunningController) -> None:
    async with running.connect("one"):
        with pytest.raises(CommandFailed, match="request fewer chunks at once"):
            await running.member().execute(lambda ticket: Delete(ticket, RAM, bytes(5 << 20)))
        assert running.member().closed_reason is None


async def test_reasons_of_an_instance_are_truncated(running: RunningController) -> None:
    async with (
        running.connect("one") as instance,
        anyio.create_task_group() as tasks,
    ):
        first, second = (RunningCommand(tasks, running.member(), fetch(0)) for _ in range(2))
        await send_reasons(instance, "very " * 10_000)
        done, failed = await first.result(), await second.result()
        assert isinstance(done, Done)
        assert done.reason is not None
        assert len(done.reason) == member_module.MAX_REASON_CHARACTERS
        assert len(str(failed)) < member_module.MAX_REASON_CHARACTERS + 20


async def send_reasons(instance: RegisteringInstance, reason: str) -> None:
    await instance.receive()
    await instance.receive()
    await instance.send(Done(1, b"", 0, 0, reason=reason), Failed(2, reason))


def counters(looked_up: int, found: int) -> Heartbeat:
    return heartbeat(looked_up=looked_up, found=found)


def test_window() -> None:
    window = HitWindow()
    assert window.hits().rate is None
    window.add(counters(1000, 300), 0.0)
    assert window.hits().rate is None, "what the process counted before is older"
    window.add(counters(1030, 301), 100.0)
    assert (window.hits().looked_up, window.hits().rate) == (30, 3 / 30)
    window.add(counters(1130, 331), 250.0)
    assert (window.hits().looked_up, window.hits().rate) == (130, 93 / 130)
    window.add(counters(1130, 331), 100.0 + WINDOW_SECONDS)
    assert (window.hits().looked_up, window.hits().rate) == (100, 90 / 100)
    window.add(counters(1130, 331), 250.0 + WINDOW_SECONDS)
    assert window.hits().rate is None, "no lookup in the last five minutes"


def test_number_of_reports_is_bounded() -> None:
    window = HitWindow()
    for number in range(100_000):
        window.add(counters(number, 0), number / 100)
    assert len(window) <= 1.1 * WINDOW_SECONDS / STEP_SECONDS
    assert window.hits().looked_up == pytest.approx(100 * WINDOW_SECONDS, abs=200)


@pytest.mark.anyio
async def test_restarted_instance_has_no_hit_rate_of_its_former_process(
    controller: RunningController,
) -> None:
    async with controller.instance("a") as one:
        await one.send(heartbeat(looked_up=100, found=30))
        await controller.wait_until(lambda: controller.registry.find("a").hit_window.hits().looked_up)
        described = await controller.get("/instances/a")
        assert (described["hit_rate"], described["looked_up_tokens"]) == (0.9, 100)
        assert [tier["hit_rate"] for tier in described["tiers"]] == [0.3, 0.3, 0.3], "its part in each tier"
    await controller.wait_until(lambda: not controller.registry.members)
    async with controller.instance("a") as one:
        described = await controller.get("/instances/a")
        assert (described["hit_rate"], described["looked_up_tokens"]) == (None, 0)
        assert [tier["hit_rate"] for tier in described["tiers"]] == [None] * 3
