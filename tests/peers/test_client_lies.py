"""Whatever bytes a peer sends on its control connection: nothing is promised that was not asked for."""

from __future__ import annotations

import socket

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ChannelError
from kvtier.peers.conversation import Conversation
from kvtier.peers.dialling import Called, Caller
from kvtier.peers.pace import Pace
from kvtier.peers.protocol import VERSION, Granted, Welcome
from kvtier.peers.source import Patience, Source
from kvtier.sockets.channel import Channel
from kvtier.sockets.frames import encode
from kvtier.testing.backend import make_key
from kvtier.threads import WorkerThreads

from .scripted import MemoryTransport, OpenDoor

pytestmark = pytest.mark.anyio

numbers = st.integers(-3, 6) | st.integers(-(1 << 63), (1 << 64) - 1)
lists = st.lists(numbers, max_size=5)
KEYS = [make_key(number) for number in range(4)]


def source_of(connected: socket.socket) -> Source:
    welcome = Welcome(VERSION, "there", "memory", b"there", 10.0)
    return Source(
        Caller("127.0.0.1", 1, OpenDoor(), "here", WorkerThreads(1)),  # type: ignore[arg-type]
        Called(connected, welcome),
        MemoryTransport([]),
        Pace(),
        Patience(5.0),
        lambda _: None,
    )


@settings(max_examples=300, deadline=None)
@given(
    grant=numbers,
    positions=lists,
    offsets=lists,
    lengths=lists,
    ready=numbers,
    prefix=st.booleans(),
)
async def test_any_grant_is_refused_or_consistent(
    grant: int, positions: list[int], offsets: list[int], lengths: list[int], ready: int, prefix: bool
) -> None:
    mine, theirs = socket.socketpair()
    with theirs:
        source = source_of(mine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(source.conversation.run)
            theirs.send(encode(Granted(1, grant, positions, offsets, lengths, ready)))
            try:
                found = await source.look_up(KEYS, prefix=prefix)
            except ChannelError:
                assert not len(source.promises)
                assert source.over
            else:
                assert len(source.promises) == len(found) == len(offsets) == len(lengths)
                for number, position in enumerate(found):
                    promise = source.promises.find(KEYS[position])
                    assert promise is not None
                    assert promise.number == number
                    assert promise.ready == (number < ready)
                    assert 0 < promise.grant < 1 << 63
                    assert promise.offset >= 0
                    assert promise.length > 0
                    assert promise.offset + promise.length < 1 << 63
                assert not prefix or sorted(found) == list(range(len(found)))
            tasks.cancel_scope.cancel()


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
async def test_any_bytes_end_in_words_or_in_nothing(data: bytes) -> None:
    mine, theirs = socket.socketpair()
    conversation = Conversation(Channel(mine))
    with theirs:
        theirs.sendall(data)
    cause = await conversation.run()
    assert isinstance(cause, ChannelError)
    assert str(cause)
    assert conversation.over
