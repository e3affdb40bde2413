"""The RESP connection: replies in arbitrary pieces, and invalid replies."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backends.redis import protocol
from kvtier.backends.redis.protocol import DRAIN_BYTES, ErrorReply, encode
from kvtier.concurrency.sockets.connection import (
    BUFFER_BYTES,
    IOV_MAX,
    Deadline,
    ProtocolViolation,
)
from kvtier.testing.backend import noise
from tests.rigs.tcp_server import connected

SECONDS = 100.0


def received(peer: socket.socket, length: int) -> bytes:
    """Receive exactly ``length`` bytes."""
    return peer.recv(length, socket.MSG_WAITALL)


def deliver(peer: socket.socket, data: bytes, cuts: Sequence[int]) -> None:
    """Send data in pieces, each in its own packet."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    marks = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, stop in itertools.pairwise(marks):
        peer.sendall(data[start:stop])


values = st.sampled_from(
    [0, 1, 2, 100, BUFFER_BYTES - 8, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 50_000]
)
replies = st.one_of(
    st.tuples(st.just("status"), st.just(0)),
    st.tuples(st.just("number"), st.integers(0, 10**18)),
    st.tuples(st.just("refusal"), st.just(0)),
    st.tuples(st.just("nothing"), st.just(0)),
    st.tuples(st.just("value"), values),
    st.tuples(st.just("other"), values),
)


def encode_reply(kind: str, number: int) -> bytes:
    value = noise(b"%d" % number, number) if kind in ("value", "other") else b""
    return {
        "status": b"+OK\r\n",
        "number": b":%d\r\n" % number,
        "refusal": b"-OOM no room\r\n",
        "nothing": b"$-1\r\n",
        "value": b"$%d\r\n%b\r\n" % (number, value),
        "other": b"$%d\r\n%b\r\n" % (number, value),
    }[kind]


@given(st.lists(replies, min_size=1, max_size=12), st.lists(st.integers(0, 1 << 30), max_size=8))
def test_replies_may_arrive_in_any_pieces(expected_replies: list[tuple[str, int]], cuts: list[int]) -> None:
    with connected() as (connection, peer), ThreadPoolExecutor(1) as threads:
        sending = threads.submit(
            deliver, peer, b"".join(encode_reply(*reply) for reply in expected_replies), cuts
        )
        for kind, number in expected_replies:
            if kind in ("nothing", "value", "other"):
                view = memoryview(bytearray(number + (kind == "other")))
                assert protocol.value_into(connection, view) is (kind == "value")
                assert kind != "value" or bytes(view) == noise(b"%d" % number, number)
            else:
                expected = {"status": b"OK", "number": number, "refusal": ErrorReply("OOM", "OOM no room")}
                assert protocol.read_reply(connection) == expected[kind]
        sending.result()
        assert connection.is_idle()
        assert connection.in_sync


@given(st.lists(st.integers(0, 200_000), max_size=5), st.integers(0, 2 * IOV_MAX))
def test_sent_data_arrives(sizes: list[int], small: int) -> None:
    buffers = [memoryview(noise(b"%d" % size, size)) for size in sizes] + [memoryview(b"x\r\n")] * small
    with connected() as (connection, peer), ThreadPoolExecutor(1) as threads:
        connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        length = sum(len(buffer) for buffer in buffers)
        arrived = threads.submit(received, peer, length)
        connection.send(buffers)
        assert arrived.result() == b"".join(buffers)


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$-2\r\n",
        b"$+4\r\n",
        b"$ 4\r\n",
        b"$1_0\r\n",
        b"$\xd9\xa4\r\n",
        b"$\r\n",
        b"\r\n",
        b"$99999999999999999999999999\r\n",
        b"*1\r\n$4\r\nabcd\r\n",
        b"$4\r\nabcdef",
        b"+" + bytes(BUFFER_BYTES),
    ],
)
def test_invalid_reply_instead_of_a_value(garbage: bytes) -> None:
    with connected() as (connection, peer):
        peer.sendall(garbage)
        with pytest.raises(ProtocolViolation):
            protocol.value_into(connection, memoryview(bytearray(4)))


@pytest.mark.parametrize(
    "garbage", [b"$4\r\nabcd\r\n", b":\r\n", b":-1\r\n", b":1.0\r\n", b":" + b"1" * 20 + b"\r\n"]
)
def test_invalid_reply_instead_of_a_number(garbage: bytes) -> None:
    with connected() as (connection, peer):
        peer.sendall(garbage)
        with pytest.raises(ProtocolViolation):
            protocol.read_reply(connection)


@pytest.mark.parametrize("part", [b"", b"$", b"$4\r\n", b"$4\r\nab", b"$4\r\nabcd", b"$4\r\nabcd\r"])
def test_connection_closed_within_a_reply(part: bytes) -> None:
    with connected() as (connection, peer):
        peer.sendall(part)
        peer.close()
        with pytest.raises(ConnectionResetError):
            protocol.value_into(connection, memoryview(bytearray(4)))


def test_huge_length_is_neither_read_nor_allocated() -> None:
    with connected() as (connection, peer):
        peer.sendall(b"$9000000000000000000\r\n")
        assert protocol.value_into(connection, memoryview(bytearray(4))) is False
        assert not connection.in_sync


def test_value_of_another_length_is_drained_up_to_a_limit() -> None:
    with connected() as (connection, peer), ThreadPoolExecutor(1) as threads:
        sending = threads.submit(peer.sendall, b"$%d\r\n%b\r\n+OK\r\n" % (DRAIN_BYTES, bytes(DRAIN_BYTES)))
        assert protocol.value_into(connection, memoryview(bytearray(4))) is False
        assert connection.in_sync
        assert protocol.read_reply(connection) == b"OK"
        sending.result()


def test_unrequested_data_is_detected() -> None:
    with connected() as (connection, peer):
        assert connection.is_idle()
        peer.sendall(b"+OK\r\n:1\r\n")
        assert protocol.read_reply(connection) == b"OK"
        assert not connection.is_idle()
    with connected() as (connection, peer):
        peer.close()
        assert not connection.is_idle()


def test_unresponsive_server_times_out() -> None:
    with connected(0.05) as (connection, _), pytest.raises(TimeoutError):
        protocol.read_reply(connection)
    with connected(0.05) as (connection, _), pytest.raises(TimeoutError):
        connection.send([memoryview(bytes(64 << 20))])


def test_slow_server_times_out() -> None:
    deadline, length = Deadline(0.2), 100 << 20
    with connected(deadline) as (connection, peer), ThreadPoolExecutor(1) as threads:

        def trickle() -> None:
            with suppress(TimeoutError):
                while deadline.remaining():
                    peer.sendall(b"x")

        peer.sendall(b"$%d\r\n" % length)
        trickling = threads.submit(trickle)
        with pytest.raises(TimeoutError):
            protocol.value_into(connection, memoryview(bytearray(length)))
        trickling.result()


def test_deadline_expired_from_another_thread() -> None:
    deadline = Deadline(1000 * SECONDS)
    with connected(deadline) as (connection, peer), ThreadPoolExecutor(1) as threads:
        peer.sendall(b"$4\r\nab")
        waiting = threads.submit(protocol.value_into, connection, memoryview(bytearray(4)))
        deadline.expire()
        assert isinstance(waiting.exception(), OSError)
        with pytest.raises(TimeoutError):
            deadline.remaining()


def test_command_is_encoded_as_an_array() -> None:
    assert encode(b"SET", b"a b", b"") == b"*3\r\n$3\r\nSET\r\n$3\r\na b\r\n$0\r\n\r\n"
