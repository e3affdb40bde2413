"""Connect to a peer: resolve, connect, authenticate, and exchange ``Hello`` and ``Welcome``.

Everything here that is not a coroutine blocks, and runs in worker threads.
"""

from __future__ import annotations

import socket
from typing import NamedTuple

from kvtier.concurrency.sockets.connection import Connection, Deadline, keep_alive
from kvtier.concurrency.sockets.pool import Dialer
from kvtier.concurrency.threads import WorkerThreads, in_thread
from kvtier.errors import ChannelError, PeerError
from kvtier.logs import printable
from kvtier.peers.protocol import VERSION, Hello, Purpose, Welcome, decode_from_server
from kvtier.rpc.authentication import Credentials
from kvtier.rpc.frames import Refused, check_welcome, encode, read_frame
from kvtier.rpc.wire import SocketWire
from kvtier.settings.peer import split_address
from kvtier.transports.base import PeerRefused

CONNECT_SECONDS = 5.0
CONNECT_THREADS = 16
"""An unreachable peer that does not refuse blocks one for :data:`CONNECT_SECONDS`."""
ENGINE_CONNECT_THREADS = 4
MAX_WELCOME_BYTES = 1 << 20


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

    async def dial(self, purpose: Purpose = "control") -> ControlConnection:
        """Open a connection for messages. Raises ``OSError`` if unreachable, otherwise ``ChannelError``."""
        deadline = Deadline(CONNECT_SECONDS)
        # Resolved each time: the name may point to another host by now.
        dialer = Dialer(self._host, self._port, self._make, self._prove)
        await dialer.find(deadline)
        opened: list[ControlConnection] = []
        try:
            await in_thread(
                lambda: opened.append(self._connect(dialer, deadline, purpose)),
                self._executor,
                deadline.expire,
            )
        except BaseException:
            for control in opened:  # The call was cancelled when it had connected.
                control.sock.close()
            raise
        return opened[0]

    def _connect(self, dialer: Dialer[Connection], deadline: Deadline, purpose: Purpose) -> ControlConnection:
        connection = dialer.connect(deadline)
        try:
            with deadline.bounds(connection):
                welcome = self._greet(connection, purpose)
            return ControlConnection(connection.detach(), welcome)
        except BaseException:
            connection.close()
            raise

    def dial_data(self, control: ControlConnection, deadline: Deadline) -> Connection:
        """Open a data connection to the same process as ``control``. Raises what ``Dial`` does."""
        connection = self._make(control.sock.family)
        try:
            with deadline.bounds(connection):
                connection.connect(control.sock.getpeername())
                self._prove(connection)
                self._check_same(control.welcome, self._greet(connection, "data"))
        except ChannelError as error:
            connection.close()
            raise PeerRefused(str(error)) from error
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

    def _prove(self, connection: Connection) -> None:
        self._credentials.prove_to_server(connection, VERSION)

    def _greet(self, connection: Connection, purpose: Purpose) -> Welcome:
        connection.send([encode(Hello(VERSION, self._instance, purpose))])
        reply = decode_from_server(read_frame(connection.read, MAX_WELCOME_BYTES))
        if isinstance(reply, Refused):
            raise PeerError(f"the peer refuses the connection: {printable(reply.reason)}")
        return check_welcome(reply, Welcome, VERSION)


class RemoteEngines:
    """Connects to the instances of other hosts that have workers of an engine of this host."""

    def __init__(self, credentials: Credentials, instance: str) -> None:
        self._credentials = credentials
        self._instance = instance
        self._threads = WorkerThreads(ENGINE_CONNECT_THREADS)

    async def connect(self, address: str) -> SocketWire:
        """Connect to the instance at ``HOST:PORT``, authenticated. The caller closes the connection.

        Raises :class:`PeerError`.
        """
        try:
            host, port = split_address(address)
            dialer = PeerDialer(host, port, self._credentials, self._instance, self._threads)
            sock, _ = await dialer.dial("engine")
        except TimeoutError as error:
            raise PeerError(f"{address} did not answer within {CONNECT_SECONDS:g} s") from error
        except (OSError, ValueError) as error:
            raise PeerError(f"cannot connect to {address}: {error}") from error
        keep_alive(sock)
        return SocketWire(sock)
