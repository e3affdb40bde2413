"""What the scheduler's and the workers' ends of the bridge have in common: questions, waits, reconnecting.

Called from vLLM's hooks, in one thread. Nothing blocks but :meth:`Bridge.connect` and what takes a ``wait``.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvtier.bridge.connection import GREETING_SECONDS, Connection
from kvtier.bridge.health import Health
from kvtier.bridge.protocol import FromCache, Hello, Refused, Welcome
from kvtier.errors import ArenaError, ChannelError
from kvtier.logs import RateLimitedWarning
from kvtier.sockets.frames import Message

GLANCE_SECONDS = 0.0001
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 30.0

AnswerT = TypeVar("AnswerT")


@dataclass(slots=True, eq=False)
class Question(Generic[AnswerT]):
    """A question that was sent, and its answer once that has arrived."""

    ticket: int
    what: str
    """A plural, for the log."""
    answer: AnswerT | None = None
    lost: bool = False
    """Whether the connection has ended: no answer will come."""

    @property
    def open(self) -> bool:
        """Whether an answer may still come."""
        return self.answer is None and not self.lost


class Bridge:
    """A connection to the cache process that is replaced when it is lost."""

    def __init__(
        self,
        hello: Hello,
        path: Path,
        start: Callable[[], None] | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        """``start`` starts a cache process on ``path`` without blocking, for when the connection is lost."""
        self._hello = hello
        self._path = path
        self._start = start
        self._logger = logger or logging.getLogger("kvtier")
        self._tickets = itertools.count(1)
        self._health = Health(self._logger)
        self._warn = RateLimitedWarning(self._logger)
        self._questions: dict[int, Question[Any]] = {}
        """The open ones, by ticket."""
        self._connection: Connection | None = None
        self._greeting: Connection | None = None
        """A connection whose welcome is outstanding."""
        self._greeting_until = 0.0
        self._polled_at = 0.0
        self._retry_at = 0.0
        self._retry_seconds = FIRST_RETRY_SECONDS
        self.welcome: Welcome | None = None
        """The last greeting; its epoch tells one cache process from the next."""
        self.epoch = 0
        """The cache process that is connected; 0 for none."""
        self.waited = 0.0
        """Seconds spent waiting for answers, all together."""

    # Connecting.

    def connect(self) -> None:
        """Connect; blocks up to :data:`GREETING_SECONDS`, so not for hooks. Raises :class:`ChannelError`."""
        connection = Connection(self._path, self._make_hello())
        self._adopt(connection, connection.await_welcome(GREETING_SECONDS))

    def _make_hello(self) -> Hello:
        return self._hello

    def _adopt(self, connection: Connection, messages: list[FromCache]) -> None:
        self._connection = connection
        self.welcome = connection.welcome
        self.epoch = 0 if self.welcome is None else self.welcome.epoch
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._health.reset()
        try:
            self._connected(connection)
        except ArenaError as error:
            self._drop()
            raise ChannelError(str(error)) from error
        self._receive_all(messages)

    def _connected(self, connection: Connection) -> None:
        """Called when a connection has been made."""

    def _lost(self) -> None:
        """Called when the connection has ended, and with it every answer that was outstanding."""

    def _receive(self, message: FromCache) -> None:
        """Called for each message. Raises :class:`ProtocolError`."""

    @property
    def connected(self) -> bool:
        """Whether there is a cache process, as far as is known."""
        return self._connection is not None

    @property
    def responsive(self) -> bool:
        """Whether there is a cache process that answers, as far as is known."""
        return self._connection is not None and not self._health.unresponsive

    @property
    def late(self) -> bool:
        """Whether the last wait ended without an answer, and nothing has arrived since."""
        return self._health.late

    def ready(self) -> bool:
        """Whether there is a connection; takes the next step towards one. Never blocks.

        Attempts are at least a second apart, and up to :data:`LAST_RETRY_SECONDS` where they fail.
        """
        if self._connection is not None:
            return True
        now = time.monotonic()
        if self._greeting is None and now < self._retry_at:
            return False
        try:
            return self._advance(now)
        except ChannelError as error:
            self._warn("no cache process yet: %s", error)
            if self._greeting is not None:
                self._greeting.close()
                self._greeting = None
            self._retry_at = now + self._retry_seconds
            self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)
            if self._start is not None:
                self._start()
            return False

    def _advance(self, now: float) -> bool:
        if self._greeting is None:
            self._greeting = Connection(self._path, self._make_hello())
            self._greeting_until = now + GREETING_SECONDS
        connection = self._greeting
        messages = connection.receive()
        if connection.welcome is None:
            if now >= self._greeting_until:
                raise ChannelError(f"no welcome within {GREETING_SECONDS:g} s on {self._path}")
            return False
        self._greeting = None
        self._adopt(connection, messages)
        self._logger.info("connected to the cache process on %s again", self._path)
        return self.connected

    def retry_now(self) -> None:
        """Let the next attempt to connect happen at once: there is a cache process, as others have found."""
        self._retry_at = 0.0

    # Messages.

    def update(self) -> None:
        """Reconnect if necessary, read what has arrived, and look at the clock. Once a step; never blocks."""
        self.ready()
        self.poll()
        self._health.check(question.what for question in self._questions.values())

    def poll(self, wait: float = 0.0) -> None:
        """Read what has arrived, blocking up to ``wait`` seconds until anything has."""
        if self._connection is None:
            return
        self._polled_at = time.monotonic()
        try:
            messages = self._connection.receive(wait)
        except ChannelError as error:
            self._give_up(error)
            return
        self._receive_all(messages)

    def _receive_all(self, messages: list[FromCache]) -> None:
        if messages:
            self._health.heard()
        try:
            for message in messages:
                if isinstance(message, Refused):
                    raise ChannelError(f"the cache process refuses this engine: {message.reason}")  # noqa: TRY301
                self._receive(message)
        except ChannelError as error:
            self._give_up(error)

    def _send(self, message: Message) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.send(message)
        except ChannelError as error:
            self._give_up(error)
            return False
        return True

    def glance(self) -> None:
        """:meth:`poll`, unless that was done a moment ago: for what is called once for each request."""
        if time.monotonic() - self._polled_at >= GLANCE_SECONDS:
            self.poll()

    @property
    def takes_questions(self) -> bool:
        """Whether the cache process is to be asked anything. Takes the next step towards a connection."""
        if self.ready() and not self.responsive:
            self.glance()
        return self.responsive and self._connection is not None and not self._connection.congested

    def _ask(self, ticket: int, what: str, message: Message) -> Question[Any] | None:
        """Send a question; ``None`` where that fails."""
        question: Question[Any] = Question(ticket, what)
        self._health.asked(first=not self._questions)
        self._questions[ticket] = question
        return question if self._send(message) else None

    def _answer(self, ticket: int, answer: AnswerT) -> Question[AnswerT] | None:
        """Settle a question; the first answer counts."""
        question = self._questions.pop(ticket, None)
        if question is not None:
            question.answer = answer
        return question

    def await_answer(self, question: Question[AnswerT] | None, wait: float) -> AnswerT | None:
        """The answer, waiting up to ``wait`` seconds for it; ``None`` where there is none yet.

        Does not wait while the cache process is late. A wait that ends without an answer makes it so.
        """
        if question is None or not question.open:
            return None if question is None else question.answer
        if wait <= 0 or self._health.late:
            self.poll()
            return question.answer
        heard_at = self._health.quiet_since
        self._wait(lambda: not question.open, wait)
        if heard_at == self._health.quiet_since and question.ticket in self._questions:
            self._health.missed()
        return question.answer

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        """Block until ``done``, or the connection is lost, or for so long."""
        started = now = time.monotonic()
        end = started + seconds
        while self._connection is not None and not done() and now < end:
            self.poll(end - now)
            now = time.monotonic()
        self.waited += now - started

    # Ending.

    def _give_up(self, error: ChannelError) -> None:
        self._logger.warning("%s: continuing without a cache until it is back", error)
        self._drop()
        self._retry_at = time.monotonic()

    def _drop(self) -> None:
        if self._connection is None:
            return
        self._connection.close()
        self._connection = None
        self.epoch = 0
        questions, self._questions = self._questions, {}
        for question in questions.values():
            question.lost = True
        self._health.reset()
        self._lost()

    def close(self) -> None:
        """Leave; what this engine holds ends with its last connection."""
        if self._greeting is not None:
            self._greeting.close()
            self._greeting = None
        self._drop()
        self._retry_at = float("inf")
