"""The requesting side of one connection: pipelined requests for parts."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

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
from kvtier.transports.base import Access
from kvtier.transports.tcp.batch import Part
from kvtier.transports.tcp.queue import PartQueue
from kvtier.transports.tcp.wire import (
    CONFIRMED_BYTES,
    MARK,
    answer_bytes,
    decode_answer,
    encode_answer,
    encode_request,
)

AHEAD = 2
"""Pipeline depth: read requests in flight, and runs of written bytes that are not confirmed yet.

While one is in transit, the peer processes the next.
"""
_SCRATCH_BYTES = 1 << 18


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
            conversing = self._executor.converse(self._connection, conversation)
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


def _request(part: Part) -> bytes:
    return encode_request(part.batch.access, [piece.span for piece in part.pieces])


def _discarded(length: int) -> list[memoryview]:
    """Return views of ``length`` bytes in all for bytes to discard; they share one buffer."""
    scratch = memoryview(bytearray(min(length, _SCRATCH_BYTES)))
    return [scratch[: length - start] for start in range(0, length, _SCRATCH_BYTES)]
