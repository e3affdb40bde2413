"""The control connection to one peer: questions with tickets, answered in any order."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from kvtier.errors import ChannelError, PeerError, ProtocolError
from kvtier.peers.promises import Promise
from kvtier.peers.protocol import FromServer, Refused, Release, Released, Welcome, decode_from_server
from kvtier.sockets.channel import Channel
from kvtier.sockets.frames import FrameReader, Message, encode

MAX_QUESTIONS = 4096
"""That may be unanswered. A peer that leaves more is as good as gone."""
MAX_UNSENT_BYTES = 16 << 20

AnswerT = TypeVar("AnswerT", bound=Message)
ResultT = TypeVar("ResultT")

Settle = Callable[[AnswerT, bool], ResultT]
"""Makes a result of an answer and is told whether anybody still waits for it. Raises ``ProtocolError``."""


class _Question:
    """What was asked and not yet answered."""

    __slots__ = ("future", "kind", "settle")

    def __init__(
        self, kind: type[Message], settle: Settle[Any, Any], future: asyncio.Future[Any] | None
    ) -> None:
        self.kind = kind
        self.settle = settle
        self.future = future

    def answer(self, answer: FromServer) -> None:
        if not isinstance(answer, self.kind):
            raise ProtocolError(f"answers with {type(answer).__name__} where {self.kind.__name__} is due")
        wanted = self.future is not None and not self.future.done()
        result = self.settle(answer, wanted)
        if wanted and self.future is not None:
            self.future.set_result(result)

    def give_up(self) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_result(None)


class Conversation:
    """Asks one peer over an authenticated channel. Nothing here waits for the peer but :meth:`run`.

    What is said is queued and sent by one task, so that a caller who gives up never leaves half a frame
    behind. An answer whose asker is gone is still settled: what it grants is given back.
    """

    def __init__(self, channel: Channel) -> None:
        self.heard_at = time.monotonic()
        """When the last message came."""
        self.over = False
        self._channel = channel
        self._questions: dict[int, _Question] = {}
        self._tickets = itertools.count(1)
        self._unsent = bytearray()
        self._unreleased: dict[int, list[int]] = {}
        self._to_say = anyio.Event()

    async def run(self) -> ChannelError:
        """Send and receive until that cannot go on, and say why. Every question is over then."""
        causes: list[ChannelError] = []

        async def until_it_fails(work: Callable[[], Any], scope: anyio.CancelScope) -> None:
            try:
                await work()
            except ChannelError as error:
                causes.append(error)
                self._give_up()
                scope.cancel()

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(until_it_fails, self._receive, tasks.cancel_scope)
                tasks.start_soon(until_it_fails, self._send, tasks.cancel_scope)
        finally:
            self.close()
        return causes[0]

    def ask(
        self, question: Callable[[int], Message], kind: type[AnswerT], settle: Settle[AnswerT, ResultT]
    ) -> asyncio.Future[ResultT | None]:
        """Ask, with a ticket. The result is ``None`` where the connection ends before the answer.

        Who waits no longer cancels the future. Raises :class:`PeerError` where the peer takes nothing in, and
        :class:`kvtier.errors.ProtocolError` for a question over the size of a frame.
        """
        future: asyncio.Future[ResultT | None] = asyncio.get_running_loop().create_future()
        self._say(question, _Question(kind, settle, future))
        return future

    def release(self, promises: Iterable[Promise]) -> None:
        """Tell the peer, soon, that these are not needed any longer."""
        if self.over:
            return
        for promise in promises:
            self._unreleased.setdefault(promise.grant, []).append(promise.number)
        self._to_say.set()

    def _say(self, message: Callable[[int], Message], question: _Question) -> None:
        if self.over:
            raise PeerError("the connection is closed")
        if len(self._questions) >= MAX_QUESTIONS or len(self._unsent) > MAX_UNSENT_BYTES:
            raise PeerError("it leaves too much unanswered")
        ticket = next(self._tickets)
        self._unsent += encode(message(ticket))
        self._questions[ticket] = question
        self._to_say.set()

    async def _send(self) -> None:
        while True:
            await self._to_say.wait()
            self._to_say = anyio.Event()
            self._say_releases()
            while self._unsent:
                data, self._unsent = self._unsent, bytearray()
                await self._channel.send(bytes(data))

    def _say_releases(self) -> None:
        unreleased, self._unreleased = self._unreleased, {}
        for grant, numbers in unreleased.items():

            def release(ticket: int, grant: int = grant, numbers: list[int] = numbers) -> Message:
                return Release(ticket, grant, numbers)

            self._say(release, _Question(Released, _ignore, None))

    async def _receive(self) -> None:
        reader = FrameReader()
        while True:
            bodies = reader.feed(await self._channel.receive())
            # Where there is always more to read, receiving gives way to nobody.
            await anyio.lowlevel.checkpoint()
            for body in bodies:
                message = decode_from_server(body)
                self.heard_at = time.monotonic()
                if isinstance(message, Welcome | Refused):
                    raise ProtocolError(f"says {type(message).__name__} when it was asked something else")
                question = self._questions.pop(message.ticket, None)
                if question is None:
                    raise ProtocolError("answers a question that nobody asked")
                try:
                    question.answer(message)
                finally:
                    question.give_up()  # Where that was no answer, nobody need wait for another.

    def close(self) -> None:
        """End the connection, and every question with it. Harmless when repeated."""
        self._give_up()
        self._channel.close()

    def _give_up(self) -> None:
        """At once: nobody may go on in the belief that this can be asked."""
        self.over = True
        questions, self._questions = self._questions, {}
        for question in questions.values():
            question.give_up()


def _ignore(_answer: Released, _wanted: bool) -> None:
    """Nobody waits for it."""


async def answer_of(future: asyncio.Future[ResultT | None]) -> ResultT:
    """Raises :class:`PeerError` where the connection ends first. Cancelled, the question is not wanted."""
    answer = await future
    if answer is None:
        raise PeerError("the connection was lost")
    return answer
