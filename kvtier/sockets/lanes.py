"""Connections to one server: found, opened when they are needed, used by one at a time, used again."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

from anyio import fail_after, getaddrinfo

from kvtier.sockets.connection import Connection, Deadline
from kvtier.sockets.pump import Pump, finished

ConnectionT = TypeVar("ConnectionT", bound=Connection)


class Address(NamedTuple):
    """Where a socket connects to, all names looked up."""

    family: int
    address: Any
    """As ``socket.connect`` takes it."""


class Lane(Generic[ConnectionT]):
    """At most ``size`` connections to one server that are used at once. Opened when one is needed."""

    def __init__(self, size: int, connect: Callable[[Deadline], ConnectionT]) -> None:
        self.size = size
        self.pump = Pump(size)
        """What carries out conversations over the connections, or has threads that may :meth:`borrow` one."""
        self._connect = connect
        self._idle: deque[ConnectionT] = deque()
        self._lock = Lock()
        self._turns = asyncio.Semaphore(size)
        self._in_use = 0
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
        with self._lock:
            self._in_use += 1
        try:
            with deadline.bounds(connection):
                yield
        except BaseException:
            connection.in_step = False
            raise
        finally:
            self._give_back(connection)

    def close(self) -> None:
        """Close every connection; those in use when they are given back."""
        with self._lock:
            self._closed = True
            is_unused = not self._in_use
        while self._idle:
            self._idle.pop().close()
        if is_unused:
            self.pump.close()

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

    @asynccontextmanager
    async def taken(self, deadline: Deadline) -> AsyncIterator[ConnectionT]:
        """As :meth:`borrow`, for conversations of the event loop, which takes its turn."""
        if self._turns.locked():
            async with asyncio.timeout(deadline.remaining()):
                await self._turns.acquire()
        else:
            await self._turns.acquire()
        try:
            connection = await self.connected(deadline)
            with self.bound(connection, deadline):
                yield connection
        finally:
            self._turns.release()

    async def connected(self, deadline: Deadline) -> ConnectionT:
        """One that is :meth:`idle`, or a new one. Raises ``OSError``. A cancelled call ends the deadline."""
        deadline.remaining()
        if (connection := self.idle()) is not None:
            return connection
        made: list[ConnectionT] = []
        try:
            await finished(self.pump.hop(lambda: made.append(self.connect(deadline))), deadline.cut_short)
        except asyncio.CancelledError:
            for connection in made:
                connection.close()
            raise
        return made[0]

    def _give_back(self, connection: ConnectionT) -> None:
        with self._lock:
            self._in_use -= 1
            keeps = connection.in_step and not self._closed
            is_over = self._closed and not self._in_use
            if keeps:
                self._idle.append(connection)
        if not keeps:
            connection.close()
        if is_over:
            self.pump.close()


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
        except TimeoutError:  # anyio's has no words, and whoever reports it would name no reason.
            raise TimeoutError("its name was not resolved in time") from None
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
