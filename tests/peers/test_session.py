"""Any sequence of valid and invalid messages: sessions neither raise unexpected errors nor leak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvtier.errors import ChannelClosed, ProtocolError
from kvtier.memory.keys import join_keys
from kvtier.peers.protocol import (
    Announce,
    Await,
    Commit,
    Contains,
    Granted,
    Hello,
    Lookup,
    Release,
    Released,
    Reserve,
    Withdraw,
    decode_from_client,
    decode_from_server,
)
from kvtier.rpc.frames import FrameReader, Message, Ping, Pong, encode
from kvtier.testing.backend import make_key
from tests.rigs.peer_session import HELD, ClientMessage, SessionHarness

pytestmark = pytest.mark.anyio

FEW_EXAMPLES = hypothesis_settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)

tickets = st.integers(-(1 << 63), (1 << 64) - 1)
keys = st.lists(st.sampled_from([*HELD, make_key(99)]), max_size=8).map(join_keys)
numbers = st.lists(st.integers(-2, 8), max_size=4)
any_grant = st.one_of(st.none(), st.integers(-5, 1 << 63))


def about(
    kind: type[Await] | type[Release], ticket: int, grant: int | None, chunks: list[int]
) -> ClientMessage:
    if grant is not None:
        return kind(ticket, grant, chunks)
    return lambda latest: kind(ticket, latest, chunks)


def commit(ticket: int, grant: int | None, chunks: list[int]) -> ClientMessage:
    if grant is not None:
        return Commit(ticket, grant, chunks, bytes(16 * len(chunks)))
    return lambda latest: Commit(ticket, latest, chunks, bytes(16 * len(chunks)))


def reserve(ticket: int, which: list[int], length: int) -> Reserve:
    joined = join_keys([make_key(number) for number in which])
    return Reserve(ticket, bytes(32), joined, joined, [length] * len(which))


valid: st.SearchStrategy[ClientMessage] = st.one_of(
    st.builds(Lookup, tickets, keys, st.booleans(), st.binary(max_size=30)),
    st.builds(Contains, tickets, keys),
    st.builds(Ping, tickets),
    st.builds(partial(about, Await), tickets, any_grant, numbers),
    st.builds(partial(about, Release), tickets, any_grant, numbers),
    st.builds(reserve, tickets, st.lists(st.integers(1, 40), max_size=8), st.integers(1, 20_000)),
    st.builds(commit, tickets, any_grant, numbers),
    st.builds(Withdraw, tickets),
)
invalid: st.SearchStrategy[ClientMessage] = st.one_of(
    st.builds(Lookup, tickets, st.binary(max_size=70), st.booleans()),
    st.builds(reserve, tickets, st.lists(st.integers(1, 40), max_size=8), tickets),
    st.builds(Commit, tickets, tickets, st.lists(tickets, max_size=4), st.binary(max_size=70)),
    st.builds(Announce, tickets, st.integers(0, 3), keys),
    st.builds(Announce, tickets, tickets, st.binary(max_size=70)),
    st.builds(Hello, st.integers(0, 3), st.text(max_size=5), st.sampled_from(["control", "data"])),
    st.builds(Pong, tickets),
    st.binary(max_size=60),
    st.binary(max_size=60).map(lambda body: len(body).to_bytes(4, "little") + body),
)


@FEW_EXAMPLES
@given(st.lists(st.one_of(valid, valid, valid, invalid), max_size=12))
async def test_no_message_sequence_raises_or_leaks(messages: list[ClientMessage]) -> None:
    async with SessionHarness.open() as harness:
        _, error = await harness.run(*messages)
        assert isinstance(error, ChannelClosed | ProtocolError)
        replies, error = await harness.run(Ping(1))
        assert replies == [Pong(1)], "it still serves others"


@FEW_EXAMPLES
@given(st.lists(valid, max_size=12))
async def test_every_valid_request_is_answered_with_its_ticket(messages: list[ClientMessage]) -> None:
    async with SessionHarness.open() as harness:
        sent: list[Any] = []

        def recorded(original: ClientMessage) -> Callable[[int], Message]:
            def build(latest: int) -> Message:
                message = original(latest) if callable(original) else original
                assert not isinstance(message, bytes)
                if isinstance(message, Await | Release):
                    message = type(message)(message.ticket, message.grant, message.chunks[:1])
                elif isinstance(message, Commit):
                    chunks = message.chunks[:1]
                    message = Commit(message.ticket, message.grant, chunks, bytes(16 * len(chunks)))
                sent.append(message)
                return message

            return build

        replies, error = await harness.run(*map(recorded, messages))
        assert isinstance(error, ChannelClosed)
        tickets_answered = Counter(reply.ticket for reply in replies)
        requests = [message for message in sent if not isinstance(message, Withdraw)]
        assert tickets_answered <= Counter(message.ticket for message in requests)
        # Replies to Await and Commit are lost if the client disconnects first.
        immediate = [message.ticket for message in requests if not isinstance(message, Await | Commit)]
        assert Counter(immediate) <= tickets_answered


async def test_grant_can_be_released_in_its_session() -> None:
    async with SessionHarness.open() as harness:
        look_up = Lookup(1, join_keys(HELD[:2]), True)
        replies, _ = await harness.run(look_up, lambda number: Release(2, number, [0, 1]))
        assert isinstance(replies[0], Granted)
        assert replies[1] == Released(2, True)


# Decoding.


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    for decode in (decode_from_client, decode_from_server):
        with suppress(ProtocolError):
            assert isinstance(decode(body), Message)


@given(st.lists(valid, min_size=1, max_size=5))
def test_messages_round_trip(messages: list[ClientMessage]) -> None:
    built = [message(5) if callable(message) else message for message in messages]
    data = b"".join(encode(message) for message in built if not isinstance(message, bytes))
    assert [decode_from_client(body) for body in FrameReader().feed(data)] == built


@pytest.mark.parametrize(
    "body",
    [
        b"\x94\x01\x01\xa2\xf2\xf2\xa7control",  # Not UTF-8, for which msgspec raises another error.
        b"\x93\x04\x01" + b"\x91" * 100_000,  # Nested deeper than Python's stack.
    ],
    ids=["text", "depth"],
)
def test_other_msgspec_errors_are_protocol_errors(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_from_client(body)


@given(st.binary(max_size=200))
def test_damaged_messages_are_decoded_or_refused(damage: bytes) -> None:
    body = bytearray(encode(Lookup(1, bytes(64), True))[4:])
    for at, byte in enumerate(damage[: len(body)]):
        body[at] ^= byte
    try:
        message = decode_from_client(bytes(body))
    except ProtocolError:
        return
    assert isinstance(message, Message)
