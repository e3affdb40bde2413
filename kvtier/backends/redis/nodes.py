"""The servers of a pool: for each its connections, and the threads that they are used in."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import NamedTuple

from kvtier.backends.redis.commands import log_in
from kvtier.backends.redis.url import Endpoint
from kvtier.sockets.connection import Connection, Deadline, TLSConnection
from kvtier.sockets.lanes import Dialer, Lane


class Access(NamedTuple):
    """How every server of a pool is entered."""

    tls: ssl.SSLContext | None
    user: str | None
    password: str | None
    database: int
    connections: int
    """How many of them carry chunks at once."""

    def __repr__(self) -> str:
        return "Access(...)"


class Node:
    """One server: a lane for chunks, and one for look-ups, which so never wait for a chunk."""

    def __init__(self, endpoint: Endpoint, access: Access) -> None:
        self.endpoint = endpoint
        self._access = access
        self._dialer = Dialer(endpoint.host, endpoint.port, self._make, self._log_in)
        self.chunks = Lane(access.connections, self._dialer.connect)
        self.questions = Lane(1, self._dialer.connect)

    async def find(self, deadline: Deadline) -> None:
        """See :meth:`Dialer.find`. Before any lane is used."""
        await self._dialer.find(deadline)

    def close(self) -> None:
        """Close every connection."""
        self.chunks.close()
        self.questions.close()

    def _make(self, family: int) -> Connection:
        tls = self._access.tls
        return Connection(family) if tls is None else TLSConnection(family, tls, self.endpoint.host)

    def _log_in(self, connection: Connection) -> None:
        log_in(connection, self._access.user, self._access.password, self._access.database)


class Nodes:
    """The servers of a pool that are known by now."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._nodes: dict[Endpoint, Node] = {}

    def at(self, endpoint: Endpoint) -> Node:
        """The server at ``endpoint``, known from now on."""
        if endpoint not in self._nodes:
            self._nodes[endpoint] = Node(endpoint, self._access)
        return self._nodes[endpoint]

    def keep(self, endpoints: Iterable[Endpoint]) -> None:
        """Forget every other server."""
        for endpoint in self._nodes.keys() - set(endpoints):
            self._nodes.pop(endpoint).close()

    def close(self) -> None:
        """Forget them all."""
        self.keep(())
