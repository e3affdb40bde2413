"""A synchronous client on a Unix socket that reconnects, for callers that must not block.

Called from one thread. Nothing blocks but :meth:`Client.connect` and what takes a ``wait``.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic

from kvtier.concurrency.breaker import Backoff
from kvtier.errors import ChannelClosed, ChannelError, ProtocolError, Rejected
from kvtier.logs import RateLimitedLog
from kvtier.rpc.calls import Call, Calls, ReplyT, ResultT, Settle
from kvtier.rpc.frames import Message, Refused, Reply, Request, VersionedT, check_welcome, encode_body
from kvtier.rpc.wire import FrameSocket

UNRESPONSIVE_SECONDS = 1.0
"""Default of :attr:`Health.limit`. On a saturated machine a healthy process may wait 0.1 s for a CPU."""


class Health:
    """The state of one connection: answering, late or unresponsive.

    *Late* begins when a wait ends without an answer, *unresponsive* when nothing has arrived for
    :attr:`limit` seconds. Any message ends both.
    """

    def __init__(
        self, logger: logging.Logger, server: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._server = server
        self._clock = clock
        self._warn = RateLimitedLog(logger)
        self._warned = False
        self.limit = UNRESPONSIVE_SECONDS
        """Seconds without any message, while an answer is outstanding, until the server is unresponsive."""
        self.idle_since = 0.0
        """When the last message arrived or the first open request was sent, whichever is later."""
        self.late = False
        """Whether the last wait ended without an answer: waiting again is pointless."""
        self.unresponsive = False
        """Whether no request should be sent."""

    @property
    def idle_seconds(self) -> float:
        """The time since :attr:`idle_since`."""
        return self._clock() - self.idle_since

    def request_sent(self, *, first: bool) -> None:
        """Record that a request was sent; ``first``: no other one is open."""
        if first:
            self.idle_since = self._clock()

    def message_received(self) -> None:
        """Record that a message has arrived."""
        if self.unresponsive and self._warned:
            self._logger.info("%s answers again, after %.1f s", self._server, self.idle_seconds)
        self.reset()

    def check(self, outstanding: Iterable[str]) -> None:
        """Update the state by the clock; ``outstanding``: names of the open requests. Receive first."""
        if self.unresponsive or self.idle_seconds < self.limit:
            return
        if open_questions := Counter(outstanding):
            self.late = self.unresponsive = True
            self._warned = self._warn(
                "%s has not answered for %.2f s (open: %s): continuing without it until it does",
                self._server,
                self.idle_seconds,
                ", ".join(f"{count} {what}" for what, count in open_questions.items()),
            )

    def reset(self) -> None:
        """Reset the state: a message has arrived, or a new connection is established."""
        self.idle_since = self._clock()
        self.late = self.unresponsive = self._warned = False


POLL_SECONDS = 0.0001
"""Interval of checks if less than a millisecond is left, which is the resolution of poll(2)."""


class UnixConnection(Generic[VersionedT]):
    """Sends without blocking and queues the rest; reads what has arrived. Confined to one thread.

    A slow server keeps its connection: the stream preserves order, and a late reply finds its call.
    """

    def __init__(
        self,
        path: Path,
        hello: Message,
        welcome: type[VersionedT],
        version: int,
        decode: Callable[[bytes], Any],
        server: str,
    ) -> None:
        """Connect and send ``hello``, without waiting for the welcome. Raises :class:`ChannelError`.

        ``server``: the other side's name for error messages.
        """
        self.welcome: VersionedT | None = None
        """The reply to ``hello``, once it has arrived."""
        self._path = path
        self._welcome = welcome
        self._version = version
        self._decode = decode
        self._server = server
        try:
            self._frames = FrameSocket(socket.socket(socket.AF_UNIX))
        except OSError as error:  # Out of file descriptors.
            raise ChannelClosed(f"cannot connect to {server}: {error}") from error
        self._frames.takes_fds = True
        try:
            # On a Unix socket this never takes time: a full backlog is an error at once (connect(2), EAGAIN).
            self._frames.socket.connect(str(path))
            self._poll = select.poll()  # Not select(2), which cannot take descriptors above 1023.
            self._poll.register(self._frames.socket, select.POLLIN)
            self.send(hello)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ChannelClosed(f"{server} does not answer on {path}: {error}") from error
            raise

    @property
    def congested(self) -> bool:
        """Whether the server has not even read what it was sent before."""
        return bool(self._frames.unsent)

    def send(self, message: Message) -> None:
        """Send, now or as soon as the server reads on. Raises :class:`ChannelError`."""
        body = encode_body(message)
        try:
            self._frames.write(body)
            self._frames.flush()
        except ChannelClosed as error:
            # A server that refuses this process sends the reason before it closes the connection.
            with suppress(ChannelClosed, ProtocolError):
                if bodies := self._frames.read():
                    self._decoded(bodies)
            raise self._lost(error) from error

    def receive(self, wait: float = 0.0) -> list[Any]:
        """Return the messages that have arrived after the welcome. Raises :class:`ChannelError`.

        With ``wait``, block up to that many seconds until anything arrives, or for less.
        """
        try:
            if self._frames.unsent:
                self._frames.flush()
            # poll(2) takes whole milliseconds, and almost one counts as one: less would end a wait early.
            if milliseconds := int(wait * 1000 + 0.05):
                self._poll.poll(milliseconds)
            elif wait > 0:
                time.sleep(min(wait, POLL_SECONDS))
            bodies = self._frames.read()
            return self._decoded(bodies) if bodies else []
        except ChannelClosed as error:
            raise self._lost(error) from error
        except ProtocolError as error:
            raise ProtocolError(f"{self._server}: {error}") from error

    def _decoded(self, bodies: list[bytes]) -> list[Any]:
        messages = [self._decode(body) for body in bodies]
        for message in messages:
            if isinstance(message, Refused):
                raise Rejected(f"{self._server} rejects this process: {message.reason}")
        if self.welcome is None:
            self.welcome = check_welcome(messages.pop(0), self._welcome, self._version)
            # Only a welcome brings one: the kernel closes those that come with later messages.
            self._frames.takes_fds = False
        return messages

    def _lost(self, error: ChannelClosed) -> ChannelClosed:
        return ChannelClosed(f"lost the connection to {self._server}: {error}")

    def take_fd(self) -> int:
        """Return the file descriptor that came with the welcome; the caller owns it.

        Raises :class:`ProtocolError` if there is none.
        """
        if not self._frames.received_fds:
            raise ProtocolError(f"{self._server} sent no file descriptor with its welcome")
        return self._frames.received_fds.pop()

    def await_welcome(self, seconds: float) -> list[Any]:
        """Block until the welcome has arrived; return what came after it. Raises :class:`ChannelError`.

        For start-up and commands only: hooks call :meth:`receive` until :attr:`welcome` is set.
        """
        deadline = time.monotonic() + seconds
        try:
            messages = self.receive()
            while self.welcome is None and (left := deadline - time.monotonic()) > 0:
                messages = self.receive(left)
        except BaseException:
            self.close()
            raise
        if self.welcome is None:
            self.close()
            raise ChannelClosed(
                f"{self._server} does not answer on {self._path}: no welcome within {seconds:g} s"
            )
        return messages

    def close(self) -> None:
        """Close the connection, and file descriptors that were not taken."""
        self._frames.close()
        while self._frames.received_fds:
            os.close(self._frames.received_fds.pop())


GREETING_SECONDS = 5.0
MIN_POLL_INTERVAL_SECONDS = 0.0001
"""Interval of :meth:`Client.poll_if_due`."""
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0


class Client(ABC, Generic[VersionedT]):
    """A connection that is replaced when it is lost.

    A slow server keeps its connection. If a connection is lost, its outstanding calls fail.
    """

    def __init__(
        self, path: Path, server: str, start: Callable[[], None] | None, logger: logging.Logger | None
    ) -> None:
        """``server``: its name for the log. ``start``: starts a server on ``path`` without blocking."""
        self.calls = Calls()
        self.waited = 0.0
        """Total seconds spent waiting for replies."""
        self._path = path
        self._server = server
        self._start = start
        self._logger = logger or logging.getLogger("kvtier")
        self._health = Health(self._logger, server)
        self._warn = RateLimitedLog(self._logger)
        self._connection: UnixConnection[VersionedT] | None = None
        self._greeting: UnixConnection[VersionedT] | None = None
        """A connection whose welcome is outstanding."""
        self._greeting_until = 0.0
        self._polled_at = 0.0
        self._retry_at = 0.0
        self._backoff = Backoff(MIN_RETRY_SECONDS, MAX_RETRY_SECONDS)

    # What a protocol adds.

    @abstractmethod
    def _open(self) -> UnixConnection[VersionedT]:
        """Connect without blocking. Raises :class:`ChannelError`."""

    @abstractmethod
    def _connected(self, connection: UnixConnection[VersionedT]) -> None:
        """Called with a connection that has its welcome. Raises :class:`ChannelError` if it is unusable."""

    @abstractmethod
    def _lost(self) -> None:
        """Called when the connection has ended. Every outstanding call has failed."""

    @abstractmethod
    def _receive(self, message: Any) -> None:  # noqa: ANN401 - a message of the protocol
        """Called for each message, before a reply settles its call. Raises :class:`ProtocolError`."""

    def expect_answers_within(self, seconds: float) -> None:
        """Set how long the server may not answer until it counts as unresponsive. 1 s by default."""
        self._health.limit = seconds

    # Connection.

    def connect(self) -> None:
        """Connect; blocks up to :data:`GREETING_SECONDS`, so not for hooks. Raises :class:`ChannelError`."""
        connection = self._open()
        self._adopt(connection, connection.await_welcome(GREETING_SECONDS))

    def _adopt(self, connection: UnixConnection[VersionedT], messages: list[Any]) -> None:
        self._connection = connection
        self._backoff.reset()
        self._health.reset()
        try:
            self._connected(connection)
        except ChannelError:
            self._drop()
            raise
        self._receive_all(messages)

    @property
    def connected(self) -> bool:
        """Whether a server is connected, as far as is known."""
        return self._connection is not None

    @property
    def connecting(self) -> bool:
        """Whether a server has been reached that has yet to welcome this client."""
        return self._greeting is not None

    @property
    def responsive(self) -> bool:
        """Whether a server is connected and answers, as far as is known."""
        return self._connection is not None and not self._health.unresponsive

    @property
    def late(self) -> bool:
        """Whether the last wait ended without a reply, and nothing has arrived since."""
        return self._health.late

    def ready(self) -> bool:
        """Return whether there is a connection; if not, take the next step towards one. Never blocks.

        Attempts are about a second apart, and up to :data:`MAX_RETRY_SECONDS` if they fail.
        """
        if self._connection is not None:
            return True
        now = time.monotonic()
        if self._greeting is None and now < self._retry_at:
            return False
        try:
            return self._advance(now)
        except ChannelError as error:
            self._warn("%s is not connected: %s", self._server, error)
            if self._greeting is not None:
                self._greeting.close()
                self._greeting = None
            self._retry_at = now + self._backoff.next()
            if self._start is not None:
                self._start()
            return False

    def _advance(self, now: float) -> bool:
        if self._greeting is None:
            self._greeting = self._open()
            self._greeting_until = now + GREETING_SECONDS
        connection = self._greeting
        messages = connection.receive()
        if connection.welcome is None:
            if now >= self._greeting_until:
                raise ChannelError(f"no welcome within {GREETING_SECONDS:g} s on {self._path}")
            return False
        self._greeting = None
        self._adopt(connection, messages)
        self._logger.info("reconnected to %s on %s", self._server, self._path)
        return self.connected

    def retry_now(self) -> None:
        """Make the next attempt to connect at once, because another client has found a server."""
        self._retry_at = 0.0

    # Receive.

    def update(self) -> None:
        """Reconnect if necessary, read what has arrived, and check the clock. Once a step; never blocks."""
        self.ready()
        self.poll()
        self._health.check(self.calls.names)

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
        if messages:
            self._receive_all(messages)

    def poll_if_due(self) -> None:
        """:meth:`poll`, unless that was just done. For callers that run once for each request."""
        if time.monotonic() - self._polled_at >= MIN_POLL_INTERVAL_SECONDS:
            self.poll()

    def _receive_all(self, messages: list[Any]) -> None:
        self._health.message_received()
        try:
            for message in messages:
                self._receive(message)
                if isinstance(message, Reply):
                    self.calls.settle(message)
        except ChannelError as error:
            self._give_up(error)

    # Send.

    @property
    def accepts_requests(self) -> bool:
        """Whether requests should be sent. Takes the next step towards a connection."""
        if self.ready() and not self.responsive:
            self.poll_if_due()
        return self.responsive and self._connection is not None and not self._connection.congested

    def send(self, message: Message) -> bool:
        """Send a message; return whether there is a connection that took it."""
        if self._connection is None:
            return False
        try:
            self._connection.send(message)
        except ChannelError as error:
            self._give_up(error)
            return False
        return True

    def call(
        self,
        name: str,
        request: Callable[[int], Request],
        reply_type: type[ReplyT],
        settle: Settle[ReplyT, ResultT],
    ) -> Call[ResultT] | None:
        """Send a request, made from its ticket; ``None`` if that fails. ``name``: a plural for the log."""
        if self._connection is None:
            return None
        self._health.request_sent(first=not self.calls)
        try:
            call = self.calls.add(name, reply_type, settle)
        except ChannelError:
            return None
        return call if self.send(request(call.ticket)) else None  # Without a connection it has failed.

    def await_reply(self, call: Call[ResultT] | None, wait: float) -> ResultT | None:
        """Return the result, blocking up to ``wait`` seconds; ``None`` if it is pending or has failed.

        Does not block while the server is late. A wait that ends without a reply makes it late.
        """
        if call is None or call.settled:
            return None if call is None else call.result
        if wait <= 0 or self._health.late:
            self.poll()
            return call.result
        idle_since = self._health.idle_since
        self.wait(lambda: call.settled, wait)
        if idle_since == self._health.idle_since and call.ticket in self.calls:
            self._health.late = True
        return call.result

    def wait(self, done: Callable[[], bool], seconds: float) -> None:
        """Block until ``done``, the connection is lost, or ``seconds`` have passed."""
        started = now = time.monotonic()
        end = started + seconds
        while self._connection is not None and not done() and now < end:
            self.poll(end - now)
            now = time.monotonic()
        self.waited += now - started

    # End.

    def _give_up(self, error: ChannelError) -> None:
        self._logger.warning("%s: continuing without it until it is back", error)
        self._drop()
        # The first attempt follows at once. The pauses are for attempts that fail.
        self._retry_at = time.monotonic()

    def _drop(self) -> None:
        if self._connection is None:
            return
        self._connection.close()
        self._connection = None
        self.calls.fail(ChannelClosed(f"the connection to {self._server} was lost"))
        self._health.reset()
        self._lost()

    def close(self) -> None:
        """Disconnect, and do not reconnect."""
        if self._greeting is not None:
            self._greeting.close()
            self._greeting = None
        self._drop()
        self._retry_at = float("inf")
