"""Asking over one connection for one part after another, in a worker thread."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvtier.backends.base import Outcome
from kvtier.sockets.buffers import BUFFERS_A_CALL
from kvtier.sockets.connection import Connection, Deadline
from kvtier.transports.base import Access
from kvtier.transports.tcp.batch import Part
from kvtier.transports.tcp.queue import PartQueue
from kvtier.transports.tcp.wire import answer_bytes, decode_answer, encode_request

AHEAD = 2
"""How many parts are asked for at once: while one is read, the peer is at the next."""
_SCRATCH_BYTES = 1 << 18


class _Asked(NamedTuple):
    part: Part
    lengths: list[int]
    """Of its pieces when it was asked for."""


class Asking:
    """What one connection is bringing. Blocks; raises ``OSError``, and is of no use then but to put back."""

    def __init__(self, connection: Connection, queue: PartQueue, seconds: float) -> None:
        self.progressed = False
        """Whether an answer came."""
        self.interrupted = False
        """Whether it broke only because somebody gave up. Known after :meth:`put_back`."""
        self._connection = connection
        self._queue = queue
        self._seconds = seconds
        self._asked: deque[_Asked] = deque()

    def bring_all(self) -> None:
        """Until nothing is left in the queue."""
        while True:
            while len(self._asked) < AHEAD and (part := self._next()) is not None:
                self._ask(part)
            if not self._asked:
                return
            self._take_answer(*self._asked[0])
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
        return self._queue.next(Access.READ if self._is_reading() else Access.WRITE)

    def _is_reading(self) -> bool:
        return self._asked[0].part.batch.access is Access.READ

    def _ask(self, part: Part) -> None:
        self._connection.deadline = Deadline(self._seconds)
        writes = part.batch.access is Access.WRITE
        if not self._queue.grip(self._connection, part):
            return
        self._asked.append(_Asked(part, [len(piece.view) for piece in part.pieces]))
        try:
            request = encode_request(part.batch.access, [piece.span for piece in part.pieces])
            views = part.views(len(part.pieces)) if writes else []
            self._connection.send([request, *(view for view in views if view)])
        finally:
            views = []
            self._queue.ungrip(self._connection)

    def _take_answer(self, part: Part, lengths: list[int]) -> None:
        access = part.batch.access
        self._connection.deadline = Deadline(self._seconds)
        head = bytearray(answer_bytes(len(lengths)))
        self._connection.take(memoryview(head))
        outcomes = decode_answer(head, access, len(lengths))
        self.progressed = True
        if self._queue.grip(self._connection, part):
            try:
                self._settle(part, outcomes)
            finally:
                self._queue.ungrip(self._connection)
        elif access is Access.READ:
            self._skip(
                sum(
                    length for length, outcome in zip(lengths, outcomes, strict=True) if outcome is Outcome.OK
                )
            )

    def _settle(self, part: Part, outcomes: list[Outcome]) -> None:
        if part.batch.access is Access.WRITE:
            part.settle(outcomes)
            return
        part.drop_misses(outcomes)
        part.advance(0)
        while part.pieces:
            part.advance(self._connection.receive_some(part.views(BUFFERS_A_CALL)))

    def _skip(self, length: int) -> None:
        scratch = memoryview(bytearray(min(length, _SCRATCH_BYTES)))
        while length:
            length -= self._connection.receive_some([scratch[:length]])
