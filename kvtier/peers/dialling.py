"""From an address to a connection whose other side has proved who it is and said ``Welcome``.

Everything here that is not a coroutine blocks, in worker threads.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

from kvtier.errors import ChannelError, PeerError, ProtocolError
from kvtier.peers.authentication import Credentials
from kvtier.peers.protocol import VERSION, Hello, Purpose, Refused, Welcome, decode_from_server
from kvtier.sockets.connection import Connection, Deadline
from kvtier.sockets.frames import encode
from kvtier.sockets.lanes import Dialer
from kvtier.threads import WorkerThreads, spread

CONNECT_SECONDS = 5.0
CONNECTING_AT_ONCE = 16
"""Threads that connect to peers; one that is lost and does not refuse takes one for five seconds."""
MOST_WELCOME_BYTES = 1 << 20
MOST_REASON_CHARACTERS = 300

_LENGTH = struct.Struct("<I")


class Called(NamedTuple):
    """A control connection that is ready for use."""

    connected: socket.socket
    welcome: Welcome


class Caller:
    """Opens connections to one peer."""

    def __init__(
        self, host: str, port: int, credentials: Credentials, instance: str, threads: WorkerThreads
    ) -> None:
        self._host = host
        self._port = port
        self._credentials = credentials
        self._instance = instance
        self._hop = threads

    async def call(self) -> Called:
        """Open a control connection. Raises ``OSError`` where nobody answers, else ``ChannelError``."""
        deadline = Deadline(CONNECT_SECONDS)
        # A new one each time: the name may mean another machine by now.
        dialer = Dialer(self._host, self._port, self._make, self._credentials.prove_to_server)
        await dialer.find(deadline)
        outcomes: list[Called | Exception] = []

        def call(dialer: Dialer[Connection]) -> None:
            # Kept, not raised: nobody asks a thread for its error once the call is cancelled.
            try:
                outcomes.append(self._connected(dialer, deadline))
            except Exception as error:
                outcomes.append(error)

        try:
            await spread(call, [dialer], parts=1, hop=self._hop, on_cancel=deadline.cut_short)
        except BaseException:
            for outcome in outcomes:
                if isinstance(outcome, Called):
                    outcome.connected.close()
            raise
        (outcome,) = outcomes
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _connected(self, dialer: Dialer[Connection], deadline: Deadline) -> Called:
        connection = dialer.connect(deadline)
        try:
            with deadline.bounds(connection):
                welcome = self._greet(connection, "control")
            return Called(connection.detach(), welcome)
        except BaseException:
            connection.close()
            raise

    def dial_like(self, called: Called, deadline: Deadline) -> Connection:
        """A data connection to the very process that ``called`` leads to. Raises ``OSError``."""
        connection = self._make(called.connected.family)
        try:
            with deadline.bounds(connection):
                connection.connect(called.connected.getpeername())
                self._credentials.prove_to_server(connection)
                self._check_same(called.welcome, self._greet(connection, "data"))
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
            raise PeerError("another process answers there now")

    def _make(self, family: int) -> Connection:
        return self._credentials.connection(family, self._host)

    def _greet(self, connection: Connection, purpose: Purpose) -> Welcome:
        connection.send([encode(Hello(VERSION, self._instance, purpose))])
        head = bytearray(_LENGTH.size)
        connection.take(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if length > MOST_WELCOME_BYTES:
            raise ProtocolError(f"its greeting would be {length} bytes long")
        body = bytearray(length)
        connection.take(memoryview(body))
        answer = decode_from_server(bytes(body))
        if isinstance(answer, Refused):
            raise PeerError(f"it refuses: {printable(answer.reason)}")
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"it answers a greeting with {type(answer).__name__}")
        if answer.version != VERSION:
            raise PeerError(
                f"it speaks version {answer.version} of the protocol and this instance version {VERSION}: "
                "install the same kvtier on both"
            )
        return answer


def printable(text: str) -> str:
    """What a peer has said, fit for a log: one line, and not endless."""
    return "".join(
        character if character.isprintable() else "?" for character in text[:MOST_REASON_CHARACTERS]
    )
