"""Connection pool of one server: resolves, opens connections on demand, and reuses them."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Lock
from typing import Any, Generic, TypeVar

import anyio
from anyio import fail_after, getaddrinfo

from kvtier.concurrency.sockets.connection import Connection, Deadline
from kvtier.concurrency.sockets.executor import IoExecutor, finished

ConnectionT = TypeVar("ConnectionT", bound=Connection)


class ConnectionPool(Generic[ConnectionT]):
    """A pool of at most ``size`` concurrent connections to one server, opened on demand."""

    def __init__(self, size: int, connect: Callable[[Deadline], ConnectionT]) -> None:
        """``connect`` opens a connection. It blocks, and raises ``OSError``."""
        self.size = size
        self.executor = IoExecutor(size)
        """Executes operations over the connections; its threads may :meth:`checkout` one."""
        self._connect = connect
        self._idle: deque[ConnectionT] = deque()
        self._lock = Lock()
        # Fast: a free slot must not cost each request a turn of the event loop.
        self._slots = anyio.Semaphore(size, fast_acquire=True)
        self._in_use = 0
        self._closed = False

    @contextmanager
    def checkout(self, deadline: Deadline) -> Iterator[ConnectionT]:
        """Yield an idle or new connection with the deadline applied. Blocks. Raises ``OSError``.

        The connection is closed after any exception, and reused otherwise, so read every due reply.
        """
        deadline.remaining()
        connection = self.idle() or self._connect(deadline)
        with self.bound(connection, deadline):
            yield connection

    @contextmanager
    def bound(self, connection: ConnectionT, deadline: Deadline) -> Iterator[None]:
        """Like :meth:`checkout`, with a given connection: :meth:`idle` or new. Does not block."""
        with self._lock:
            self._in_use += 1
        try:
            with deadline.bounds(connection):
                yield
        except BaseException:
            connection.in_sync = False
            raise
        finally:
            self._return(connection)

    def close(self) -> None:
        """Close every connection; those in use are closed when returned."""
        with self._lock:
            self._closed = True
            is_unused = not self._in_use
        while self._idle:
            self._idle.pop().close()
        if is_unused:
            self.executor.close()

    def idle(self) -> ConnectionT | None:
        """Take an idle connection that appears to be open, or ``None``. Does not block."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.is_idle():
                return connection
            connection.close()

    @asynccontextmanager
    async def acquire(self, deadline: Deadline) -> AsyncIterator[ConnectionT]:
        """Like :meth:`checkout`, from the event loop. Waits for one of the ``size`` slots."""
        try:
            self._slots.acquire_nowait()
        except anyio.WouldBlock:
            with fail_after(deadline.remaining()):
                await self._slots.acquire()
        try:
            connection = await self.connected(deadline)
            with self.bound(connection, deadline):
                yield connection
        finally:
            self._slots.release()

    async def connected(self, deadline: Deadline) -> ConnectionT:
        """Return an idle connection or open one. Raises ``OSError``. Cancellation expires the deadline."""
        deadline.remaining()
        if (connection := self.idle()) is not None:
            return connection
        opened: list[ConnectionT] = []
        try:
            await finished(
                self.executor.threads(lambda: opened.append(self._connect(deadline))), deadline.expire
            )
        except anyio.get_cancelled_exc_class():
            for connection in opened:
                connection.close()
            raise
        return opened[0]

    def _return(self, connection: ConnectionT) -> None:
        with self._lock:
            self._in_use -= 1
            is_reusable = connection.in_sync and not self._closed
            is_over = self._closed and not self._in_use
            if is_reusable:
                self._idle.append(connection)
        if not is_reusable:
            connection.close()
        if is_over:
            self.executor.close()


class Dialer(Generic[ConnectionT]):
    """Resolves and connects to one server. ``port`` is ``None`` if ``host`` is the path of a Unix socket.

    ``make`` creates a connection of an address family, and ``greet`` prepares it for use. Both run in the
    thread that connects. :meth:`connect` raises the exceptions of ``greet``.
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
        self._addresses: list[tuple[int, Any]] = []
        """Resolved: the family of each, and the address as ``socket.connect`` expects it."""

    async def find(self, deadline: Deadline) -> None:
        """Resolve the host name unless already resolved. Call before connecting. Raises ``OSError``.

        Not done in the connecting thread, because name resolution there has no timeout.
        """
        if self._addresses:
            return
        if self._port is None:
            self._addresses = [(socket.AF_UNIX, self._host)]
            return
        try:
            with fail_after(deadline.remaining()):
                found = await getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except TimeoutError:  # anyio raises it without a message.
            raise TimeoutError("timed out resolving the host name") from None
        except UnicodeError as error:
            raise OSError("the host name is invalid") from error
        self._addresses = [(family, address) for family, _, _, _, address in found]

    def connect(self, deadline: Deadline) -> ConnectionT:
        """Open a connection that is ready for use. Blocks. Raises ``OSError``."""
        failure = OSError("the host name has no address")
        for family, address in self._addresses:
            try:
                return self._connect_to(family, address, deadline)
            except OSError as error:
                failure = error
        # The name may resolve to another host by now.
        self._addresses = []
        raise failure

    def _connect_to(self, family: int, address: object, deadline: Deadline) -> ConnectionT:
        connection = self._make(family)
        try:
            with deadline.bounds(connection):
                connection.connect(address)
                self._greet(connection)
        except BaseException:
            connection.close()
            raise
        return connection
