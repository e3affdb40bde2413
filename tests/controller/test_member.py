"""Commands to an instance: answered, failed, given up, and cut off."""

from __future__ import annotations

import anyio
import pytest
from anyio.abc import TaskGroup

from kvtier.agent.protocol import (
    Cancel,
    Command,
    Delete,
    DeleteAll,
    Done,
    Failed,
    Fetch,
    Pin,
    Progress,
    Tokenize,
    Unpin,
)
from kvtier.controller import member as module
from kvtier.controller.errors import CommandFailed, MemberGone
from kvtier.controller.member import Member
from kvtier.errors import ControllerError
from kvtier.keys import join_keys
from tests.controller.registering import MODEL, RAM, RegisteringInstance, RunningRegistry, keys_of

pytestmark = pytest.mark.anyio

KEYS = keys_of("prompt", 4)
JOINED = join_keys(KEYS)


def fetch(ticket: int) -> Fetch:
    return Fetch(ticket, RAM, "other:8200", MODEL.namespace, JOINED, [4096] * 4, 5.0)


class Waiting:
    """A command that a test has given, in a task of its own, and what became of it."""

    def __init__(self, tasks: TaskGroup, member: Member, command: Command) -> None:
        self.progress: list[tuple[int, int]] = []
        self.outcome: Done | ControllerError | None = None
        self.scope = anyio.CancelScope()
        self._over = anyio.Event()
        tasks.start_soon(self._wait, member, command)

    async def _wait(self, member: Member, command: Command) -> None:
        def given(ticket: int) -> Command:
            return type(command)(ticket, *_fields(command)[1:])

        with self.scope:
            try:
                self.outcome = await member.carry_out(given, self._note)
            except ControllerError as error:
                self.outcome = error
        self._over.set()

    def _note(self, progress: Progress) -> None:
        self.progress.append((progress.chunks, progress.bytes))

    async def over(self) -> Done | ControllerError | None:
        with anyio.fail_after(30):
            await self._over.wait()
        return self.outcome


def _fields(command: Command) -> list[object]:
    return [getattr(command, name) for name in command.__struct_fields__]


async def test_a_command_is_carried_out(running: RunningRegistry) -> None:
    async with running.instance("one") as instance, anyio.create_task_group() as tasks:
        waiting = Waiting(tasks, running.member(), fetch(0))
        heard = await instance.hear()
        assert heard == fetch(heard.ticket)  # type: ignore[union-attr]
        await instance.say(Progress(1, 1, 4096), Progress(1, 3, 12288))
        done = Done(1, join_keys(KEYS[:3]), 3, 12288, reason="no room for the last")
        await instance.say(done)
        assert await waiting.over() == done
        assert waiting.progress == [(1, 4096), (3, 12288)]


async def test_commands_may_be_answered_in_any_order(running: RunningRegistry) -> None:
    async with running.instance("one") as instance, anyio.create_task_group() as tasks:
        commands: list[Command] = [
            Delete(0, RAM, JOINED),
            DeleteAll(0, None),
            Pin(0, JOINED, 5.0),
            Unpin(0, JOINED),
            Tokenize(0, MODEL.namespace, "a prompt"),
        ]
        waiting = [Waiting(tasks, running.member(), command) for command in commands]
        heard = [await instance.hear() for _ in commands]
        assert [type(message) for message in heard] == [type(command) for command in commands]
        await instance.say(Done(5, b"", 0, 0, tokens=[1, 2, 3]), Done(4, JOINED, 4, 0), Done(3, JOINED, 4, 0))
        await instance.say(Failed(2, "it cannot"), Done(1, b"", 0, 0))
        outcomes = [await command.over() for command in waiting]
        assert outcomes[0] == Done(1, b"", 0, 0)
        assert isinstance(outcomes[1], CommandFailed)
        assert str(outcomes[1]) == "one: it cannot"
        assert outcomes[2:] == [
            Done(3, JOINED, 4, 0),
            Done(4, JOINED, 4, 0),
            Done(5, b"", 0, 0, tokens=[1, 2, 3]),
        ]


async def test_who_gives_a_command_up_has_it_cancelled(running: RunningRegistry) -> None:
    async with running.instance("one") as instance, anyio.create_task_group() as tasks:
        waiting = Waiting(tasks, running.member(), fetch(0))
        await instance.hear()
        waiting.scope.cancel()
        assert await instance.hear() == Cancel(1)
        assert await waiting.over() is None
        await instance.say(Progress(1, 1, 4096), Done(1, b"", 0, 0, reason="cancelled"))
        again = Waiting(tasks, running.member(), fetch(0))
        assert (await instance.hear()).ticket == 2  # type: ignore[union-attr]
        await instance.say(Done(2, JOINED, 4, 0))
        assert isinstance(await again.over(), Done)
        assert not waiting.progress


async def test_a_connection_that_ends_fails_its_commands(running: RunningRegistry) -> None:
    async with anyio.create_task_group() as tasks:
        async with running.instance("one") as instance:
            member = running.member()
            waiting = Waiting(tasks, member, fetch(0))
            await instance.hear()
        gone = await waiting.over()
        assert isinstance(gone, MemberGone)
        assert str(gone) == "instance 'one' has gone: it has closed the connection"
    with pytest.raises(MemberGone, match="'one' has gone"):
        await member.carry_out(fetch)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Done(9, b"", 0, 0), "ticket 9, which no command of its has"),
        (Progress(0, 1, 1), "ticket 0, which"),
        (Progress(1, -1, 0), "negative number of chunks or bytes"),
        (Done(1, b"x" * 31, 0, 0), "no keys or no tokens: 31 bytes"),
        (Done(1, join_keys(keys_of("other", 1)), 1, 0), "names chunks that the command did not"),
        (Done(1, b"", 0, 0, tokens=[1]), "tokens that nobody asked for"),
        (Done(1, b"", 0, 0, tokens=[-1]), "no keys or no tokens"),
        (Done(1, b"", 0, -1), "negative number"),
    ],
)
async def test_what_is_no_answer_ends_the_connection(
    running: RunningRegistry, answer: Done | Progress, reason: str
) -> None:
    async with running.instance("one") as instance, anyio.create_task_group() as tasks:
        waiting = Waiting(tasks, running.member(), fetch(0))
        await instance.hear()
        await instance.say(answer)
        assert reason in await instance.refusal()
        assert isinstance(await waiting.over(), MemberGone)


async def test_an_instance_is_busy_with_so_many_commands_only(
    running: RunningRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_COMMANDS", 2)
    async with running.instance("one") as instance, anyio.create_task_group() as tasks:
        waiting = [Waiting(tasks, running.member(), fetch(0)) for _ in range(3)]
        refused = await waiting[2].over()
        assert isinstance(refused, CommandFailed)
        assert "busy with 2 commands" in str(refused)
        waiting[0].scope.cancel()
        await waiting[0].over()
        with pytest.raises(CommandFailed, match="busy"):
            await running.member().carry_out(fetch)
        await instance.say(Failed(1, "cancelled"), Failed(2, "cannot"))
        assert isinstance(await waiting[1].over(), CommandFailed)


async def test_a_command_that_is_too_long_is_not_given(running: RunningRegistry) -> None:
    async with running.instance("one"):
        with pytest.raises(CommandFailed, match="ask for fewer chunks at once"):
            await running.member().carry_out(lambda ticket: Delete(ticket, RAM, bytes(5 << 20)))
        assert running.member().over is None


async def test_what_an_instance_gives_as_reasons_is_cut_short(running: RunningRegistry) -> None:
    async with (
        running.instance("one") as instance,
        anyio.create_task_group() as tasks,
    ):
        first, second = (Waiting(tasks, running.member(), fetch(0)) for _ in range(2))
        await send_reasons(instance, "very " * 10_000)
        done, failed = await first.over(), await second.over()
        assert isinstance(done, Done)
        assert done.reason is not None
        assert len(done.reason) == module.MOST_REASON_CHARACTERS
        assert len(str(failed)) < module.MOST_REASON_CHARACTERS + 20


async def send_reasons(instance: RegisteringInstance, reason: str) -> None:
    await instance.hear()
    await instance.hear()
    await instance.say(Done(1, b"", 0, 0, reason=reason), Failed(2, reason))
