"""The requesting side: batches, and the drivers that transfer them over connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from anyio import CancelScope, move_on_after

from kvtier.backends.base import Outcome
from kvtier.concurrency.sockets.connection import Connection, Deadline, ProtocolViolation
from kvtier.concurrency.sockets.pool import ConnectionPool
from kvtier.concurrency.tasks import wait_shielded
from kvtier.transports.base import Access, Dial, Link, ReadItem, RemoteSpan, WriteItem
from kvtier.transports.tcp.batch import Batch
from kvtier.transports.tcp.queue import PartQueue
from kvtier.transports.tcp.requester import Requester

logger = logging.getLogger("kvtier")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5
"""Back-off between connection attempts, in seconds; the first retry is immediate."""
MAX_REFUSED_ATTEMPTS = 3
"""Consecutive attempts, refused or answered in another protocol, after which the link gives up."""


class TcpLink(Link):
    """A link that transfers the parts of all batches from one FIFO queue.

    While the queue has parts, up to ``connections`` drivers, with one connection each, send pipelined
    requests. When a connection breaks, its unfinished parts go back to the queue, for the other drivers or
    for the connection that replaces it.
    """

    def __init__(self, dial: Dial, connections: int, deadline: float) -> None:
        self._dial = dial
        self._deadline = deadline
        self._pool = ConnectionPool(connections, self._connect)
        self._queue = PartQueue()
        self._drivers: set[asyncio.Task[None]] = set()
        self._deadlines: set[Deadline] = set()
        self._closing = asyncio.Event()

    async def read(self, items: Sequence[ReadItem]) -> Sequence[Outcome]:
        """See :meth:`Link.read`. After a connection loss, bytes that have arrived are not requested again."""
        return await self._transfer(Access.READ, items)

    async def write(self, items: Sequence[WriteItem]) -> Sequence[Outcome]:
        """See :meth:`Link.write`. After a connection loss, all unconfirmed bytes are sent again."""
        return await self._transfer(Access.WRITE, [(span, view) for view, span in items])

    async def close(self) -> None:
        """Interrupt every connection, and wait for the drivers to exit."""
        self._closing.set()
        self._queue.clear()
        for deadline in list(self._deadlines):
            deadline.expire()
        with CancelScope(shield=True):
            while self._drivers:
                await asyncio.wait(self._drivers)
        self._pool.close()

    async def _transfer(
        self, access: Access, items: Sequence[tuple[RemoteSpan, memoryview]]
    ) -> Sequence[Outcome]:
        batch = Batch(access, items, self._pool.size)
        if not batch.parts:
            return batch.outcomes
        self._queue.add(batch.parts)
        for _ in range(self._queue.add_drivers(self._pool.size)):
            driver = asyncio.ensure_future(self._drive())
            self._drivers.add(driver)
            driver.add_done_callback(self._driver_done)
        timer = asyncio.get_running_loop().call_later(self._deadline, self._queue.abandon, batch)
        try:
            await batch.released.wait()
        except asyncio.CancelledError:
            self._queue.abandon(batch)
            await wait_shielded([batch.released])
            raise
        finally:
            timer.cancel()
            batch.forget()
        return batch.outcomes

    def _driver_done(self, driver: asyncio.Task[None]) -> None:
        self._drivers.discard(driver)
        error = None if driver.cancelled() else driver.exception()
        if error is not None:
            logger.error("tcp transport: transfer task failed", exc_info=error)

    async def _drive(self) -> None:
        attempts = _Attempts()
        while self._queue.keep_driver():
            try:
                await self._use_connection(attempts)
            except BaseException:
                # A bug here or in ``dial``. The queue must not count this driver as running.
                self._queue.remove_driver()
                raise
            if attempts.is_peer_lost:
                self._queue.fail()
            if attempts.pause:
                with move_on_after(attempts.pause):
                    await self._closing.wait()

    async def _use_connection(self, attempts: _Attempts) -> None:
        """Transfer queued parts over one connection until the queue is empty or the connection breaks."""
        requester: Requester | None = None
        deadline = Deadline(self._deadline)
        self._deadlines.add(deadline)
        try:
            connection = await self._pool.connected(deadline)
            with self._pool.bound(connection, deadline):
                requester = Requester(connection, self._queue, self._pool.executor, self._deadline)
                await requester.run()
        except OSError as error:
            attempts.failed(error)
        finally:
            self._deadlines.discard(deadline)
            if requester is not None:
                requester.requeue()
                if requester.progressed or requester.interrupted:
                    attempts.succeeded()

    def _connect(self, deadline: Deadline) -> Connection:
        """Connect. Blocks, in a worker thread."""
        if self._closing.is_set():
            raise TimeoutError("the link is closed")
        connection = self._dial(deadline)
        connection.keep_alive()
        return connection


class _Attempts:
    """Counters of failed connection attempts since the last received data."""

    def __init__(self) -> None:
        self._failed = 0
        self._refused = 0

    @property
    def is_peer_lost(self) -> bool:
        """Whether further attempts are pointless."""
        return self._refused >= MAX_REFUSED_ATTEMPTS

    @property
    def pause(self) -> float:
        """Back-off before the next attempt, in seconds."""
        return 0.0 if self._failed < 2 else min(FIRST_PAUSE * 2 ** min(self._failed - 2, 8), LONGEST_PAUSE)

    def failed(self, error: OSError) -> None:
        """Count a failed attempt."""
        self._failed += 1
        # ``dial`` raises a plain ConnectionError if the peer is up but refuses the connection.
        is_refused = type(error) is ConnectionError or isinstance(
            error, ConnectionRefusedError | ProtocolViolation
        )
        self._refused = self._refused + 1 if is_refused else 0

    def succeeded(self) -> None:
        """Reset the counts after data has arrived."""
        self._failed = 1
        self._refused = 0
