"""Asking over one connection for one part after another."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvtier.backends.base import Outcome
from kvtier.sockets.connection import Connection, Deadline
from kvtier.sockets.conversation import EXPECT, RECEIVE, SEND, Operation
from kvtier.sockets.pump import Pump
from kvtier.transports.base import Access
from kvtier.transports.tcp.batch import Part
from kvtier.transports.tcp.queue import PartQueue
from kvtier.transports.tcp.wire import answer_bytes, decode_answer, encode_answer, encode_request

AHEAD = 2
"""How many parts are asked for at once: while one is read, the peer is at the next."""
_SCRATCH_BYTES = 1 << 18


class _Asked(NamedTuple):
    part: Part
    lengths: list[int]
    """Of its pieces when it was asked for."""


class Asking:
    """What one connection is bringing. Once something is raised it is of no use but to put back."""

    def __init__(self, connection: Connection, queue: PartQueue, pump: Pump, seconds: float) -> None:
        self.progressed = False
        """Whether an answer came."""
        self.interrupted = False
        """Whether it broke only because somebody gave up. Known after :meth:`put_back`."""
        self._connection = connection
        self._queue = queue
        self._pump = pump
        self._seconds = seconds
        self._asked: deque[_Asked] = deque()

    async def bring_all(self) -> None:
        """Until nothing is left in the queue. Raises ``OSError``."""
        while True:
            new: list[Part] = []
            while len(self._asked) < AHEAD and (part := self._next()) is not None:
                self._asked.append(_Asked(part, [len(piece.view) for piece in part.pieces]))
                new.append(part)
            if not self._asked:
                return
            error = await self._take_answer(new)
            if error is not None:
                raise error
            self._asked.popleft()

    def put_back(self) -> None:
        """Leave what was asked for and did not come to others."""
        self._queue.put_back([asked.part for asked in self._asked])
        self._asked.clear()
        self.interrupted = self._queue.was_interrupted(self._connection)

    def _next(self) -> Part | None:
        if not self._asked:
            return self._queue.next()
        # Whoever sends many bytes while as many are coming may wait for a peer that waits, too.
        return self._queue.next(self._asked[0].part.batch.access)

    async def _take_answer(self, new: list[Part]) -> OSError | None:
        """Ask for new parts, and take the answer to the first of those that were asked for.

        What fails is returned and not raised: where it was raised there are views, which nobody is to hold
        longer than the leases.
        """
        part, lengths = self._asked[0]
        reads = part.batch.access is Access.READ
        wanted = not part.batch.is_over
        touched = [one for one in new if not reads] + [part] * (reads and wanted)
        self._connection.deadline = Deadline(self._seconds)
        self._queue.grip(self._connection, touched)
        try:
            progress = await self._pump.converse(self._connection, self._conversation(new, wanted))
            granted = progress.operations - bool(new) > 0
            if not granted and progress.error is None:
                return await self._take_another(part, lengths, wanted)
            self.progressed |= granted
            if progress.error is None:
                part.settle([Outcome.OK] * len(part.pieces))
            elif granted and wanted:
                part.advance(progress.received)
            return progress.error
        finally:
            self._queue.ungrip(self._connection)

    async def _take_another(self, part: Part, lengths: list[int], wanted: bool) -> OSError | None:
        """The answer is not that everything is granted."""
        access = part.batch.access
        head = bytearray(answer_bytes(len(lengths)))
        progress = await self._pump.converse(self._connection, [(RECEIVE, [memoryview(head)])])
        if progress.error is not None:
            return progress.error
        outcomes = decode_answer(head, access, len(lengths))
        self.progressed = True
        if access is Access.WRITE:
            part.settle(outcomes if part.pieces else [])
            return None
        coming = [length for length, outcome in zip(lengths, outcomes, strict=True) if outcome is Outcome.OK]
        if wanted:
            part.drop_misses(outcomes)
        operation = RECEIVE, part.views() if wanted else _nowhere(sum(coming))
        progress = await self._pump.converse(self._connection, [operation])
        if progress.error is None:
            part.settle([Outcome.OK] * len(part.pieces))
        elif wanted:
            part.advance(progress.received)
        return progress.error

    def _conversation(self, new: list[Part], wanted: bool) -> list[Operation]:
        """As it goes where everything is granted."""
        part, lengths = self._asked[0]
        access = part.batch.access
        operations: list[Operation] = []
        if new:
            operations.append((SEND, [buffer for one in new for buffer in _request(one)]))
        operations.append((EXPECT, [encode_answer(access, [True] * len(lengths))]))
        if access is Access.READ:
            operations.append((RECEIVE, part.views() if wanted else _nowhere(sum(lengths))))
        return operations


def _request(part: Part) -> list[bytes | memoryview]:
    access = part.batch.access
    request = encode_request(access, [piece.span for piece in part.pieces])
    return [request, *part.views()] if access is Access.WRITE else [request]


def _nowhere(length: int) -> list[memoryview]:
    """Memory for what is to be received and not kept, the same again and again."""
    scratch = memoryview(bytearray(min(length, _SCRATCH_BYTES)))
    return [scratch[: length - start] for start in range(0, length, _SCRATCH_BYTES)]
