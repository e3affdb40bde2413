"""One engine's connection to its cache process: synchronous, without threads, non-blocking by default.

A cache process that is slow keeps its connection: the stream preserves order, and a late answer finds its
question. One that is gone costs misses, and ``bridge.py`` reconnects.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from pathlib import Path

from kvtier.bridge import protocol
from kvtier.bridge.protocol import FromCache, Hello, Refused, Welcome
from kvtier.errors import ChannelClosed, ChannelError, ProtocolError
from kvtier.memory.arena import ArenaMap
from kvtier.sockets.frames import FrameReader, Message, encode

logger = logging.getLogger("kvtier")

READ_BYTES = 1 << 18
OUTBOX_BYTES = 16 << 20
"""Limit of the bytes queued for a cache process that does not read; beyond it the connection is closed."""
GREETING_SECONDS = 5.0
NAP_SECONDS = 0.0001
"""How often to look where less than a millisecond is left, which is the unit of poll(2)."""


class Connection:
    """Send without blocking and queue the rest; read what has arrived. The first message is the welcome."""

    def __init__(self, path: Path, hello: Hello) -> None:
        """Connect and send ``hello``, without waiting for the welcome. Raises :class:`ChannelError`."""
        self.welcome: Welcome | None = None
        """The answer to ``hello``, once it has arrived."""
        self._path = path
        self._reader = FrameReader()
        self._outbox = bytearray()
        self._arena_fd = -1
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            # On a Unix socket this never takes time: a full backlog is an error at once (connect(2), EAGAIN).
            self._socket.setblocking(False)
            self._socket.connect(str(path))
            self._poll = select.poll()  # Not select(2), which cannot take descriptors above 1023.
            self._poll.register(self._socket, select.POLLIN)
            self.send(hello)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ChannelClosed(f"no cache process answers on {path}: {error}") from error
            raise

    def await_welcome(self, seconds: float) -> list[FromCache]:
        """Block until the welcome has arrived, and return what came after it. Raises :class:`ChannelError`.

        For start-up and commands only: a hook calls :meth:`receive` until :attr:`welcome` is there.
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
            raise ChannelClosed(f"no cache process answers on {self._path}: no welcome within {seconds:g} s")
        return messages

    def map_arena(self) -> ArenaMap:
        """Map the arena that came with the welcome; once."""
        assert self.welcome is not None
        arena_fd, self._arena_fd = self._arena_fd, -1
        return ArenaMap(arena_fd, self.welcome.arena_bytes)

    @property
    def congested(self) -> bool:
        """Whether the cache process has not even read what it was sent before."""
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
        """Return the messages that have arrived, the welcome excepted. Raises :class:`ChannelError`.

        With ``wait``, block up to that many seconds until anything arrives, or for less.
        """
        if self._outbox:
            self._flush()
        if milliseconds := int(wait * 1000 + 0.05):
            self._poll.poll(milliseconds)
        elif wait > 0:
            time.sleep(min(wait, NAP_SECONDS))
        try:
            data = self._socket.recv(READ_BYTES) if self.welcome is not None else self._receive_with_arena()
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosed(f"the cache process is gone: {error}") from error
        if not data:
            raise ChannelClosed("the cache process has closed the connection")
        messages = [protocol.decode_from_cache(body) for body in self._reader.feed(data)]
        return messages if self.welcome is not None else self._take_welcome(messages)

    def _receive_with_arena(self) -> bytes:
        data, fds, _, _ = socket.recv_fds(self._socket, READ_BYTES, 1)
        if fds:
            self._arena_fd = fds[0]
        return data

    def _take_welcome(self, messages: list[FromCache]) -> list[FromCache]:
        if not messages:
            return []
        first, *more = messages
        if isinstance(first, Refused):
            raise ChannelError(f"the cache process refuses this engine: {first.reason}")
        if not isinstance(first, Welcome) or self._arena_fd < 0:
            raise ProtocolError("the cache process did not begin with Welcome and its arena")
        self.welcome = first
        return more

    def close(self) -> None:
        """End the connection."""
        self._socket.close()
        if self._arena_fd >= 0:
            os.close(self._arena_fd)
            self._arena_fd = -1
