"""Arbitrary bytes on a control connection never create a lease that the client did not request."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvtier.concurrency.threads import WorkerThreads
from kvtier.errors import ChannelError
from kvtier.memory.header import ChunkHeader
from kvtier.peers.dialing import ControlConnection, PeerDialer
from kvtier.peers.protocol import VERSION, Committed, Granted, Reserved, Welcome, decode_from_server
from kvtier.peers.push import Pusher
from kvtier.peers.source import Source, timeouts_of
from kvtier.peers.throughput import PeerThroughput
from kvtier.rpc.endpoint import Endpoint
from kvtier.rpc.frames import Message, encode
from kvtier.rpc.wire import SocketWire
from kvtier.testing.backend import make_key
from kvtier.tiers.sealer import Sealer
from tests.rigs.scripted_peer import MemoryTransport, NoAuthentication

pytestmark = pytest.mark.anyio

any_numbers = st.integers(-3, 6) | st.integers(-(1 << 63), (1 << 64) - 1)
any_lists = st.lists(any_numbers, max_size=5)
KEYS = [make_key(number) for number in range(4)]
HEADERS = [ChunkHeader(key, key, bytes(32), 1000) for key in KEYS]


@asynccontextmanager
async def connected_source(*answers: Message) -> AsyncIterator[tuple[Source, socket.socket]]:
    """A connection over which these answers have arrived, and the peer's end of it."""
    ours, theirs = socket.socketpair()
    welcome = Welcome(VERSION, "there", "memory", b"there", 10.0)
    source = Source(
        PeerDialer("127.0.0.1", 1, NoAuthentication(), "here", WorkerThreads(1)),  # type: ignore[arg-type]
        ControlConnection(ours, welcome),
        MemoryTransport([]),
        PeerThroughput(),
        timeouts_of(5.0),
        lambda _: None,
    )
    with theirs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(source.endpoint.run)
            theirs.sendall(b"".join(map(encode, answers)))
            yield source, theirs
            tasks.cancel_scope.cancel()


@settings(max_examples=150, deadline=None)
@given(
    grant=any_numbers,
    positions=any_lists,
    offsets=any_lists,
    lengths=any_lists,
    ready=any_numbers,
    prefix=st.booleans(),
)
async def test_any_granted_reply_is_refused_or_consistent(
    grant: int, positions: list[int], offsets: list[int], lengths: list[int], ready: int, prefix: bool
) -> None:
    async with connected_source(Granted(1, grant, positions, offsets, lengths, ready)) as (source, _):
        try:
            found = await source.look_up(KEYS, prefix=prefix)
        except ChannelError:
            assert not len(source.leases)
            assert source.over
            return
        assert len(source.leases) == len(found) == len(offsets) == len(lengths)
        for number, position in enumerate(found):
            lease = source.leases.find(KEYS[position])
            assert lease is not None
            assert lease.number == number
            assert lease.ready == (number < ready)
            assert 0 < lease.grant < 1 << 63
            assert lease.offset >= 0
            assert lease.length > 0
            assert lease.offset + lease.length < 1 << 63
        assert not prefix or sorted(found) == list(range(len(found)))


LAST = (1 << 63) - 1
"""The greatest number of a grant, and the end of the last slice."""
GRANTED = Granted(1, LAST, [1, 0], [0, LAST - 1000], [1, 1000], 1)
RESERVED = Reserved(1, LAST, [1, 0], [0, LAST - 1000], 1.0, [2], [3], "")
FAULTS: list[dict[str, Any]] = [
    {"grant": 0},
    {"grant": -1},
    {"grant": LAST + 1},
    {"positions": [1]},
    {"positions": [1, 1]},
    {"positions": [1, -1]},
    {"positions": [1, 4]},
    {"offsets": [0]},
    {"offsets": [0, -1]},
    {"offsets": [0, LAST - 999]},
]


async def test_replies_at_the_limits_are_accepted() -> None:
    async with connected_source(GRANTED) as (source, _):
        assert await source.look_up(KEYS, prefix=True) == [1, 0]
    async with connected_source(RESERVED) as (source, _):
        assert list((await Pusher(source, Sealer()).reserve(HEADERS)).leases) == [1, 0]


@pytest.mark.parametrize(
    "fault",
    [
        *FAULTS,
        {"positions": [1, 3]},
        {"lengths": [1]},
        {"lengths": [1, 0]},
        {"lengths": [1, -1]},
        {"ready": -1},
        {"ready": 3},
    ],
    ids=str,
)
async def test_granted_reply_with_one_fault_is_refused(fault: dict[str, Any]) -> None:
    async with connected_source(structs.replace(GRANTED, **fault)) as (source, _):
        with pytest.raises(ChannelError):
            await source.look_up(KEYS, prefix=True)
        assert source.over
        assert not len(source.leases)


@pytest.mark.parametrize(
    "fault",
    [
        *FAULTS,
        {"held": [2, 1]},
        {"pending": [4]},
        {"seconds": 0.0},
        {"seconds": -1.0},
        {"seconds": float("inf")},
        {"seconds": float("nan")},
    ],
    ids=str,
)
async def test_reserved_reply_with_one_fault_is_refused(fault: dict[str, Any]) -> None:
    async with connected_source(structs.replace(RESERVED, **fault)) as (source, _):
        with pytest.raises(ChannelError):
            await Pusher(source, Sealer()).reserve(HEADERS)
        assert source.over


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200))
async def test_any_bytes_end_the_connection_with_an_error(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    endpoint = Endpoint(SocketWire(ours), decode_from_server)
    with theirs:
        theirs.sendall(data)
    error = await endpoint.run()
    assert isinstance(error, ChannelError)
    assert str(error)
    assert endpoint.closed


@settings(max_examples=150, deadline=None)
@given(
    grant=any_numbers,
    positions=any_lists,
    offsets=any_lists,
    seconds=st.floats(),
    held=any_lists,
    coming=any_lists,
)
async def test_any_reserved_reply_is_refused_or_consistent(
    grant: int, positions: list[int], offsets: list[int], seconds: float, held: list[int], coming: list[int]
) -> None:
    answer = Reserved(1, grant, positions, offsets, seconds, held, coming, "")
    async with connected_source(answer) as (source, _):
        try:
            room = await Pusher(source, Sealer()).reserve(HEADERS)
        except ChannelError:
            assert source.over
            return
        indices = [*room.leases, *room.held, *room.pending]
        assert len(set(indices)) == len(indices)
        assert all(0 <= at < len(KEYS) for at in indices)
        assert [lease.number for lease in room.leases.values()] == list(range(len(positions)))
        for at, lease in room.leases.items():
            assert lease.key == KEYS[at]
            assert lease.length == 1000
            assert 0 < lease.grant < 1 << 63
            assert 0 <= lease.offset < lease.offset + 1000 < 1 << 63


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_committed_reply_of_wrong_length_closes_connection(count: int) -> None:
    answer = Reserved(1, 5, [0, 1], [0, 4096], 1.0, [], [], "")
    async with connected_source(answer) as (source, peer):
        target = Pusher(source, Sealer())
        leases = list((await target.reserve(HEADERS[:2])).leases.values())
        peer.send(encode(Committed(2, [True] * count)))
        with pytest.raises(ChannelError):
            await target.commit(leases, [bytes(16)] * 2)
        assert source.over
