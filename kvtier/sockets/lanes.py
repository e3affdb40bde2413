"""Connections to one server: found, opened when they are needed, used by one thread at a time, used again."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

from anyio import fail_after, getaddrinfo

from kvtier.sockets.connection import Connection, Deadline
from kvtier.threads import WorkerThreads

ConnectionT = TypeVar("ConnectionT", bound=Connection)


class Address(NamedTuple):
    """Where a socket connects to, all names looked up."""

    family: int
    address: Any
    """As ``socket.connect`` takes it."""


class Lane(Generic[ConnectionT]):
    """Connections to one server, one for each of at most ``size`` threads. Opened when one is needed."""

    def __init__(self, size: int, connect: Callable[[Deadline], ConnectionT]) -> None:
        self.size = size
        self.hop = WorkerThreads(size)
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
        connection = self.idle() or self.connect(deadline)
        with self.bound(connection, deadline):
            yield connection

    @contextmanager
    def bound(self, connection: ConnectionT, deadline: Deadline) -> Iterator[None]:
        """See :meth:`borrow`, with a connection that is :meth:`idle`, or new. Does not block."""
        try:
            with deadline.bounds(connection):
                yield
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
        self.hop.close()

    def idle(self) -> ConnectionT | None:
        """One that is open and works, as far as one can see. Does not block."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.is_idle():
                return connection
            connection.close()

    def connect(self, deadline: Deadline) -> ConnectionT:
        """A new one. Blocks. Raises ``OSError``."""
        return self._connect(deadline)

    def _give_back(self, connection: ConnectionT) -> None:
        with self._lock:
            if connection.in_step and not self._closed:
                self._idle.append(connection)
                return
        connection.close()


class Dialer(Generic[ConnectionT]):
    """Knows how to reach one server. ``port`` is ``None`` where ``host`` is the path of a Unix socket.

    ``make`` makes a connection of an address family, and ``greet`` makes it ready for use: both in the
    thread that needs it. What ``greet`` raises is raised by :meth:`connect`.
    """

    def __init__(
        self,
        host: str,
        port: int | None,
        make: Callable[[int], ConnectionT],
        greet: Callable[[ConnectionT], None] = lambda _: None,
    ) -> None:
        self._host = host
        self._port = port
        self._make = make
        self._greet = greet
        self._addresses: tuple[Address, ...] = ()

    async def find(self, deadline: Deadline) -> None:
        """Look the host's name up, unless that is done. Before any connection. Raises ``OSError``.

        Not in the thread that connects: what looks names up cannot be told how long it may take.
        """
        if self._addresses:
            return
        if self._port is None:
            self._addresses = (Address(socket.AF_UNIX, self._host),)
            return
        try:
            with fail_after(deadline.remaining()):
                found = await getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise OSError("its name cannot be that of a host") from error
        self._addresses = tuple(Address(family, address) for family, _, _, _, address in found)

    def connect(self, deadline: Deadline) -> ConnectionT:
        """A connection that is ready for use. Blocks. Raises ``OSError``."""
        failure = OSError("it has no address")
        for address in self._addresses:
            try:
                return self._connect_to(address, deadline)
            except OSError as error:
                failure = error
        # The name may mean another machine by now.
        self._addresses = ()
        raise failure

    def _connect_to(self, address: Address, deadline: Deadline) -> ConnectionT:
        connection = self._make(address.family)
        try:
            with deadline.bounds(connection):
                connection.connect(address.address)
                self._greet(connection)
        except BaseException:
            connection.close()
            raise
        return connection
