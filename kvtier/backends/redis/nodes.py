"""The servers of a pool, each with its connections and their worker threads."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import NamedTuple

from kvtier.backends.redis.commands import log_in
from kvtier.backends.redis.url import Endpoint
from kvtier.concurrency.sockets.connection import Connection, Deadline, TLSConnection
from kvtier.concurrency.sockets.pool import ConnectionPool, Dialer


class Access(NamedTuple):
    """Connection parameters and credentials, the same for every server of a pool."""

    tls: ssl.SSLContext | None
    user: str | None
    password: str | None
    database: int
    connections: int
    """Maximum connections for chunks, per server."""

    def __repr__(self) -> str:
        return "Access(...)"


class Node:
    """One server, with separate pools for chunks and for lookups, so that lookups never wait for a chunk."""

    def __init__(self, endpoint: Endpoint, access: Access) -> None:
        self.endpoint = endpoint
        self._access = access
        self._dialer = Dialer(endpoint.host, endpoint.port, self._new_connection, self._log_in)
        self.chunks = ConnectionPool(access.connections, self._dialer.connect)
        self.lookups = ConnectionPool(1, self._dialer.connect)

    async def resolve(self, deadline: Deadline) -> None:
        """Resolve the host name, before any pool is used. See :meth:`Dialer.find`."""
        await self._dialer.find(deadline)

    def close(self) -> None:
        """Close every connection."""
        self.chunks.close()
        self.lookups.close()

    def _new_connection(self, family: int) -> Connection:
        tls = self._access.tls
        return Connection(family) if tls is None else TLSConnection(family, tls, self.endpoint.host)

    def _log_in(self, connection: Connection) -> None:
        log_in(connection, self._access.user, self._access.password, self._access.database)


class Nodes:
    """The known servers of a pool."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._nodes: dict[Endpoint, Node] = {}

    def at(self, endpoint: Endpoint) -> Node:
        """Return the server at ``endpoint``, adding it if necessary."""
        if endpoint not in self._nodes:
            self._nodes[endpoint] = Node(endpoint, self._access)
        return self._nodes[endpoint]

    def keep(self, endpoints: Iterable[Endpoint]) -> None:
        """Close and remove every server that is not in ``endpoints``."""
        for endpoint in self._nodes.keys() - set(endpoints):
            self._nodes.pop(endpoint).close()

    def close(self) -> None:
        """Close and remove all servers."""
        self.keep(())
