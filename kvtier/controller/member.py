"""One connected instance: what it has said of itself, and the commands that it was given."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

import anyio
import msgspec

from kvtier.agent.protocol import (
    Answer,
    Cancel,
    Command,
    Delete,
    Done,
    Failed,
    Fetch,
    Heartbeat,
    Hello,
    Model,
    Pin,
    Progress,
    Tokenize,
    Unpin,
)
from kvtier.controller.errors import CommandFailed, MemberGone
from kvtier.errors import ControllerError, ProtocolError
from kvtier.memory.keys import split_keys
from kvtier.sockets.frames import Message, encode_body

MAX_COMMANDS = 1024
"""That one instance may be busy with, those included that nobody waits for any more."""
MAX_UNSENT_BYTES = 32 << 20
"""That wait to be sent to one instance. Beyond, it is taken for dead: it reads nothing."""
MAX_REASON_CHARACTERS = 1000

OnProgress: TypeAlias = Callable[[Progress], None]


class Member:
    """A connected instance, until its connection ends. Made by the registry, kept up to date by both.

    What is said to it is queued, and sent by its connection.
    """

    def __init__(self, hello: Hello, places: Sequence[int], hang_up: Callable[[], None]) -> None:
        self.id = hello.instance
        self.hello = hello
        self.places = places
        """By tier number."""
        self.models: Sequence[Model] = ()
        self.heartbeat: Heartbeat | None = None
        """The last one."""
        self.registered_at = time.time()
        self.heard_at = self.registered_at
        self.in_step = False
        """Whether it has told all that it holds."""
        self.over: str | None = None
        """Why its connection is at an end; ``None`` as long as it is not."""
        self._hang_up = hang_up
        self._awaited_sign: anyio.Event | None = None
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._to_send = anyio.Event()
        self._tickets = itertools.count(1)
        self._orders: dict[int, _Order] = {}

    async def execute(self, command: Callable[[int], Command], progress: OnProgress | None = None) -> Done:
        """Give it a command, made of the ticket for it, and wait until it was carried out.

        As long as that takes: who sets a deadline cancels, and it is told to stop; how far it came is not
        known then. Raises :class:`MemberGone` where the connection ends before, and :class:`CommandFailed`.
        """
        order = self._give(command, progress)
        try:
            await order.over.wait()
        finally:
            if order.outcome is None:
                self._cancel(order)
        assert order.outcome is not None
        if isinstance(order.outcome, Done):
            return order.outcome
        raise order.outcome

    async def responds(self, seconds: float) -> bool:
        """Whether anything comes from it, which it is asked for, within some seconds."""
        # One for all who ask at once: what comes is a sign to each of them.
        heard = self._awaited_sign = self._awaited_sign or anyio.Event()
        try:
            # Nothing to do: it is asked for no more than an answer.
            order = self._give(lambda ticket: Unpin(ticket, b""), None)
        except ControllerError:
            return False
        order.abandon()
        with anyio.move_on_after(seconds):
            await heard.wait()
        return heard.is_set() and self.over is None

    def heard(self) -> None:
        """Something has come from it."""
        self.heard_at = time.time()
        if self._awaited_sign is not None:
            self._awaited_sign.set()
            self._awaited_sign = None

    def answer(self, answer: Answer) -> None:
        """It has answered a command. Raises :class:`ProtocolError` for what is no answer to one of them."""
        order = self._orders.get(answer.ticket)
        if order is None:
            raise ProtocolError(f"it answers with ticket {answer.ticket}, which no command of its has")
        order.check(answer)
        match answer:
            case Progress():
                order.report(answer)
            case Done():
                del self._orders[answer.ticket]
                reason = None if answer.reason is None else answer.reason[:MAX_REASON_CHARACTERS]
                order.settle(msgspec.structs.replace(answer, reason=reason))
            case Failed():
                del self._orders[answer.ticket]
                order.settle(CommandFailed(f"{self.id}: {answer.reason[:MAX_REASON_CHARACTERS]}"))

    def say(self, message: Message) -> None:
        """Queue a message. Raises :class:`MemberGone`, and :class:`ProtocolError` where it is too long."""
        if self.over is not None:
            raise MemberGone(f"instance {self.id!r} has gone: {self.over}")
        body = encode_body(message)
        if self._unsent_bytes + len(body) > MAX_UNSENT_BYTES:
            self.end("it takes in nothing of what it is told")
            raise MemberGone(f"instance {self.id!r} has gone: {self.over}")
        self._unsent.append(body)
        self._unsent_bytes += len(body)
        self._to_send.set()

    async def next_body(self) -> bytes:
        """What is to be sent next, as soon as there is something."""
        while not self._unsent:
            self._to_send = anyio.Event()
            await self._to_send.wait()
        body = self._unsent.popleft()
        self._unsent_bytes -= len(body)
        return body

    def end(self, why: str) -> None:
        """Its connection is at an end, and every command with it. Harmless when repeated."""
        if self.over is not None:
            return
        self.over = why
        orders, self._orders = self._orders, {}
        for order in orders.values():
            order.settle(MemberGone(f"instance {self.id!r} has gone: {why}"))
        self._unsent.clear()
        self._hang_up()

    def _give(self, command: Callable[[int], Command], progress: OnProgress | None) -> _Order:
        if len(self._orders) >= MAX_COMMANDS:
            raise CommandFailed(f"instance {self.id!r} is busy with {MAX_COMMANDS} commands already")
        ticket = next(self._tickets)
        order = _Order(command(ticket), progress)
        try:
            self.say(order.command)
        except ProtocolError as error:
            raise CommandFailed(f"{error}: ask for fewer chunks at once") from error
        self._orders[ticket] = order
        return order

    def _cancel(self, order: _Order) -> None:
        order.abandon()
        with suppress(MemberGone):
            self.say(Cancel(order.command.ticket))


class _Order:
    """A command that was given and is not answered yet."""

    __slots__ = ("_progress", "command", "outcome", "over")

    def __init__(self, command: Command, progress: OnProgress | None) -> None:
        self.command = command
        self.outcome: Done | ControllerError | None = None
        self.over = anyio.Event()
        self._progress = progress

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self._progress = None

    def report(self, progress: Progress) -> None:
        if self._progress is not None:
            self._progress(progress)

    def settle(self, outcome: Done | ControllerError) -> None:
        self.outcome = outcome
        self.over.set()

    def check(self, answer: Answer) -> None:
        """Whether it is an answer to this command. Raises :class:`ProtocolError`.

        What the answer confirms may be deleted elsewhere: it must be among what was asked for.
        """
        if isinstance(answer, Failed):
            return
        if answer.chunks < 0 or answer.bytes < 0:
            raise ProtocolError(f"{type(answer).__name__} with a negative number of chunks or bytes")
        if isinstance(answer, Progress):
            return
        try:
            keys = split_keys(answer.keys)
            array("I", answer.tokens)
        except (ValueError, OverflowError) as error:
            raise ProtocolError(f"Done with what are no keys or no tokens: {error}") from error
        command = self.command
        asked = split_keys(command.keys) if isinstance(command, Fetch | Delete | Pin | Unpin) else ()
        if not set(asked).issuperset(keys):
            raise ProtocolError("Done names chunks that the command did not")
        if answer.tokens and not isinstance(command, Tokenize):
            raise ProtocolError("Done has tokens that nobody asked for")
