from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from kvtier.errors import ChannelClosed, ProtocolError
from kvtier.rpc.frames import LENGTH, MAX_FRAME_BYTES
from kvtier.rpc.wire import FrameSocket, SocketWire, peer_credentials

pytestmark = pytest.mark.anyio

Pair = tuple[FrameSocket, FrameSocket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = (FrameSocket(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_nothing_to_read_and_half_a_frame(pair: Pair) -> None:
    ours, theirs = pair
    assert theirs.read() is None
    ours.socket.send(LENGTH.pack(3) + b"ab")
    assert theirs.read() == []
    ours.socket.send(b"c" + LENGTH.pack(0))
    assert theirs.read() == [b"abc", b""]
    assert theirs.read() is None


def test_what_does_not_fit_is_sent_later(pair: Pair) -> None:
    ours, theirs = pair
    bodies = [bytes([number]) * (1 << 20) for number in range(3)]
    for body in bodies:
        ours.write(body)
    assert not ours.flush()
    received: list[bytes] = []
    while len(received) < 3:
        received += theirs.read() or []
        ours.flush()
    assert received == bodies
    assert ours.flush()
    assert not ours.unsent


def test_queue_is_limited() -> None:
    ends = socket.socketpair()
    with ends[1]:
        ours = FrameSocket(ends[0], limit=1000)
        ours.write(bytes(1001))
        with pytest.raises(ChannelClosed, match="not read for too long"):
            ours.write(b"")
        assert ours.flush()
        ours.write(b"again")
        ours.close()


def test_end_of_the_other_side(pair: Pair) -> None:
    ours, theirs = pair
    ours.write(b"last")
    assert ours.flush()
    ours.close()
    ours.close()
    assert theirs.read() == [b"last"]
    with pytest.raises(ChannelClosed, match="has closed"):
        theirs.read()
    theirs.write(b"")
    with pytest.raises(ChannelClosed):
        theirs.flush()


def test_too_long_frame_is_refused(pair: Pair) -> None:
    ours, theirs = pair
    ours.socket.send(LENGTH.pack(MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="is over"):
        theirs.read()


def test_file_descriptors_arrive_only_where_they_are_taken(pair: Pair) -> None:
    ours, theirs = pair
    reading, writing = os.pipe()
    theirs.takes_fds = True
    ours.write(b"first", [writing])
    assert ours.flush()
    assert theirs.read() == [b"first"]
    theirs.takes_fds = False
    ours.write(b"second", [writing])
    assert ours.flush()
    assert theirs.read() == [b"second"]
    os.close(writing)
    [received] = theirs.received_fds
    os.write(received, b"x")
    os.close(received)
    assert os.read(reading, 2) == b"x"
    assert os.read(reading, 2) == b"", "the second one was closed on arrival"
    os.close(reading)


def test_user_of_the_other_side(pair: Pair) -> None:
    assert peer_credentials(pair[0].socket) == (os.getpid(), os.getuid())


def test_user_ids_have_32_bits_without_a_sign() -> None:
    user = (1 << 32) - 2
    connected: Any = SimpleNamespace(getsockopt=lambda *_: struct.pack("=iII", 7, user, 0))
    assert peer_credentials(connected) == (7, user)


async def test_wire_waits_for_whole_frames_and_for_room() -> None:
    ours, theirs = (SocketWire(end) for end in socket.socketpair())
    received: list[bytes] = []

    async def receive() -> None:
        while len(received) < 4:
            received.extend(await theirs.receive())

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await anyio.wait_all_tasks_blocked()
            for number in range(4):
                ours.write(bytes([number]) * (1 << 20))
            ours.flush_now()
            assert ours.unsent
            await ours.flush()
            assert not ours.unsent
    assert [body[:1] for body in received] == [b"\0", b"\1", b"\2", b"\3"]
    ours.close()
    with pytest.raises(ChannelClosed):
        await theirs.receive()
    theirs.close()
