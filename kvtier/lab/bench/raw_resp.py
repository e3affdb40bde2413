"""Limit of a Redis or Valkey pool: GET and SET on plain blocking sockets."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from kvtier.backends.redis.protocol import encode
from kvtier.lab.bench.sides import InThreads, expect
from kvtier.memory.keys import ChunkKey

_TIMEOUT = struct.Struct("ll")
"""A ``struct timeval``. With Python's own timeouts, a socket is non-blocking and needs a poll per call."""


class LogIn(NamedTuple):
    """Credentials and database for a connection."""

    user: str | None = None
    password: str | None = None
    database: int = 0


class RawRESP(InThreads):
    """Client of one server, with as many connections as the tier that it is compared with."""

    title = "raw socket"

    def __init__(
        self,
        address: tuple[str, int] | str,
        connections: int,
        log_in: LogIn | None = None,
        *,
        timeout: float = 60.0,
    ) -> None:
        """``address``: host and port, or the path of a Unix socket. Blocks.

        Raises ``OSError``, also if the server does not respond within ``timeout`` seconds.
        """
        with ExitStack() as stack:
            opened = [stack.enter_context(connected(address, timeout)) for _ in range(connections)]
            for connection in opened:
                _log_in(connection, log_in or LogIn())
            stack.pop_all()
        super().__init__(opened)

    def put_one(self, connection: socket.socket, key: ChunkKey, view: memoryview) -> None:
        """See :meth:`InThreads.put_one`."""
        head = b"*3\r\n$3\r\nSET\r\n$68\r\nraw:%b\r\n$%d\r\n" % (key.hex().encode(), len(view))
        _send(connection, head, view, b"\r\n")
        _expect_ok(connection)

    def get_one(self, connection: socket.socket, key: ChunkKey, view: memoryview) -> None:
        """See :meth:`InThreads.get_one`."""
        connection.sendall(b"*2\r\n$3\r\nGET\r\n$68\r\nraw:%b\r\n" % key.hex().encode())
        head = b"$%d\r\n" % len(view)
        reply = line(connection)
        expect(0, reply + b"\r\n" == head, f"the server replied {reply.decode(errors='replace')!r} to GET")
        fill(connection, view)
        exactly(connection, 2)

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Side.forget`."""
        connection = self._connections[0]
        connection.sendall(b"".join(encode(b"DEL", b"raw:" + key.hex().encode()) for key in keys))
        exactly(connection, 4 * len(keys))


def connected(address: tuple[str, int] | str, timeout: float = 60.0) -> socket.socket:
    """Open a blocking connection. Raises ``OSError``, as does I/O that stalls for ``timeout`` seconds."""
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
    else:
        connection = socket.create_connection(address, timeout)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        bound = _TIMEOUT.pack(int(timeout), int(timeout % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, option, bound)
    return connection


def fill(connection: socket.socket, view: memoryview) -> None:
    """Receive until the view is full. Raises ``OSError``."""
    while len(view):
        try:
            received = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError("the server does not respond") from error
        if not received:
            raise ConnectionResetError("the server closed the connection")
        view = view[received:]


def exactly(connection: socket.socket, length: int) -> bytes:
    """Receive exactly ``length`` bytes."""
    received = bytearray(length)
    fill(connection, memoryview(received))
    return bytes(received)


def line(connection: socket.socket) -> bytes:
    """Receive a line, and return it without CR LF."""
    received = b""
    while not received.endswith(b"\r\n"):
        received += exactly(connection, 1)
    return received[:-2]


def _send(connection: socket.socket, head: bytes, view: memoryview, tail: bytes) -> None:
    try:
        sent = connection.sendmsg([head, view, tail])
    except BlockingIOError as error:
        raise TimeoutError("the server does not read") from error
    # A short write happens only on a Unix socket or after a timeout.
    if sent < len(head) + len(view):
        connection.sendall(view[max(0, sent - len(head)) :])
        sent = len(head) + len(view)
    connection.sendall(tail[sent - len(head) - len(view) :])


def _expect_ok(connection: socket.socket) -> None:
    reply = line(connection)
    expect(0, reply == b"+OK", f"the server replied {reply.decode(errors='replace')!r}")


def _log_in(connection: socket.socket, log_in: LogIn) -> None:
    if log_in.password is not None:
        arguments = [*([log_in.user] if log_in.user else []), log_in.password]
        connection.sendall(encode(b"AUTH", *(argument.encode() for argument in arguments)))
        _expect_ok(connection)
    if log_in.database:
        connection.sendall(encode(b"SELECT", b"%d" % log_in.database))
        _expect_ok(connection)
