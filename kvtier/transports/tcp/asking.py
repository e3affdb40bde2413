"""Asking over one connection for one part after another."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvtier.backends.base import Outcome
from kvtier.sockets.buffers import cut
from kvtier.sockets.connection import Connection, Deadline, ProtocolViolation
from kvtier.sockets.conversation import EXPECT, RECEIVE, SEND, Operation
from kvtier.sockets.pump import Pump
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
"""So many parts to read are asked for, and so much is written before the first of it is confirmed.

While one is on its way, the peer is at the next.
"""
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
        reads = self._asked[0].part.batch.access is Access.READ
        return self._queue.next(Access.READ) if reads else None

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
            conversation = self._conversation(new, wanted)
            kinds = [kind for kind, _ in conversation]
            conversing = self._pump.converse(self._connection, conversation)
            del conversation  # As :meth:`Pump.converse` does.
            progress = await conversing
            confirmed = kinds[: progress.operations].count(EXPECT)
            self.progressed |= confirmed > 0
            if progress.operations == len(kinds):
                part.settle([Outcome.OK] * len(part.pieces))
            elif progress.error is None:
                return await self._take_another(part, lengths, wanted, progress.operations)
            elif confirmed and wanted:
                part.advance(progress.received if reads else confirmed * CONFIRMED_BYTES)
            return progress.error
        finally:
            self._queue.ungrip(self._connection)

    async def _take_another(self, part: Part, lengths: list[int], wanted: bool, done: int) -> OSError | None:
        """After so many operations came something else than that everything is granted."""
        access = part.batch.access
        head = bytearray(answer_bytes(len(lengths)))
        progress = await self._pump.converse(self._connection, [(RECEIVE, [memoryview(head)])])
        if progress.error is not None:
            return progress.error
        outcomes = decode_answer(head, access, len(lengths))
        self.progressed = True
        if access is Access.WRITE:
            rest = _writing(part)[done + 1 :]
            progress = await self._pump.converse(self._connection, rest)
            if progress.error is None and progress.operations < len(rest):
                return ProtocolViolation("what was written is not confirmed")
            if progress.error is None:
                part.settle(outcomes)
            return progress.error
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
        if part.batch.access is Access.WRITE:
            return _writing(part)
        answer = encode_answer(Access.READ, [True] * len(lengths))
        return [
            *([(SEND, [_request(one) for one in new])] if new else []),
            (EXPECT, [answer]),
            (RECEIVE, part.views() if wanted else _nowhere(sum(lengths))),
        ]


def _writing(part: Part) -> list[Operation]:
    """The whole conversation about a part that is written."""
    sent: list[Operation] = [(SEND, list(run)) for run in cut(part.views(), CONFIRMED_BYTES)]
    sent[0] = SEND, [_request(part), *sent[0][1]]
    confirmation = encode_answer(Access.WRITE, [True] * len(part.pieces))
    operations = sent[:AHEAD]
    for index in range(len(sent)):
        operations += [(EXPECT, [confirmation]), *sent[index + AHEAD :][:1]]
        confirmation = MARK
    return operations


def _request(part: Part) -> bytes:
    return encode_request(part.batch.access, [piece.span for piece in part.pieces])


def _nowhere(length: int) -> list[memoryview]:
    """Memory for what is to be received and not kept, the same again and again."""
    scratch = memoryview(bytearray(min(length, _SCRATCH_BYTES)))
    return [scratch[: length - start] for start in range(0, length, _SCRATCH_BYTES)]
