from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from kvtier.errors import ChannelClosed, ChannelError, PeerError, ProtocolError
from kvtier.rpc.calls import Call, Calls
from kvtier.rpc.frames import Interim, Ping, Pong, Reply

pytestmark = pytest.mark.anyio


class Value(Reply, frozen=True, array_like=True, tag=10):
    number: int


class Part(Interim, frozen=True, array_like=True, tag=11):
    number: int


def add(calls: Calls, give_back: Callable[[int], None] | None = None) -> Call[int]:
    return calls.add("values", Value, lambda value: value.number, give_back=give_back)


def test_reply_settles_the_call_with_its_ticket() -> None:
    calls = Calls()
    first, second = add(calls), add(calls)
    assert first.ticket != second.ticket
    assert calls.settle(Value(second.ticket, 7))
    assert (first.settled, second.settled, second.result) == (False, True, 7)
    assert len(calls) == 1


def test_reply_without_a_call_is_reported() -> None:
    calls = Calls()
    call = add(calls)
    assert not calls.settle(Value(call.ticket + 1, 7))
    assert calls.settle(Value(call.ticket, 7))
    assert not calls.settle(Value(call.ticket, 8)), "a second reply has no call"
    assert call.result == 7


def test_reply_of_the_wrong_type_fails_the_call_and_raises() -> None:
    calls = Calls()
    call = add(calls)
    with pytest.raises(ProtocolError, match="answers values with Pong"):
        calls.settle(Pong(call.ticket))
    assert isinstance(call.error, ProtocolError)
    assert len(calls) == 0


def test_invalid_reply_fails_the_call_and_raises() -> None:
    def settle(value: Value) -> int:
        raise ProtocolError(f"{value.number} is invalid")

    calls = Calls()
    call = calls.add("values", Value, settle)
    with pytest.raises(ProtocolError, match="7 is invalid"):
        calls.settle(Value(call.ticket, 7))
    assert isinstance(call.error, ProtocolError)


def test_failed_request_is_an_error_of_its_caller_alone() -> None:
    def settle(_value: Value) -> int:
        raise PeerError("no room")

    calls = Calls()
    call = calls.add("values", Value, settle)
    assert calls.settle(Value(call.ticket, 7))
    assert isinstance(call.error, PeerError)


def test_abandoned_call_is_still_settled() -> None:
    """What the reply grants has to be given back."""
    calls, given_back = Calls(), list[int]()
    kept, abandoned = add(calls, given_back.append), add(calls, given_back.append)
    abandoned.abandon()
    assert len(calls) == 2
    calls.settle(Value(kept.ticket, 1))
    calls.settle(Value(abandoned.ticket, 2))
    assert given_back == [2]


def test_interim_replies_do_not_settle() -> None:
    parts: list[int] = []
    calls = Calls()
    call = calls.add("values", Value, lambda value: value.number, lambda part: parts.append(part.number))
    assert calls.settle(Part(call.ticket, 1))
    assert calls.settle(Part(call.ticket, 2))
    assert not call.settled
    call.abandon()
    assert calls.settle(Part(call.ticket, 3))
    assert parts == [1, 2]
    assert calls.settle(Value(call.ticket, 4))
    assert call.result == 4


def test_unanswered_requests_are_limited() -> None:
    calls = Calls(limit=2)
    first = add(calls)
    add(calls)
    with pytest.raises(ChannelError, match="2 requests unanswered"):
        add(calls)
    calls.settle(Value(first.ticket, 1))
    add(calls)


def test_end_of_the_connection_fails_every_call() -> None:
    calls = Calls()
    pending = [add(calls) for _ in range(3)]
    calls.fail(ChannelClosed("gone"))
    assert [str(call.error) for call in pending] == ["gone"] * 3
    assert len(calls) == 0


def test_names_are_those_of_unanswered_requests() -> None:
    calls = Calls()
    add(calls)
    calls.add("pings", Pong, lambda _pong: True)
    assert sorted(calls.names) == ["pings", "values"]


async def test_reply_waits_for_the_result() -> None:
    calls = Calls()
    call = add(calls)
    results: list[int] = []

    async def wait() -> None:
        results.append(await call.reply())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        calls.settle(Value(call.ticket, 7))
    assert results == [7, 7]
    assert await call.reply() == 7, "a settled call answers at once"


async def test_reply_raises_the_error() -> None:
    calls = Calls()
    call = add(calls)
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            with pytest.raises(ChannelClosed, match="gone"):
                await call.reply()

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        calls.fail(ChannelClosed("gone"))


async def test_cancelled_caller_gives_the_call_up() -> None:
    calls = Calls()
    call = add(calls)
    with anyio.move_on_after(0):
        await call.reply()
    assert not call.wanted
    assert call.ticket in calls


async def test_wait_does_not_give_the_call_up() -> None:
    calls = Calls()
    call = add(calls)
    assert not await call.wait(0.001)
    assert call.wanted
    calls.settle(Value(call.ticket, 7))
    assert await call.wait(0)


def test_ping_and_pong_share_a_ticket() -> None:
    calls = Calls()
    call = calls.add("pings", Pong, lambda _pong: True)
    assert calls.settle(Pong(Ping(call.ticket).ticket))
    assert call.result is True


async def test_result_that_arrives_while_the_caller_is_cancelled_is_given_back() -> None:
    calls, given_back = Calls(), list[int]()
    call = add(calls, given_back.append)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call.reply)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            assert calls.settle(Value(call.ticket, 7))
    assert given_back == [7]
