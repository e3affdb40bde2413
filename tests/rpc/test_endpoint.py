from __future__ import annotations

import socket
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kvtier.errors import ChannelClosed, ChannelError, ProtocolError, Rejected
from kvtier.rpc.endpoint import DRAIN_BYTES, TURN_MESSAGES, HandleAtOnce
from kvtier.rpc.frames import LENGTH, MAX_FRAME_BYTES, Refused, encode
from kvtier.rpc.wire import FrameSocket
from tests.rigs.waiting import until
from tests.rpc.endpoints import Answer, Ask, Hello, Note, Side, connected, decode, sides

pytestmark = pytest.mark.anyio


def echo(side: list[Side]) -> Any:
    async def handle(message: Ask) -> None:
        side[0].endpoint.send(Answer(message.ticket, message.text.upper()))

    return handle


async def test_requests_are_answered_in_any_number() -> None:
    server: list[Side] = []
    async with connected(echo(server)) as (ours, theirs):
        server.append(theirs)
        assert await ours.ask("hello") == "HELLO"
        answers: list[str] = []

        async def ask(number: int) -> None:
            answers.append(await ours.ask(f"n{number}"))

        async with anyio.create_task_group() as tasks:
            for number in range(3 * TURN_MESSAGES):
                tasks.start_soon(ask, number)
    assert sorted(answers) == sorted(f"N{number}" for number in range(3 * TURN_MESSAGES))


async def test_both_sides_answer_pings() -> None:
    async with connected() as (ours, theirs):
        assert await ours.endpoint.ping().reply()
        assert await theirs.endpoint.ping().reply()


async def test_end_of_the_connection_fails_calls_and_sends() -> None:
    async with connected(None) as (ours, theirs):
        call = ours.endpoint.ping()
        theirs.endpoint.close()
        with pytest.raises(ChannelClosed):
            await call.reply()
        await until(lambda: ours.cause)
        assert ours.endpoint.closed
        with pytest.raises(ChannelClosed):
            ours.endpoint.send(Note(b""))
        with pytest.raises(ChannelClosed):
            ours.endpoint.ping()
        assert len(ours.endpoint.calls) == 0


async def test_cancelled_run_closes_the_connection() -> None:
    ours, theirs = sides()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(theirs.run)
        with anyio.move_on_after(0.01):
            await ours.run()
        assert ours.endpoint.closed
        await until(lambda: theirs.cause)
    assert isinstance(theirs.cause, ChannelClosed)


async def test_error_of_the_protocol_is_sent_as_refusal() -> None:
    async def handle(_message: object) -> None:
        raise ProtocolError("that is not possible")

    async with connected(handle) as (ours, theirs):
        ours.endpoint.send(Note(b""))
        await until(lambda: ours.cause and theirs.cause)
    assert isinstance(ours.cause, Rejected)
    assert str(ours.cause) == "that is not possible"
    assert str(theirs.cause) == "that is not possible"


@pytest.mark.parametrize(
    "data",
    [
        encode(Answer(99, "unasked")),
        encode(Hello(1)),
        LENGTH.pack(MAX_FRAME_BYTES + 1),
        LENGTH.pack(3) + b"\xc1\xc1\xc1",
        LENGTH.pack(0),
    ],
    ids=["unknown ticket", "unexpected", "too long", "no message", "empty"],
)
async def test_invalid_bytes_end_the_connection(data: bytes) -> None:
    ours, theirs = sides()
    theirs.send_bytes(data)
    await ours.run()
    assert isinstance(ours.cause, ProtocolError)
    refusal = FrameSocket(theirs.wire.frames.socket).read()
    assert refusal is not None
    assert isinstance(decode(refusal[0]), Refused)


async def test_wrong_reply_fails_its_caller_with_the_connection() -> None:
    async def handle(message: Ask) -> None:
        side[0].endpoint.send(Note(b""))

    side: list[Side] = []
    async with connected(handle) as (ours, theirs):
        side.append(theirs)
        with pytest.raises(ChannelError):
            await ours.ask("x")
        await until(lambda: ours.cause)
    assert "unexpected Note" in str(ours.cause)


def answers_none(_message: object) -> bool:
    return True


@pytest.mark.parametrize("at_once", [None, answers_none], ids=["in a task", "at once"])
async def test_idle_connection_ends(at_once: HandleAtOnce | None) -> None:
    ours, _ = sides(idle_timeout=0.05)
    assert "no message for 0.05 s" in str(await ours.endpoint.run(at_once=at_once))


@pytest.mark.parametrize("at_once", [None, answers_none], ids=["in a task", "at once"])
async def test_messages_keep_a_connection_alive(at_once: HandleAtOnce | None) -> None:
    ours, theirs = sides(idle_timeout=2.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(ours.endpoint.run, at_once=at_once))
        tasks.start_soon(theirs.run)
        for _ in range(6):
            await anyio.sleep(0.4)
            assert await ours.endpoint.ping().reply()
        assert not theirs.endpoint.closed
        tasks.cancel_scope.cancel()


async def test_handling_a_message_for_long_is_not_idling() -> None:
    ours, theirs = sides(idle_timeout=0.2)
    handled: list[Ask] = []

    async def handle(message: Ask) -> None:
        await anyio.sleep(0.5)
        handled.append(message)

    theirs.send_bytes(encode(Ask(1, "")))
    await ours.run(handle)
    assert "no message for 0.2 s" in str(ours.cause)
    assert handled


async def test_side_that_reads_nothing_is_disconnected() -> None:
    ours, theirs = sides(idle_timeout=0.2)

    async def handle(message: Ask) -> None:
        ours.endpoint.send(Answer(message.ticket, "x" * DRAIN_BYTES))

    requests = b"".join(encode(Ask(number, "")) for number in range(1, 9))
    theirs.send_bytes(requests)
    await ours.run(handle)
    assert "read nothing for 0.2 s" in str(ours.cause)


class OtherSocket(socket.socket):
    """Not a plain socket, like those with TLS, whose data the event loop may not see."""


def replace_socket(side: Side, kind: type[socket.socket]) -> None:
    side.wire.frames.socket = kind(fileno=side.wire.frames.socket.detach())


@pytest.mark.parametrize("kind", [socket.socket, OtherSocket])
@pytest.mark.parametrize("is_at_once", [False, True], ids=["in a task", "at once"])
async def test_slow_reader_is_waited_for(kind: type[socket.socket], is_at_once: bool) -> None:
    ours, theirs = sides() if is_at_once else sides(idle_timeout=2.0)
    replace_socket(ours, kind)
    count, received = 8, 0

    def at_once(message: Ask) -> None:
        ours.endpoint.send(Answer(message.ticket, "x" * DRAIN_BYTES))

    async def handle(message: Ask) -> None:
        at_once(message)

    theirs.send_bytes(b"".join(encode(Ask(number, "")) for number in range(1, count + 1)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            partial(ours.endpoint.run, at_once=at_once) if is_at_once else partial(ours.endpoint.run, handle)
        )
        while received < count:
            received += len(await theirs.wire.receive())
            assert ours.wire.unsent <= 2 * DRAIN_BYTES + 100
            await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()


async def test_side_that_sends_unasked_reads_on() -> None:
    ours, theirs = sides()
    seen: list[bytes] = []

    async def handle(note: Note) -> None:
        seen.append(note.data)

    for _ in range(4):
        ours.endpoint.send(Note(bytes(DRAIN_BYTES)))
    assert ours.wire.unsent > DRAIN_BYTES
    theirs.send_bytes(encode(Note(b"1")))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: ours.endpoint.run(handle, drains=False))
        await until(lambda: seen)
        theirs.send_bytes(encode(Note(b"2")))
        await until(lambda: len(seen) == 2)
        assert ours.wire.unsent > DRAIN_BYTES
        tasks.cancel_scope.cancel()


async def test_too_long_queue_ends_the_connection() -> None:
    ours, _ = sides()
    with suppress(ChannelClosed):
        for _ in range(100):
            ours.endpoint.send(Note(bytes(DRAIN_BYTES)))
    assert "has not read" in str(await ours.endpoint.run())


async def test_cancelled_caller_leaves_no_half_frame() -> None:
    server: list[Side] = []
    async with connected(echo(server)) as (ours, theirs):
        server.append(theirs)
        for _ in range(20):
            with anyio.move_on_after(0):
                await ours.ask("x" * 100_000)
        assert await ours.ask("end") == "END"


async def test_long_messages_arrive_whole() -> None:
    received: list[int] = []

    async def handle(note: Note) -> None:
        received.append(len(note.data))

    async with connected(handle) as (ours, _):
        for length in (0, 1, 1 << 18, MAX_FRAME_BYTES - 100):
            ours.endpoint.send(Note(bytes(length)))
        await until(lambda: len(received) == 4)
    assert received == [0, 1, 1 << 18, MAX_FRAME_BYTES - 100]


async def test_too_long_message_is_an_error_of_its_sender() -> None:
    async with connected() as (ours, _):
        with pytest.raises(ProtocolError, match="is over"):
            ours.endpoint.send(Note(bytes(MAX_FRAME_BYTES)))
        assert await ours.endpoint.ping().reply()


async def test_first_message_and_those_that_came_with_it() -> None:
    ours, theirs = sides()
    theirs.send_bytes(encode(Hello(3)) + encode(Note(b"1")) + encode(Note(b"2")))
    assert await ours.endpoint.receive(1.0) == Hello(3)
    seen: list[bytes] = []

    async def handle(note: Note) -> None:
        seen.append(note.data)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ours.run, handle)
        await until(lambda: len(seen) == 2)
        tasks.cancel_scope.cancel()
    assert seen == [b"1", b"2"]


async def test_first_message_that_does_not_arrive() -> None:
    ours, _ = sides()
    with pytest.raises(ChannelClosed, match="no message within"):
        await ours.endpoint.receive(0.01)


async def test_many_messages_leave_turns_to_other_tasks() -> None:
    ours, theirs = sides()
    turns = 0

    async def handle(_note: Note) -> None:
        pass

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    theirs.wire.frames.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    theirs.send_bytes(encode(Note(b"")) * (10 * TURN_MESSAGES))
    theirs.endpoint.close()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        await ours.run(handle)
        tasks.cancel_scope.cancel()
    assert turns >= 10


async def test_connection_ended_by_another_task() -> None:
    async with connected() as (ours, theirs):
        call = ours.endpoint.call(lambda ticket: Ask(ticket, ""), Answer, lambda answer: answer.text)
        ours.endpoint.end(ChannelClosed("it takes too long"))
        assert isinstance(call.error, ChannelClosed)
        await until(lambda: ours.cause and theirs.cause)
    assert str(ours.cause) == "it takes too long"


async def test_connection_ended_before_it_runs() -> None:
    ours, theirs = sides()
    ours.endpoint.end(ChannelClosed("no"))
    await ours.run()
    assert str(ours.cause) == "no"
    await theirs.run()
    assert "has closed the connection" in str(theirs.cause)


async def test_requests_that_are_not_read_do_not_keep_replies_from_being_read() -> None:
    ours, theirs = sides()
    async with anyio.create_task_group() as tasks:
        call = ours.endpoint.call(
            lambda ticket: Ask(ticket, "x" * 2 * DRAIN_BYTES), Answer, lambda answer: answer.text
        )
        assert ours.wire.unsent > DRAIN_BYTES
        tasks.start_soon(ours.run)
        theirs.send_bytes(encode(Answer(call.ticket, "early")))
        with anyio.fail_after(30):
            assert await call.reply() == "early"
        tasks.cancel_scope.cancel()


async def test_refused_side_is_awaited_until_it_closes() -> None:
    """Whatever it sends until then is discarded."""
    ours, theirs = sides()
    ended = False

    async def refuse() -> None:
        nonlocal ended
        await ours.endpoint.refuse(ProtocolError("no"), lingers=True)
        ended = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(refuse)
        assert decode((await theirs.wire.receive())[0]) == Refused("no")
        for data in (encode(Note(b"")), LENGTH.pack(MAX_FRAME_BYTES + 1), encode(Note(b""))):
            theirs.send_bytes(data)
            await anyio.sleep(0.01)
        assert not ended
        theirs.endpoint.close()
        await until(lambda: ended)


async def test_several_tasks_wait_while_much_is_queued() -> None:
    ours, theirs = sides()
    drained = 0

    async def drain() -> None:
        nonlocal drained
        await ours.endpoint.drain()
        drained += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ours.run)
        ours.endpoint.send(Note(bytes(3 * DRAIN_BYTES)))
        for _ in range(3):
            tasks.start_soon(drain)
        await anyio.sleep(0.01)
        assert drained == 0
        assert len(await theirs.wire.receive()) == 1
        await until(lambda: drained == 3)
        tasks.cancel_scope.cancel()


async def test_waiting_handler_may_let_other_messages_pass() -> None:
    ours, theirs = sides()
    waiting, proceed = anyio.Event(), anyio.Event()

    async def handle(message: Ask) -> None:
        ours.endpoint.uncork()
        waiting.set()
        await proceed.wait()
        ours.endpoint.send(Answer(message.ticket, "done"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ours.run, handle)
        theirs.send_bytes(encode(Ask(1, "")))
        await waiting.wait()
        ours.endpoint.send(Note(b"1"))
        assert decode((await theirs.wire.receive())[0]) == Note(b"1")
        proceed.set()
        assert decode((await theirs.wire.receive())[0]) == Answer(1, "done")
        tasks.cancel_scope.cancel()


async def test_messages_are_handled_at_once() -> None:
    ours, theirs = sides()
    received: list[bytes] = []
    ended: list[ChannelError] = []

    def handle(message: Note | Ask) -> None:
        if isinstance(message, Ask):
            ours.endpoint.send(Answer(message.ticket, message.text.upper()))
            return
        received.append(message.data)
        if message.data == b"unexpected":
            raise ProtocolError("not that one")

    async def run() -> None:
        ended.append(await ours.endpoint.run(at_once=handle))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        tasks.start_soon(theirs.run, echo([theirs]))
        assert await ours.ask("hello") == "HELLO"
        assert await theirs.ask("hello") == "HELLO"
        assert await theirs.endpoint.ping().reply()
        for number in range(3 * TURN_MESSAGES):
            theirs.endpoint.send(Note(b"%d" % number))
        await until(lambda: len(received) == 3 * TURN_MESSAGES)
        call = ours.endpoint.ping()
        theirs.endpoint.send(Note(b"unexpected"))
        await until(lambda: ended)
        await until(lambda: theirs.cause)
    assert received == [b"%d" % number for number in range(3 * TURN_MESSAGES)] + [b"unexpected"]
    assert str(ended[0]) == "not that one"
    assert isinstance(theirs.cause, Rejected)
    with pytest.raises(ChannelError):
        await call.reply()


@pytest.mark.parametrize("kind", [socket.socket, OtherSocket])
async def test_messages_that_are_not_handled_at_once_keep_their_place(kind: type[socket.socket]) -> None:
    ours, theirs = sides()
    replace_socket(ours, kind)
    seen: list[str] = []

    def at_once(message: Note | Ask) -> bool:
        if isinstance(message, Note):
            seen.append(message.data.decode())
        return isinstance(message, Ask)

    async def handle(message: Ask) -> None:
        await anyio.sleep(0.002)
        seen.append(message.text)
        ours.endpoint.send(Answer(message.ticket, "done"))

    numbers = [str(number) for number in range(2 * TURN_MESSAGES)]
    messages = [Ask(1, text) if text.endswith("7") else Note(text.encode()) for text in numbers]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(ours.endpoint.run, handle, at_once=at_once))
        for message in messages:
            theirs.send_bytes(encode(message))
            await anyio.lowlevel.checkpoint()
        await until(lambda: len(seen) == len(messages))
        theirs.send_bytes(b"".join(map(encode, messages)))
        await until(lambda: len(seen) == 2 * len(messages))
        tasks.cancel_scope.cancel()
    assert seen == 2 * numbers


@pytest.mark.parametrize("seconds", [0, 0.01])
async def test_connection_that_is_closed_while_messages_are_handled_at_once(seconds: float) -> None:
    ours, _ = sides()
    async with anyio.create_task_group() as tasks:
        if not seconds:
            ours.endpoint.close()
        tasks.start_soon(partial(ours.endpoint.run, at_once=lambda _: None))
        await anyio.sleep(seconds)
        ours.endpoint.close()


async def test_error_of_a_handler_that_is_called_at_once() -> None:
    ours, theirs = sides()

    def handle(_: Note) -> None:
        raise KeyError("a bug")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(theirs.run)
        theirs.endpoint.send(Note(b""))
        with pytest.raises(ExceptionGroup) as raised:
            await ours.endpoint.run(at_once=handle)
        assert raised.group_contains(KeyError)
        await until(lambda: theirs.cause)
