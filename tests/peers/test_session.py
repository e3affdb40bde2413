"""Sessions that are told any sequence of what may and may not be said. They never raise, nor leak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvtier.errors import ChannelClosed, ProtocolError
from kvtier.keys import join_keys
from kvtier.peers.protocol import (
    Announce,
    Await,
    Commit,
    Contains,
    Granted,
    Hello,
    LookUp,
    Ping,
    Pong,
    Release,
    Released,
    Reserve,
    Withdraw,
    decode_from_client,
    decode_from_server,
)
from kvtier.sockets.frames import MAX_FRAME_BYTES, FrameReader, Message, encode
from kvtier.testing.backend import make_key

from .conversing import HELD, Conversing, Said

pytestmark = pytest.mark.anyio

FEW = hypothesis_settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

tickets = st.integers(-(1 << 63), (1 << 64) - 1)
keys = st.lists(st.sampled_from([*HELD, make_key(99)]), max_size=8).map(join_keys)
numbers = st.lists(st.integers(-2, 8), max_size=4)
of_a_grant = st.one_of(st.none(), st.integers(-5, 1 << 63))


def about(kind: type[Await] | type[Release], ticket: int, grant: int | None, chunks: list[int]) -> Said:
    if grant is not None:
        return kind(ticket, grant, chunks)
    return lambda latest: kind(ticket, latest, chunks)


def committing(ticket: int, grant: int | None, chunks: list[int]) -> Said:
    if grant is not None:
        return Commit(ticket, grant, chunks, bytes(16 * len(chunks)))
    return lambda latest: Commit(ticket, latest, chunks, bytes(16 * len(chunks)))


def reserving(ticket: int, which: list[int], length: int) -> Reserve:
    joined = join_keys([make_key(number) for number in which])
    return Reserve(ticket, bytes(32), joined, joined, [length] * len(which))


valid: st.SearchStrategy[Said] = st.one_of(
    st.builds(LookUp, tickets, keys, st.booleans()),
    st.builds(Contains, tickets, keys),
    st.builds(Ping, tickets),
    st.builds(partial(about, Await), tickets, of_a_grant, numbers),
    st.builds(partial(about, Release), tickets, of_a_grant, numbers),
    st.builds(reserving, tickets, st.lists(st.integers(1, 40), max_size=8), st.integers(1, 20_000)),
    st.builds(committing, tickets, of_a_grant, numbers),
    st.builds(Withdraw, tickets, tickets),
)
invalid: st.SearchStrategy[Said] = st.one_of(
    st.builds(LookUp, tickets, st.binary(max_size=70), st.booleans()),
    st.builds(reserving, tickets, st.lists(st.integers(1, 40), max_size=8), tickets),
    st.builds(Commit, tickets, tickets, st.lists(tickets, max_size=4), st.binary(max_size=70)),
    st.builds(Announce, tickets, st.integers(0, 3), keys),
    st.builds(Announce, tickets, tickets, st.binary(max_size=70)),
    st.builds(Hello, st.integers(0, 3), st.text(max_size=5), st.sampled_from(["control", "data"])),
    st.builds(Pong, tickets),
    st.binary(max_size=60),
    st.binary(max_size=60).map(lambda body: len(body).to_bytes(4, "little") + body),
)


@FEW
@given(st.lists(st.one_of(valid, valid, valid, invalid), max_size=12))
def test_no_sequence_raises_or_leaks(said: list[Said]) -> None:
    async def lead() -> None:
        async with Conversing.open() as conversing:
            _, end = await conversing.lead(*said)
            assert isinstance(end, ChannelClosed | ProtocolError)
            answers, end = await conversing.lead(Ping(1))
            assert answers == [Pong(1)], "it still serves others"

    anyio.run(lead)


@FEW
@given(st.lists(valid, max_size=12))
def test_everything_valid_is_answered_with_its_ticket(said: list[Said]) -> None:
    async def lead() -> None:
        async with Conversing.open() as conversing:
            asked: list[Any] = []

            def noted(one: Said) -> Callable[[int], Message]:
                def make(latest: int) -> Message:
                    message = one(latest) if callable(one) else one
                    assert not isinstance(message, bytes)
                    if isinstance(message, Await | Release):
                        message = type(message)(message.ticket, message.grant, message.chunks[:1])
                    elif isinstance(message, Commit):
                        chunks = message.chunks[:1]
                        message = Commit(message.ticket, message.grant, chunks, bytes(16 * len(chunks)))
                    asked.append(message)
                    return message

                return make

            answers, end = await conversing.lead(*map(noted, said))
            assert isinstance(end, ChannelClosed)
            answered = Counter(answer.ticket for answer in answers)
            assert answered <= Counter(message.ticket for message in asked)
            # Nobody hears what was awaited or committed, where the client hangs up before.
            at_once = [message.ticket for message in asked if not isinstance(message, Await | Commit)]
            assert Counter(at_once) <= answered

    anyio.run(lead)


async def test_a_grant_can_be_used_in_the_conversation() -> None:
    async with Conversing.open() as conversing:
        look_up = LookUp(1, join_keys(HELD[:2]), True)
        answers, _ = await conversing.lead(look_up, lambda number: Release(2, number, [0, 1]))
        assert isinstance(answers[0], Granted)
        assert answers[1] == Released(2, True)


# Frames.


@given(st.lists(st.binary(max_size=300), max_size=10), st.lists(st.integers(1, 50), min_size=1))
def test_frames_come_out_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    data = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    reader = FrameReader()
    found: list[bytes] = []
    turn = 0
    while data:
        length = cuts[turn % len(cuts)]
        found += reader.feed(data[:length])
        data = data[length:]
        turn += 1
    assert found == bodies
    assert not reader._buffer


@given(st.lists(st.binary(max_size=100), max_size=20))
def test_any_bytes_are_frames_or_refused(pieces: list[bytes]) -> None:
    reader = FrameReader()
    try:
        for piece in pieces:
            for body in reader.feed(piece):
                for decode in (decode_from_client, decode_from_server):
                    with suppress(ProtocolError):
                        decode(body)
    except ProtocolError:
        return
    assert len(reader._buffer) <= 4 + MAX_FRAME_BYTES


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 1 << 31, (1 << 32) - 1])
def test_a_frame_that_is_too_long_is_refused_before_it_comes(length: int) -> None:
    with pytest.raises(ProtocolError, match="is over"):
        FrameReader().feed(length.to_bytes(4, "little"))


@given(st.lists(valid, min_size=1, max_size=5))
def test_messages_survive_the_wire(said: list[Said]) -> None:
    messages = [one(5) if callable(one) else one for one in said]
    data = b"".join(encode(message) for message in messages if not isinstance(message, bytes))
    assert [decode_from_client(body) for body in FrameReader().feed(data)] == messages


@pytest.mark.parametrize(
    "body",
    [
        b"\x94\x01\x01\xa2\xf2\xf2\xa7control",  # Not UTF-8, which msgspec tells in a way of its own.
        b"\x93\x0c\x01" + b"\x91" * 100_000,  # Deeper than Python's stack, where nothing should be.
    ],
    ids=["text", "depth"],
)
def test_what_msgspec_refuses_in_other_ways(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_from_client(body)


@given(st.binary(max_size=200))
def test_damaged_messages_are_decoded_or_refused(damage: bytes) -> None:
    body = bytearray(encode(LookUp(1, bytes(64), True))[4:])
    for at, byte in enumerate(damage[: len(body)]):
        body[at] ^= byte
    try:
        message = decode_from_client(bytes(body))
    except ProtocolError:
        return
    assert isinstance(message, Message)
