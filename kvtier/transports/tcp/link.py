"""The side that wants bytes: batches in the event loop, connections in worker threads."""

from __future__ import annotations

import asyncio
import logging
import threading
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

PARTS_A_CONNECTION = 2
"""In how many parts each connection brings its share of a batch that has the link to itself."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5
"""Seconds between attempts to connect; the very first comes at once."""
HOPELESS_ATTEMPTS = 3
"""So often in a row nobody listens there, or somebody who speaks otherwise: waiting does not mend that."""


class TcpLink(Link):
    """Parts of all batches stand in one queue, in the order in which they were asked for.

    While there are any, up to ``connections`` threads, with a connection each, ask for the next while the one
    before is on its way. A connection that breaks leaves what it did not bring to the others, or to the one
    that takes its place.
    """

    def __init__(self, dial: Dial, connections: int, deadline: float) -> None:
        self._dial = dial
        self._deadline = deadline
        self._lane = Lane(connections, self._connect)
        self._queue = PartQueue()
        self._pumps: set[asyncio.Future[None]] = set()
        self._deadlines: set[Deadline] = set()
        self._closing = threading.Event()

    async def read(self, items: Sequence[ReadItem]) -> Sequence[Outcome]:
        """See :meth:`Link.read`. What had arrived when a connection was cut is not asked for again."""
        return await self._carry(Access.READ, items)

    async def write(self, items: Sequence[WriteItem]) -> Sequence[Outcome]:
        """See :meth:`Link.write`. Of what was not confirmed when a connection was cut all is sent again."""
        return await self._carry(Access.WRITE, [(span, view) for view, span in items])

    async def close(self) -> None:
        """Break every connection, and wait until the threads are through."""
        self._closing.set()
        self._queue.clear()
        for deadline in list(self._deadlines):
            deadline.cut_short()
        with CancelScope(shield=True):
            while self._pumps:
                await asyncio.wait(self._pumps)
        self._lane.close()

    async def _carry(
        self, access: Access, items: Sequence[tuple[RemoteSpan, memoryview]]
    ) -> Sequence[Outcome]:
        batch = Batch(access, items, self._queue.lock, self._lane.size * PARTS_A_CONNECTION)
        if not batch.parts:
            return batch.outcomes
        self._queue.add(batch.parts)
        self._start_pumps()
        try:
            with move_on_after(self._deadline):
                await batch.let_go.wait()
        finally:
            if not batch.let_go.is_set():
                self._queue.abandon(batch)
                await _let_go(batch)
                batch.forget()
        return batch.outcomes

    def _start_pumps(self) -> None:
        for _ in range(self._queue.take_on(self._lane.size)):
            pump = self._lane.hop(self._pump)
            self._pumps.add(pump)
            pump.add_done_callback(self._ended)

    def _ended(self, pump: asyncio.Future[None]) -> None:
        self._pumps.discard(pump)
        error = pump.exception()
        if error is not None:
            logger.error("a thread that fetches from a peer has failed", exc_info=error)

    # In worker threads.

    def _pump(self) -> None:
        attempts = _Attempts()
        while self._queue.goes_on():
            deadline = Deadline(self._deadline)
            self._deadlines.add(deadline)
            try:
                self._converse(deadline, attempts)
            except BaseException:
                # A fault of ours, or of what dials: nobody is to believe that this thread goes on.
                self._queue.leave()
                raise
            finally:
                self._deadlines.discard(deadline)
            if attempts.are_hopeless:
                self._queue.fail()
            if not self._closing.is_set() and attempts.pause:
                self._closing.wait(attempts.pause)

    def _converse(self, deadline: Deadline, attempts: _Attempts) -> None:
        """Over one connection: bring what there is, or as much as it lasts for."""
        asking: Asking | None = None
        try:
            with self._lane.borrow(deadline) as connection:
                asking = Asking(connection, self._queue, self._deadline)
                asking.bring_all()
        except OSError as error:
            attempts.failed(error)
        finally:
            if asking is not None:
                asking.put_back()
                if asking.progressed or asking.interrupted:
                    attempts.succeeded()

    def _connect(self, deadline: Deadline) -> Connection:
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
    """Wait until no thread touches the batch's memory, however often the waiting is cancelled."""
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
