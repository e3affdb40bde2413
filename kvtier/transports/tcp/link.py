"""The requesting side: drivers that transfer the queued parts, each over one connection."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from anyio import CancelScope, move_on_after

from kvtier.backends.base import Outcome
from kvtier.concurrency.sockets.connection import (
    EXPECT,
    RECEIVE,
    SEND,
    Connection,
    Deadline,
    Operation,
    ProtocolViolation,
    split_runs,
)
from kvtier.concurrency.sockets.executor import IoExecutor
from kvtier.concurrency.sockets.pool import ConnectionPool
from kvtier.concurrency.tasks import wait_shielded
from kvtier.transports.base import Access, Dial, Link, ReadItem, WriteItem
from kvtier.transports.tcp.queue import Batch, Part, PartQueue
from kvtier.transports.tcp.wire import (
    CONFIRMED_BYTES,
    MARK,
    answer_bytes,
    decode_answer,
    encode_answer,
    encode_request,
)

logger = logging.getLogger("kvtier")

AHEAD = 2
"""Pipeline depth: read requests in flight, and runs of written bytes that are not confirmed yet.

While one is in transit, the peer processes the next.
"""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5
"""Back-off between connection attempts, in seconds; the first retry is immediate."""
MAX_REFUSED_ATTEMPTS = 3
"""Consecutive attempts, refused or answered in another protocol, after which the link gives up."""
_SCRATCH_BYTES = 1 << 18


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
        return (await self._transfer(Access.READ, items, hashes=False)).outcomes

    async def read_hashed(self, items: Sequence[ReadItem]) -> Sequence[Outcome]:
        """See :meth:`Link.read_hashed`. Not with TLS, and not items that several connections share."""
        batch = await self._transfer(Access.READ, items)
        return [
            Outcome.VERIFIED if outcome is Outcome.OK and checksum is not None else outcome
            for outcome, checksum in zip(batch.outcomes, batch.checksums, strict=True)
        ]

    async def write(self, items: Sequence[WriteItem]) -> Sequence[Outcome]:
        """See :meth:`Link.write`. After a connection loss, all unconfirmed bytes are sent again."""
        return (await self._transfer(Access.WRITE, _turned(items), hashes=False)).outcomes

    async def write_hashed(self, items: Sequence[WriteItem]) -> tuple[Sequence[Outcome], list[bytes | None]]:
        """See :meth:`Link.write_hashed`. Not with TLS, and not for items that several connections share."""
        batch = await self._transfer(Access.WRITE, _turned(items))
        return batch.outcomes, batch.checksums

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

    async def _transfer(self, access: Access, items: Sequence[ReadItem], *, hashes: bool = True) -> Batch:
        # The connections of other batches will not be free before those of this one.
        spread = max(self._pool.size - len(self._drivers), 1)
        batch = Batch(access, items, spread, hashes=hashes)
        if not batch.parts:
            return batch
        self._queue.add(batch.parts)
        for _ in range(min(self._pool.size - len(self._drivers), len(self._queue))):
            driver = asyncio.ensure_future(self._drive())
            self._drivers.add(driver)
            driver.add_done_callback(self._driver_done)
        # Not a cancel scope: only this batch ends, and the drivers go on with the others.
        timer = asyncio.get_running_loop().call_later(self._deadline, self._queue.abandon, batch)
        try:
            await batch.released.wait()
        except asyncio.CancelledError:
            self._queue.abandon(batch)
            await wait_shielded([batch.released])
            raise
        finally:
            timer.cancel()
            batch.forget()  # A driver's frame may refer to its parts for longer.
        return batch

    def _driver_done(self, driver: asyncio.Task[None]) -> None:
        self._drivers.discard(driver)
        error = None if driver.cancelled() else driver.exception()
        if error is not None:
            logger.error("tcp transport: transfer task failed", exc_info=error)

    async def _drive(self) -> None:
        driver, attempts = asyncio.current_task(), _Attempts()
        assert driver is not None
        try:
            while self._queue:
                await self._use_connection(attempts)
                if attempts.is_peer_lost:
                    self._queue.fail()
                if attempts.pause:
                    with move_on_after(attempts.pause):
                        await self._closing.wait()
        finally:
            # Not only in its callback, which runs later: what is queued until then needs another driver.
            self._drivers.discard(driver)

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
        # Also a :class:`~kvtier.transports.base.PeerRefused`, which ``dial`` raises.
        is_refused = isinstance(error, ConnectionRefusedError | ProtocolViolation)
        self._refused = self._refused + 1 if is_refused else 0

    def succeeded(self) -> None:
        """Reset the counts after data has arrived."""
        self._failed = 1
        self._refused = 0


class _Pending(NamedTuple):
    part: Part
    lengths: list[int]
    """Of its pieces when it was requested."""


class Requester:
    """A pipeline of requests over one connection. After an exception only :meth:`requeue` may be called."""

    def __init__(
        self, connection: Connection, queue: PartQueue, executor: IoExecutor, seconds: float
    ) -> None:
        self.progressed = False
        """Whether an answer arrived."""
        self.interrupted = False
        """Whether the connection broke only because a caller gave up. Set by :meth:`requeue`."""
        self._connection = connection
        self._queue = queue
        self._executor = executor
        self._seconds = seconds
        self._pending: deque[_Pending] = deque()

    async def run(self) -> None:
        """Transfer parts until the queue is empty. Raises ``OSError``."""
        while True:
            new: list[Part] = []
            while len(self._pending) < AHEAD and (part := self._next()) is not None:
                self._pending.append(_Pending(part, [len(piece.view) for piece in part.pieces]))
                new.append(part)
            if not self._pending:
                return
            error = await self._receive_answer(new)
            if error is not None:
                raise error
            self._pending.popleft()

    def requeue(self) -> None:
        """Put unfinished parts back into the queue, for other connections."""
        self._queue.requeue([pending.part for pending in self._pending])
        self._pending.clear()
        self.interrupted = self._queue.was_interrupted(self._connection)

    def _next(self) -> Part | None:
        if not self._pending:
            return self._queue.next()
        # Sending and receiving many bytes at once can deadlock: each side waits for the other to read.
        reads = self._pending[0].part.batch.access is Access.READ
        return self._queue.next(Access.READ) if reads else None

    async def _receive_answer(self, new: list[Part]) -> OSError | None:
        """Request the parts in ``new``, and receive the answer for the first pending part.

        Errors are returned, not raised: the traceback would refer to views, and keep them longer than the
        leases.
        """
        part, lengths = self._pending[0]
        reads = part.batch.access is Access.READ
        wanted = not part.batch.ended
        used = [new_part for new_part in new if not reads] + [part] * (reads and wanted)
        self._connection.deadline = Deadline(self._seconds)
        self._queue.acquire(self._connection, used)
        try:
            conversation = self._conversation(new, wanted)
            kinds = [kind for kind, _ in conversation]
            conversing = self._executor.converse(self._connection, conversation, part.hashes())
            del conversation  # See :meth:`IoExecutor.converse`: a cancelled task may keep this frame.
            progress = await conversing
            confirmed = kinds[: progress.operations].count(EXPECT)
            self.progressed |= confirmed > 0
            if progress.operations == len(kinds):
                part.settle([Outcome.OK] * len(part.pieces))
            elif progress.error is None:
                return await self._receive_partial(part, lengths, wanted, progress.operations)
            elif confirmed and wanted:
                part.advance(progress.received if reads else confirmed * CONFIRMED_BYTES)
            return progress.error
        finally:
            self._queue.release(self._connection)

    async def _receive_partial(
        self, part: Part, lengths: list[int], wanted: bool, done: int
    ) -> OSError | None:
        """Receive an answer that does not grant everything, after ``done`` completed operations."""
        access = part.batch.access
        head = bytearray(answer_bytes(len(lengths)))
        progress = await self._executor.converse(self._connection, [(RECEIVE, [memoryview(head)])])
        if progress.error is not None:
            return progress.error
        outcomes = decode_answer(head, access, len(lengths))
        self.progressed = True
        if access is Access.WRITE:
            rest = _writing(part)[done + 1 :]
            progress = await self._executor.converse(self._connection, rest)
            if progress.error is None and progress.operations < len(rest):
                return ProtocolViolation("the peer did not confirm a write")
            if progress.error is None:
                part.settle(outcomes)
            return progress.error
        granted = [length for length, outcome in zip(lengths, outcomes, strict=True) if outcome is Outcome.OK]
        if wanted:
            part.drop_misses(outcomes)
        operation = RECEIVE, part.views() if wanted else _discarded(sum(granted))
        progress = await self._executor.converse(self._connection, [operation])
        if progress.error is None:
            part.settle([Outcome.OK] * len(part.pieces))
        elif wanted:
            part.advance(progress.received)
        return progress.error

    def _conversation(self, new: list[Part], wanted: bool) -> list[Operation]:
        """Return the operations that apply if everything is granted."""
        part, lengths = self._pending[0]
        if part.batch.access is Access.WRITE:
            return _writing(part)
        answer = encode_answer(Access.READ, [True] * len(lengths))
        return [
            *([(SEND, [_request(new_part) for new_part in new])] if new else []),
            (EXPECT, [answer]),
            (RECEIVE, part.views() if wanted else _discarded(sum(lengths))),
        ]


def _writing(part: Part) -> list[Operation]:
    """Return the operations that write a part."""
    sent: list[Operation] = [(SEND, list(run)) for run in split_runs(part.views(), CONFIRMED_BYTES)]
    sent[0] = SEND, [_request(part), *sent[0][1]]
    confirmation = encode_answer(Access.WRITE, [True] * len(part.pieces))
    operations = sent[:AHEAD]
    for index in range(len(sent)):
        operations += [(EXPECT, [confirmation]), *sent[index + AHEAD :][:1]]
        confirmation = MARK
    return operations


def _turned(items: Sequence[WriteItem]) -> list[ReadItem]:
    return [(span, view) for view, span in items]


def _request(part: Part) -> bytes:
    return encode_request(part.batch.access, [piece.span for piece in part.pieces])


def _discarded(length: int) -> list[memoryview]:
    """Return views of ``length`` bytes in all for bytes to discard; they share one buffer."""
    scratch = memoryview(bytearray(min(length, _SCRATCH_BYTES)))
    return [scratch[: length - start] for start in range(0, length, _SCRATCH_BYTES)]
