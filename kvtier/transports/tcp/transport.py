"""The transport ``tcp``: reads and writes over connections that the peers authenticate."""

from __future__ import annotations

import socket
import struct
from typing import ClassVar

from pydantic import Field

from kvtier.concurrency.sockets.executor import IoExecutor
from kvtier.errors import PeerError
from kvtier.memory.arena import Arena
from kvtier.transports.base import Dial, Grants, Link, SupportsConnections, Transport, TransportSettings
from kvtier.transports.tcp.link import TcpLink
from kvtier.transports.tcp.session import Session
from kvtier.units import Integer


class TcpSettings(TransportSettings):
    """Settings of the transport ``tcp``, which connects to the port of the peers' control connections."""

    connections: Integer = Field(
        default=4,
        ge=1,
        le=64,
        description=(
            "Maximum number of parallel connections to each peer. A connection needs a thread while it "
            "transfers bytes."
        ),
        examples=[8],
    )
    threads: Integer = Field(
        default=16,
        ge=1,
        le=256,
        description=(
            "Number of threads that send to peers, shared by all connections; further connections wait. A "
            "connection that is idle, or whose peer does not read, needs no thread."
        ),
        examples=[32],
    )


VERSION = 1
_ENDPOINT = struct.Struct("<10sH")
_NAME = b"kvtier-tcp"


class TcpTransport(Transport, SupportsConnections):
    """A transport that moves bytes between sockets and arenas in worker threads, without an extra copy.

    The requesting side uses one thread per connection during a transfer. The serving side uses a thread only
    while it has bytes to send and the socket accepts them.
    """

    settings_type: ClassVar[type[TransportSettings]] = TcpSettings

    def __init__(self, settings: TcpSettings) -> None:
        self._settings = settings
        self._executor = IoExecutor(settings.threads)
        self._grants: Grants

    async def open(self, arena: Arena, grants: Grants) -> None:
        """Store ``grants``. The arena needs no preparation: sockets work with any memory."""
        self._grants = grants

    async def close(self) -> None:
        """Stop the threads."""
        self._executor.close()

    @property
    def endpoint(self) -> bytes:
        """The protocol name and version of this host."""
        return _ENDPOINT.pack(_NAME, VERSION)

    async def connect(self, endpoint: bytes, dial: Dial) -> Link:
        """Return a link, which connects on first use. Raises :class:`PeerError`."""
        name, version = _ENDPOINT.unpack(endpoint) if len(endpoint) == _ENDPOINT.size else (b"", 0)
        if name != _NAME:
            raise PeerError("the peer's transport is not tcp: set the same peer.transport on both sides")
        if version != VERSION:
            raise PeerError(
                f"the peer's transport tcp has version {version}, and this one version {VERSION}: install "
                "the same kvtier on both sides"
            )
        return TcpLink(dial, self._settings.connections, self._settings.deadline)

    async def serve(self, connected: socket.socket) -> None:
        """Serve a peer's connection; see :class:`~kvtier.transports.base.SupportsConnections`."""
        await Session(connected, self._grants, self._executor, self._settings.deadline).run()
