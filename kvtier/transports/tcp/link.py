"""The side that wants bytes: batches, and what drives the connections that bring them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from anyio import CancelScope, move_on_after

from kvtier.backends.base import Outcome
from kvtier.sockets.connection import Connection, Deadline, ProtocolViolation
from kvtier.sockets.lanes import Lane
from kvtier.transports.base import Access, Dial, Link, ReadItem, RemoteSpan, WriteItem
from kvtier.transports.tcp.asking import Asking
from kvtier.transports.tcp.batch import Batch
from kvtier.transports.tcp.queue import PartQueue

logger = logging.getLogger("kvtier")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5
"""Seconds between attempts to connect; the very first comes at once."""
HOPELESS_ATTEMPTS = 3
"""So often in a row nobody listens there, or somebody who speaks otherwise: waiting does not mend that."""


class TcpLink(Link):
    """Parts of all batches stand in one queue, in the order in which they were asked for.

    While there are any, up to ``connections`` drivers, with a connection each, ask for the next while the one
    before is on its way. A connection that breaks leaves what it did not bring to the others, or to the one
    that takes its place.
    """

    def __init__(self, dial: Dial, connections: int, deadline: float) -> None:
        self._dial = dial
        self._deadline = deadline
        self._lane = Lane(connections, self._connect)
        self._queue = PartQueue()
        self._drivers: set[asyncio.Task[None]] = set()
        self._deadlines: set[Deadline] = set()
        self._closing = asyncio.Event()

    async def read(self, items: Sequence[ReadItem]) -> Sequence[Outcome]:
        """See :meth:`Link.read`. What had arrived when a connection was cut is not asked for again."""
        return await self._carry(Access.READ, items)

    async def write(self, items: Sequence[WriteItem]) -> Sequence[Outcome]:
        """See :meth:`Link.write`. Of what was not confirmed when a connection was cut all is sent again."""
        return await self._carry(Access.WRITE, [(span, view) for view, span in items])

    async def close(self) -> None:
        """Break every connection, and wait until nobody uses one."""
        self._closing.set()
        self._queue.clear()
        for deadline in list(self._deadlines):
            deadline.cut_short()
        with CancelScope(shield=True):
            while self._drivers:
                await asyncio.wait(self._drivers)
        self._lane.close()

    async def _carry(
        self, access: Access, items: Sequence[tuple[RemoteSpan, memoryview]]
    ) -> Sequence[Outcome]:
        batch = Batch(access, items, self._lane.size)
        if not batch.parts:
            return batch.outcomes
        self._queue.add(batch.parts)
        for _ in range(self._queue.take_on(self._lane.size)):
            driver = asyncio.ensure_future(self._drive())
            self._drivers.add(driver)
            driver.add_done_callback(self._ended)
        timer = asyncio.get_running_loop().call_later(self._deadline, self._queue.abandon, batch)
        try:
            await batch.let_go.wait()
        except asyncio.CancelledError:
            self._queue.abandon(batch)
            await _let_go(batch)
            raise
        finally:
            timer.cancel()
            batch.forget()
        return batch.outcomes

    def _ended(self, driver: asyncio.Task[None]) -> None:
        self._drivers.discard(driver)
        error = None if driver.cancelled() else driver.exception()
        if error is not None:
            logger.error("what fetches from a peer has failed", exc_info=error)

    async def _drive(self) -> None:
        attempts = _Attempts()
        while self._queue.goes_on():
            try:
                await self._converse(attempts)
            except BaseException:
                # A fault of ours, or of what dials: nobody is to believe that this driver goes on.
                self._queue.leave()
                raise
            if attempts.are_hopeless:
                self._queue.fail()
            if attempts.pause:
                with move_on_after(attempts.pause):
                    await self._closing.wait()

    async def _converse(self, attempts: _Attempts) -> None:
        """Over one connection: bring what there is, or as much as it lasts for."""
        asking: Asking | None = None
        deadline = Deadline(self._deadline)
        self._deadlines.add(deadline)
        try:
            connection = await self._lane.connected(deadline)
            with self._lane.bound(connection, deadline):
                asking = Asking(connection, self._queue, self._lane.pump, self._deadline)
                await asking.bring_all()
        except OSError as error:
            attempts.failed(error)
        finally:
            self._deadlines.discard(deadline)
            if asking is not None:
                asking.put_back()
                if asking.progressed or asking.interrupted:
                    attempts.succeeded()

    def _connect(self, deadline: Deadline) -> Connection:
        """In a worker thread."""
        if self._closing.is_set():
            raise TimeoutError("the link is closed")
        connection = self._dial(deadline)
        connection.keep_alive()
        return connection


class _Attempts:
    """What came of connecting since something last arrived."""

    def __init__(self) -> None:
        self._failed = 0
        self._hopeless = 0

    @property
    def are_hopeless(self) -> bool:
        """Whether the peer is gone for good, as far as one can see."""
        return self._hopeless >= HOPELESS_ATTEMPTS

    @property
    def pause(self) -> float:
        """Seconds before the next."""
        return 0.0 if self._failed < 2 else min(FIRST_PAUSE * 2 ** min(self._failed - 2, 8), LONGEST_PAUSE)

    def failed(self, error: OSError) -> None:
        """One more."""
        self._failed += 1
        # A bare ConnectionError is a dial's word for a peer that is there and will not have us.
        is_hopeless = type(error) is ConnectionError or isinstance(
            error, ConnectionRefusedError | ProtocolViolation
        )
        self._hopeless = self._hopeless + 1 if is_hopeless else 0

    def succeeded(self) -> None:
        """Something arrived."""
        self._failed = 1
        self._hopeless = 0


async def _let_go(batch: Batch) -> None:
    """Wait until nobody uses the batch's memory, however often the waiting is cancelled."""
    cancelled: asyncio.CancelledError | None = None
    waiting = asyncio.ensure_future(batch.let_go.wait())
    with CancelScope(shield=True):
        while not waiting.done():
            try:
                await asyncio.wait([waiting])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        try:
            raise cancelled
        finally:
            # Else it would refer to itself, and keep the batch's memory until it is collected.
            del cancelled
