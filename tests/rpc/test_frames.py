from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ProtocolError
from kvtier.rpc.frames import (
    LENGTH,
    MAX_FRAME_BYTES,
    FrameReader,
    Message,
    Ping,
    Refused,
    encode,
    encode_body,
    read_frame,
    receive_frame,
)
from tests.rpc.endpoints import Answer, Ask, Note, decode

pytestmark = pytest.mark.anyio

OVERHEAD = len(encode_body(Note(bytes(1 << 16)))) - (1 << 16)


def reader_of(data: bytes) -> Callable[[int], bytes]:
    """Return a function that reads exactly as many bytes as it is asked for."""
    left = [data]

    def read(length: int) -> bytes:
        read, left[0] = left[0][:length], left[0][length:]
        if len(read) < length:
            raise ConnectionResetError("the other side has closed")
        return read

    return read


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=10), st.lists(st.integers(1, 50), min_size=1))
def test_frames_are_reassembled_from_any_pieces(bodies: list[bytes], cuts: list[int]) -> None:
    data = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    reader = FrameReader()
    frames: list[bytes] = []
    piece = 0
    while data:
        length = cuts[piece % len(cuts)]
        frames += reader.feed(data[:length])
        data = data[length:]
        piece += 1
    assert frames == bodies
    assert reader.feed(LENGTH.pack(1) + b"x") == [b"x"], "nothing is left over"


@settings(deadline=None)
@given(st.lists(st.binary(max_size=100), max_size=20))
def test_any_bytes_are_frames_or_refused(pieces: list[bytes]) -> None:
    reader = FrameReader()
    with suppress(ProtocolError):
        for piece in pieces:
            reader.feed(piece)


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 1 << 31, (1 << 32) - 1])
def test_oversized_frame_is_refused_by_its_header(length: int) -> None:
    with pytest.raises(ProtocolError, match="is over"):
        FrameReader().feed(length.to_bytes(4, "little"))


def test_longest_frame_is_sent_and_read_and_a_longer_one_is_not_sent() -> None:
    longest = Note(bytes(MAX_FRAME_BYTES - OVERHEAD))
    [body] = FrameReader().feed(encode(longest))
    assert len(body) == MAX_FRAME_BYTES
    assert decode(body) == longest
    with pytest.raises(ProtocolError, match=f"Note of {MAX_FRAME_BYTES + 1} bytes is over {MAX_FRAME_BYTES}"):
        encode(Note(bytes(MAX_FRAME_BYTES - OVERHEAD + 1)))


@pytest.mark.parametrize("message", [Ask(1, "x"), Answer(2, ""), Note(b"y"), Ping(1 << 40), Refused("no")])
def test_messages_round_trip(message: Message) -> None:
    assert decode(encode_body(message)) == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x92\x63\x01",
        b"\x93\x0a\x01\xc0",
        b"\x93\x0a\x01\xa2\xf2\xf2",
        b"\x94\x0a\x01\xa0" + b"\x91" * 100_000,
    ],
    ids=["empty", "no MessagePack", "unknown tag", "wrong type", "not UTF-8", "too deep"],
)
def test_other_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a message of these tests"):
        decode(body)


def test_frame_is_read_without_what_follows() -> None:
    read = reader_of(encode(Ask(1, "x")) + b"more")
    assert decode(read_frame(read, 100)) == Ask(1, "x")
    assert read(4) == b"more"


def test_limit_is_checked_before_the_body_is_read() -> None:
    read = reader_of(LENGTH.pack(101) + bytes(101))
    with pytest.raises(ProtocolError, match="a frame of 101 bytes is over 100"):
        read_frame(read, 100)
    assert len(read(101)) == 101


async def test_frame_is_received_without_what_follows() -> None:
    read = reader_of(LENGTH.pack(100) + bytes(100) + LENGTH.pack(101) + b"more")

    async def receive(length: int) -> bytes:
        return read(length)

    assert await receive_frame(receive, 100) == bytes(100)
    with pytest.raises(ProtocolError, match="a frame of 101 bytes is over 100"):
        await receive_frame(receive, 100)
    assert read(4) == b"more"
