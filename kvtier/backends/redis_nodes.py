"""The servers of a pool: for each its connections, and the threads that they are used in."""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

from anyio import CapacityLimiter, fail_after, getaddrinfo

from kvtier.backends.redis_commands import log_in
from kvtier.backends.redis_url import Endpoint
from kvtier.backends.resp import Connection, Deadline, TLSConnection
from kvtier.backends.threads import limited_hop

ConnectionT = TypeVar("ConnectionT", bound=Connection)


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


class Address(NamedTuple):
    """Where a socket connects to, all names looked up."""

    family: int
    address: Any
    """As ``socket.connect`` takes it."""


class Lane(Generic[ConnectionT]):
    """Connections to one server, one for each of at most ``size`` threads. Opened when one is needed."""

    def __init__(self, size: int, connect: Callable[[Deadline], ConnectionT]) -> None:
        self.size = size
        self.hop = limited_hop(CapacityLimiter(size))
        """Into a thread that may :meth:`borrow` a connection."""
        self._connect = connect
        self._idle: deque[ConnectionT] = deque()
        self._lock = Lock()
        self._closed = False

    @contextmanager
    def borrow(self, deadline: Deadline) -> Iterator[ConnectionT]:
        """A connection that works as far as one can see, bound by the deadline. Blocks. Raises ``OSError``.

        Closed after any exception; so read every reply that is due.
        """
        deadline.remaining()
        connection = self._take(deadline)
        try:
            with deadline.bounds(connection):
                yield connection
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)

    def close(self) -> None:
        """Close every connection; those in use when they are given back."""
        with self._lock:
            self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _take(self, deadline: Deadline) -> ConnectionT:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._connect(deadline)
            if connection.is_idle():
                return connection
            connection.close()

    def _give_back(self, connection: ConnectionT) -> None:
        with self._lock:
            if connection.in_step and not self._closed:
                self._idle.append(connection)
                return
        connection.close()


class Node:
    """One server: a lane for chunks, and one for look-ups, which so never wait for a chunk."""

    def __init__(self, endpoint: Endpoint, access: Access) -> None:
        self.endpoint = endpoint
        self.chunks = Lane(access.connections, self._connect)
        self.questions = Lane(1, self._connect)
        self._access = access
        self._addresses: tuple[Address, ...] = ()

    async def find(self, deadline: Deadline) -> None:
        """Look the host's name up, unless that is done. Before any lane is used. Raises ``OSError``.

        Not in the thread that connects: what looks names up cannot be told how long it may take.
        """
        if self._addresses:
            return
        host, port = self.endpoint
        if port is None:
            self._addresses = (Address(socket.AF_UNIX, host),)
            return
        try:
            with fail_after(deadline.remaining()):
                found = await getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise OSError("its name cannot be that of a host") from error
        self._addresses = tuple(Address(family, address) for family, _, _, _, address in found)

    def close(self) -> None:
        """Close every connection."""
        self.chunks.close()
        self.questions.close()

    def _connect(self, deadline: Deadline) -> Connection:
        failure = OSError("it has no address")
        for address in self._addresses:
            try:
                return self._connect_to(address, deadline)
            except OSError as error:
                failure = error
        # The name may mean another machine by now.
        self._addresses = ()
        raise failure

    def _connect_to(self, address: Address, deadline: Deadline) -> Connection:
        access = self._access
        connection = (
            Connection(address.family)
            if access.tls is None
            else TLSConnection(address.family, access.tls, self.endpoint.host)
        )
        try:
            with deadline.bounds(connection):
                connection.connect(address.address)
                log_in(connection, access.user, access.password, access.database)
        except BaseException:
            connection.close()
            raise
        return connection


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
