"""A client's connection to a Unix socket, for callers without an event loop. Non-blocking by default."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic

from kvtier.errors import ChannelClosed, ProtocolError, Rejected
from kvtier.rpc.frames import Message, Refused, encode_body
from kvtier.rpc.greeting import VersionedT, check_welcome
from kvtier.rpc.wire import FrameSocket

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
