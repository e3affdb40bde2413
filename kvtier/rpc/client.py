"""A synchronous client on a Unix socket that reconnects, for callers that must not block.

Called from one thread. Nothing blocks but :meth:`Client.connect` and what takes a ``wait``.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic

from kvtier.concurrency.backoff import Backoff
from kvtier.errors import ChannelClosed, ChannelError
from kvtier.logs import RateLimitedLog
from kvtier.rpc.calls import Call, Calls, ReplyT, ResultT, Settle
from kvtier.rpc.frames import Message, Reply, Request
from kvtier.rpc.greeting import VersionedT
from kvtier.rpc.health import Health
from kvtier.rpc.unix import UnixConnection

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
            self._health.missed()
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
