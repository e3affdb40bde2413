"""One engine's connection to its cache process: made, lost, and looked for again. Synchronous, no threads.

A cache process that is slow is not cut off: the stream keeps its order, and a late answer finds its ticket.
One that is gone costs misses, and is looked for again at most once a second.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvtier.arena import ArenaMap
from kvtier.bridge import protocol
from kvtier.bridge.protocol import FromCache, Hello, Refused, Welcome
from kvtier.errors import ChannelClosed, ChannelError, ProtocolError
from kvtier.sockets.frames import FrameReader, Message, encode

logger = logging.getLogger("kvtier")

READ_BYTES = 1 << 18
OUTBOX_BYTES = 16 << 20
"""What waits to be sent to a cache process that does not read, before it is given up."""
GREETING_SECONDS = 5.0
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 30.0

AnswerT = TypeVar("AnswerT")


class Connection:
    """One greeted connection. Sends what it can at once and keeps the rest; reads only what is there."""

    def __init__(self, path: Path, hello: Hello) -> None:
        """Connect and greet. Raises :class:`ChannelError` where nobody answers, or refuses."""
        self._reader = FrameReader()
        self._outbox = bytearray()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(GREETING_SECONDS)
            self._socket.connect(str(path))
            self._socket.sendall(encode(hello))
            self.welcome, self._arena_fd = self._await_welcome()
            self._socket.setblocking(False)
        except BaseException as error:
            self._socket.close()
            if isinstance(error, OSError):
                raise ChannelClosed(f"no cache process answers on {path}: {error}") from error
            raise

    def _await_welcome(self) -> tuple[Welcome, int]:
        arena_fd = -1
        while True:
            data, fds, _, _ = socket.recv_fds(self._socket, READ_BYTES, 1)
            if not data:
                raise ChannelClosed("the cache process has closed the connection")
            arena_fd = fds[0] if fds else arena_fd
            for body in self._reader.feed(data):
                message = protocol.decode_from_cache(body)
                if isinstance(message, Refused):
                    raise ChannelError(f"the cache process refuses this engine: {message.reason}")
                if not isinstance(message, Welcome) or arena_fd < 0:
                    raise ProtocolError("the cache process did not begin with Welcome and its arena")
                return message, arena_fd

    def map_arena(self) -> ArenaMap:
        """Map the arena that came with the welcome; once."""
        arena_fd, self._arena_fd = self._arena_fd, -1
        return ArenaMap(arena_fd, self.welcome.arena_bytes)

    @property
    def congested(self) -> bool:
        """Whether the cache process has not even taken what it was sent before."""
        return bool(self._outbox)

    def send(self, message: Message) -> None:
        """Send, now or as soon as the cache process reads on. Raises :class:`ChannelClosed`."""
        self._outbox += encode(message)
        if len(self._outbox) > OUTBOX_BYTES:
            raise ChannelClosed("the cache process has not read for too long")
        self._flush()

    def _flush(self) -> None:
        while self._outbox:
            try:
                sent = self._socket.send(self._outbox)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(f"the cache process is gone: {error}") from error
            del self._outbox[:sent]

    def receive(self, wait: float = 0.0) -> list[FromCache]:
        """What has come; with ``wait``, seconds to wait for anything at all. Raises :class:`ChannelError`."""
        if self._outbox:
            self._flush()
        if wait > 0:
            select.select([self._socket], [], [], wait)
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosed(f"the cache process is gone: {error}") from error
        if not data:
            raise ChannelClosed("the cache process is gone")
        return [protocol.decode_from_cache(body) for body in self._reader.feed(data)]

    def close(self) -> None:
        """End the connection."""
        self._socket.close()
        if self._arena_fd >= 0:
            os.close(self._arena_fd)
            self._arena_fd = -1


class Bridge:
    """What scheduler and worker have in common: a connection that is looked for again when it is lost."""

    def __init__(self, hello: Hello, path: Path, start: Callable[[], None] | None = None) -> None:
        """Connect, or raise :class:`ChannelError`.

        ``start`` starts a cache process on ``path`` without waiting for it; it is called where none
        answers after this one is lost.
        """
        self._hello = hello
        self._path = path
        self._start = start
        self._tickets = itertools.count(1)
        self._connection: Connection | None = None
        self._retry_at = 0.0
        self._retry_seconds = FIRST_RETRY_SECONDS
        self.welcome: Welcome | None = None
        """The last greeting; its epoch tells one cache process from the next."""

    def connect(self) -> None:
        """Connect now. Raises :class:`ChannelError`."""
        connection = Connection(self._path, self._greeting())
        self._connection = connection
        self.welcome = connection.welcome
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._connected(connection)

    def _greeting(self) -> Hello:
        return self._hello

    def _connected(self, connection: Connection) -> None:
        """A connection stands."""

    def _lost(self) -> None:
        """A connection is gone, and with it every answer that was still to come."""

    def _receive(self, message: FromCache) -> None:
        """A message has come."""

    @property
    def connected(self) -> bool:
        """Whether there is a cache process, as far as is known."""
        return self._connection is not None

    @property
    def epoch(self) -> int:
        """The cache process that is connected; 0 for none."""
        return self.welcome.epoch if self.welcome is not None and self.connected else 0

    def ready(self) -> bool:
        """Whether there is a connection now; tries to make one, at most once a second, without waiting."""
        if self._connection is not None:
            return True
        now = time.monotonic()
        if now < self._retry_at:
            return False
        try:
            self.connect()
        except ChannelError as error:
            logger.debug("%s", error)
            self._retry_at = now + self._retry_seconds
            self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)
            if self._start is not None:
                self._start()
            return False
        logger.info("connected to the cache process on %s again", self._path)
        return True

    def poll(self, wait: float = 0.0) -> None:
        """Take in what has come, waiting up to ``wait`` seconds for it."""
        if self._connection is None:
            return
        try:
            messages = self._connection.receive(wait)
        except ChannelError as error:
            self._give_up(error)
            return
        for message in messages:
            if isinstance(message, Refused):
                self._give_up(ChannelError(f"the cache process refuses this engine: {message.reason}"))
                return
            self._receive(message)

    def _send(self, message: Message) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.send(message)
        except ChannelError as error:
            self._give_up(error)
            return False
        return True

    def _await(self, done: Callable[[], AnswerT | None], seconds: float) -> AnswerT | None:
        """Poll until ``done`` has an answer; ``None`` where it has none in time."""
        deadline = time.monotonic() + seconds
        while self._connection is not None:
            answer = done()
            left = deadline - time.monotonic()
            if answer is not None or left <= 0:
                return answer
            self.poll(left)
        return None

    def _give_up(self, error: ChannelError) -> None:
        logger.warning("%s: going on without a cache until it is back", error)
        self._drop()
        self._retry_at = time.monotonic()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._lost()

    def close(self) -> None:
        """Leave; what this engine held ends with its last connection."""
        self._drop()
        self._retry_at = float("inf")
