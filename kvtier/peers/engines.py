"""Connections from an engine's scheduler to the cache processes of other hosts that its workers use."""

from __future__ import annotations

from kvtier.concurrency.sockets.connection import keep_alive
from kvtier.concurrency.threads import WorkerThreads
from kvtier.errors import PeerError
from kvtier.peers.dialing import CONNECT_SECONDS, PeerDialer
from kvtier.rpc.authentication import Credentials
from kvtier.rpc.wire import SocketWire
from kvtier.settings.peer import split_address

CONNECT_THREADS = 4


class RemoteEngines:
    """Connects to the instances of other hosts that have workers of an engine of this host."""

    def __init__(self, credentials: Credentials, instance: str) -> None:
        self._credentials = credentials
        self._instance = instance
        self._threads = WorkerThreads(CONNECT_THREADS)

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
