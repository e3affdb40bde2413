"""Connect to a peer: resolve, connect, authenticate, and exchange ``Hello`` and ``Welcome``.

Everything here that is not a coroutine blocks, and runs in worker threads.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

from kvtier.concurrency.threads import WorkerThreads, spread
from kvtier.errors import ChannelError, PeerError, ProtocolError
from kvtier.peers.authentication import Credentials
from kvtier.peers.protocol import VERSION, Hello, Purpose, Refused, Welcome, decode_from_server
from kvtier.sockets.connection import Connection, Deadline
from kvtier.sockets.frames import encode
from kvtier.sockets.lanes import Dialer

CONNECT_SECONDS = 5.0
CONNECT_THREADS = 16
"""An unreachable peer that does not refuse blocks one for :data:`CONNECT_SECONDS`."""
MAX_WELCOME_BYTES = 1 << 20
MAX_REASON_CHARACTERS = 300

_LENGTH = struct.Struct("<I")


class ControlConnection(NamedTuple):
    """An authenticated control connection, and the server's :class:`Welcome`."""

    sock: socket.socket
    welcome: Welcome


class PeerDialer:
    """Opens connections to one peer."""

    def __init__(
        self, host: str, port: int, credentials: Credentials, instance: str, threads: WorkerThreads
    ) -> None:
        self._host = host
        self._port = port
        self._credentials = credentials
        self._instance = instance
        self._executor = threads

    async def dial(self) -> ControlConnection:
        """Open a control connection. Raises ``OSError`` if unreachable, otherwise ``ChannelError``."""
        deadline = Deadline(CONNECT_SECONDS)
        # Resolved each time: the name may point to another host by now.
        dialer = Dialer(self._host, self._port, self._make, self._credentials.prove_to_server)
        await dialer.find(deadline)
        outcomes: list[ControlConnection | Exception] = []

        def connect(dialer: Dialer[Connection]) -> None:
            # Stored, not raised: no caller collects the exception of a cancelled call.
            try:
                outcomes.append(self._connect(dialer, deadline))
            except Exception as error:
                outcomes.append(error)

        try:
            await spread(connect, [dialer], parts=1, executor=self._executor, on_cancel=deadline.expire)
        except BaseException:
            for outcome in outcomes:
                if isinstance(outcome, ControlConnection):
                    outcome.sock.close()
            raise
        (outcome,) = outcomes
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _connect(self, dialer: Dialer[Connection], deadline: Deadline) -> ControlConnection:
        connection = dialer.connect(deadline)
        try:
            with deadline.bounds(connection):
                welcome = self._greet(connection, "control")
            return ControlConnection(connection.detach(), welcome)
        except BaseException:
            connection.close()
            raise

    def dial_data(self, control: ControlConnection, deadline: Deadline) -> Connection:
        """Open a data connection to the same process as ``control``. Raises ``OSError``."""
        connection = self._make(control.sock.family)
        try:
            with deadline.bounds(connection):
                connection.connect(control.sock.getpeername())
                self._credentials.prove_to_server(connection)
                self._check_same(control.welcome, self._greet(connection, "data"))
        except ChannelError as error:
            connection.close()
            raise ConnectionError(str(error)) from error
        except BaseException:
            connection.close()
            raise
        return connection

    @staticmethod
    def _check_same(first: Welcome, second: Welcome) -> None:
        if second.instance != first.instance:
            raise PeerError("another process answers at its address now")

    def _make(self, family: int) -> Connection:
        return self._credentials.connection(family, self._host)

    def _greet(self, connection: Connection, purpose: Purpose) -> Welcome:
        connection.send([encode(Hello(VERSION, self._instance, purpose))])
        head = bytearray(_LENGTH.size)
        connection.take(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if length > MAX_WELCOME_BYTES:
            raise ProtocolError(f"its greeting of {length} bytes is over {MAX_WELCOME_BYTES}")
        body = bytearray(length)
        connection.take(memoryview(body))
        answer = decode_from_server(bytes(body))
        if isinstance(answer, Refused):
            raise PeerError(f"it refuses the connection: {printable(answer.reason)}")
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"it answers Hello with {type(answer).__name__}")
        if answer.version != VERSION:
            raise PeerError(
                f"it speaks protocol version {answer.version} and this instance version {VERSION}: "
                "install the same kvtier on both"
            )
        return answer


def printable(text: str) -> str:
    """Return text from a peer made safe for logs: printable, one line, bounded length."""
    return "".join(
        character if character.isprintable() else "?" for character in text[:MAX_REASON_CHARACTERS]
    )
