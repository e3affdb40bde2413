"""The transport ``tcp``: reads and writes over connections that the peers have authenticated."""

from __future__ import annotations

import socket
import struct
from typing import ClassVar

from kvtier.arena import Arena
from kvtier.errors import PeerError
from kvtier.sockets.pump import Pump
from kvtier.transports.base import (
    Dial,
    Grants,
    Link,
    SupportsConnections,
    Transport,
    TransportSettings,
)
from kvtier.transports.tcp.link import TcpLink
from kvtier.transports.tcp.session import Session
from kvtier.transports.tcp.settings import TcpSettings

VERSION = 1
_ENDPOINT = struct.Struct("<10sH")
_NAME = b"kvtier-tcp"


class TcpTransport(Transport, SupportsConnections):
    """Moves bytes between sockets and arenas in worker threads, with no copy of its own.

    Who wants bytes takes a thread for each connection while they come. Who serves them needs a thread only
    while there is something to send that the socket takes in.
    """

    settings_type: ClassVar[type[TransportSettings]] = TcpSettings

    def __init__(self, settings: TcpSettings) -> None:
        self._settings = settings
        self._pump = Pump(settings.threads)
        self._grants: Grants

    async def open(self, arena: Arena, grants: Grants) -> None:
        """Nothing has to be made ready: leases give the memory, and sockets take any."""
        self._grants = grants

    async def close(self) -> None:
        """Let the threads end."""
        self._pump.close()

    @property
    def endpoint(self) -> bytes:
        """Which protocol this host speaks."""
        return _ENDPOINT.pack(_NAME, VERSION)

    async def connect(self, endpoint: bytes, dial: Dial) -> Link:
        """A link, whose connections are opened when it is first used. Raises :class:`PeerError`."""
        if len(endpoint) != _ENDPOINT.size:
            raise PeerError("its transport is not tcp: write the same peer.transport on both sides")
        name, version = _ENDPOINT.unpack(endpoint)
        if name != _NAME:
            raise PeerError("its transport is not tcp: write the same peer.transport on both sides")
        if version != VERSION:
            raise PeerError(
                f"its transport tcp has version {version} and this one version {VERSION}: install the same "
                "kvtier on both sides"
            )
        return TcpLink(dial, self._settings.connections, self._settings.deadline)

    async def serve(self, connected: socket.socket) -> None:
        """Serve a peer's connection. See :class:`~kvtier.transports.base.SupportsConnections`."""
        await Session(connected, self._grants, self._pump, self._settings.deadline).run()
