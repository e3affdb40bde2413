"""An engine's end of the bridge: synchronous, without threads, and never in the engine's way.

Everything here is called from vLLM's hooks. A cache process that is slow is not cut off: the stream keeps
its order, a late answer finds its ticket, and leases that nobody wants any longer are released then. One
that is gone costs misses, and is looked for again at most once a second.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvtier.arena import ArenaMap
from kvtier.bridge import protocol
from kvtier.bridge.protocol import (
    Abandon,
    Cancel,
    Changed,
    Clear,
    Cleared,
    Commit,
    Confirm,
    Confirmed,
    Found,
    FromCache,
    Hello,
    LookUp,
    Refused,
    Release,
    Reserve,
    Reserved,
    Status,
    StatusReport,
    Welcome,
)
from kvtier.errors import ChannelClosed, ChannelError, ProtocolError
from kvtier.keys import ChunkKey, join_keys
from kvtier.layout import ChunkLayout
from kvtier.sockets.frames import FrameReader, Message, encode

logger = logging.getLogger("kvtier")

READ_BYTES = 1 << 18
OUTBOX_BYTES = 16 << 20
"""What waits to be sent to a cache process that does not read, before it is given up."""
GREETING_SECONDS = 5.0
RESERVE_SECONDS = 0.1
CONFIRM_SECONDS = 1.0
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 30.0

AnswerT = TypeVar("AnswerT")


class Slot(NamedTuple):
    """Room in the arena: the number of the reservation, and where its chunk object begins."""

    lease: int
    offset: int


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


class _Bridge:
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


@dataclass
class Finding:
    """All that a look-up has been granted so far, in prefix order."""

    leases: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    fetching: int = 0
    answered: bool = False

    @property
    def final(self) -> bool:
        """Whether nothing more will come."""
        return self.answered and not self.fetching


class SchedulerBridge(_Bridge):
    """The scheduler's side: look up, reserve, release."""

    def __init__(self, hello: Hello, path: Path, start: Callable[[], None] | None = None) -> None:
        super().__init__(hello, path, start)
        self._findings: dict[int, Finding] = {}
        self._unwanted_reserves: set[int] = set()
        self._reserved: dict[int, Reserved] = {}
        self._cleared: dict[int, Cleared] = {}
        self._changes: list[Changed] = []
        self._in_use: set[int] = set()

    def _greeting(self) -> Hello:
        return Hello(
            self._hello.version,
            self._hello.engine,
            self._hello.role,
            self._hello.rank,
            self._hello.layout,
            self._hello.namespace,
            self._hello.changes,
            sorted(self._in_use),
            self._hello.model,
        )

    def _lost(self) -> None:
        self._findings.clear()
        self._reserved.clear()
        self._unwanted_reserves.clear()
        self._in_use.clear()

    def _receive(self, message: FromCache) -> None:
        match message:
            case Found():
                self._take_found(message)
            case Reserved():
                if message.ticket in self._unwanted_reserves:
                    self._unwanted_reserves.discard(message.ticket)
                    self.abandon([lease for lease in message.leases if lease])
                else:
                    self._reserved[message.ticket] = message
            case Cleared():
                self._cleared[message.ticket] = message
            case Changed():
                self._changes.append(message)
            case _:
                logger.debug("an answer that nobody asked for: %s", type(message).__name__)

    def _take_found(self, found: Found) -> None:
        finding = self._findings.get(found.ticket)
        if finding is None:
            # Cancelled before it was answered; the cache process is told already.
            return
        finding.leases += found.leases
        finding.offsets += found.offsets
        finding.sources += found.sources
        finding.fetching = found.fetching
        finding.answered = True
        self._in_use.update(found.leases)

    def look_up(self, keys: Sequence[ChunkKey], tokens: int) -> int | None:
        """Ask which leading chunks are held; never waits. ``None`` where there is nobody to ask."""
        if not keys or not self.ready() or (self._connection is not None and self._connection.congested):
            return None
        ticket = next(self._tickets)
        self._findings[ticket] = Finding()
        return ticket if self._send(LookUp(ticket, join_keys(keys), tokens)) else None

    def found(self, ticket: int, wait: float = 0.0) -> Finding | None:
        """What is known of a look-up; ``None`` where its cache process is gone or it was cancelled.

        With ``wait``, seconds to wait for the first answer.
        """
        finding = self._findings.get(ticket)
        if finding is None:
            return None
        if not finding.final:
            self.poll()
            if wait > 0:
                self._await(lambda: self._answered(ticket) or None, wait)
        return self._findings.get(ticket)

    def _answered(self, ticket: int) -> bool:
        finding = self._findings.get(ticket)
        return finding is None or finding.answered

    def cancel(self, ticket: int) -> None:
        """Forget a look-up and give back all that it was granted."""
        finding = self._findings.pop(ticket, None)
        if finding is not None:
            self._in_use.difference_update(finding.leases)
            self._send(Cancel(ticket))

    def take(self, ticket: int) -> None:
        """The leases of a final look-up are the caller's from now on, to be released one by one."""
        self._findings.pop(ticket, None)

    def release(self, leases: Sequence[int]) -> None:
        """Give leases back."""
        if leases:
            self._in_use.difference_update(leases)
            self._send(Release(list(leases)))

    def reserve(
        self, parent: ChunkKey, keys: Sequence[ChunkKey], last_tokens: int, seconds: float = RESERVE_SECONDS
    ) -> list[Slot | None]:
        """Room for consecutive chunks, in one round trip; ``None`` for what is held or does not fit.

        Where no answer comes in time nothing is stored, and what is granted later is given back.
        """
        nothing: list[Slot | None] = [None] * len(keys)
        if not keys or not self.ready() or (self._connection is not None and self._connection.congested):
            return nothing
        ticket = next(self._tickets)
        if not self._send(Reserve(ticket, parent, join_keys(keys), last_tokens)):
            return nothing
        answer = self._await(lambda: self._reserved.pop(ticket, None), seconds)
        if answer is None:
            self._unwanted_reserves.add(ticket)
            return nothing
        return [
            Slot(lease, offset) if lease else None
            for lease, offset in zip(answer.leases, answer.offsets, strict=True)
        ]

    def abandon(self, leases: Sequence[int]) -> None:
        """These reservations will not be filled."""
        if leases:
            self._send(Abandon(list(leases)))

    def clear(self, seconds: float) -> int | None:
        """Remove every chunk of this engine's model; how many, or ``None`` where no answer came in time."""
        if not self.ready():
            return None
        ticket = next(self._tickets)
        if not self._send(Clear(ticket)):
            return None
        answer = self._await(lambda: self._cleared.pop(ticket, None), seconds)
        return None if answer is None else answer.chunks

    def changes(self) -> list[Changed]:
        """What came into the tiers and left them since the last call."""
        changes, self._changes = self._changes, []
        return changes


class WorkerBridge(_Bridge):
    """A worker's side: the arena, confirm and commit."""

    def __init__(self, hello: Hello, path: Path, start: Callable[[], None] | None = None) -> None:
        super().__init__(hello, path, start)
        self._confirmed: dict[int, Confirmed] = {}
        self.arena: ArenaMap | None = None
        """The memory of the cache process that is, or was last, connected."""

    def _connected(self, connection: Connection) -> None:
        if self.arena is not None:
            self.arena.close()
        self.arena = connection.map_arena()

    def _lost(self) -> None:
        self._confirmed.clear()

    def _receive(self, message: FromCache) -> None:
        if isinstance(message, Confirmed):
            self._confirmed[message.ticket] = message

    def commit(self, leases: Sequence[int]) -> bool:
        """These reservations have been filled; whether that could be told."""
        return not leases or self._send(Commit(list(leases)))

    def abandon(self, leases: Sequence[int]) -> None:
        """These reservations will not be filled."""
        if leases:
            self._send(Abandon(list(leases)))

    def confirm(self, leases: Sequence[int], seconds: float = CONFIRM_SECONDS) -> bool:
        """Whether these leases stood until now; ``False`` too where no answer came in time."""
        if not leases:
            return True
        ticket = next(self._tickets)
        if not self._send(Confirm(ticket, list(leases))):
            return False
        answer = self._await(lambda: self._confirmed.pop(ticket, None), seconds)
        return answer is not None and answer.held

    def close(self) -> None:
        """Leave, and let go of the arena."""
        super().close()
        if self.arena is not None:
            self.arena.close()


def status(path: Path, seconds: float = GREETING_SECONDS) -> dict[str, Any]:
    """What a cache process holds and has done. Raises :class:`ChannelError`."""
    connection = Connection(path, Hello(protocol.VERSION, "observer", "observer", 0, ChunkLayout(1, ()), b""))
    try:
        connection.send(Status(1))
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for message in connection.receive(left):
                if isinstance(message, StatusReport):
                    report: dict[str, Any] = json.loads(message.report)
                    return report
        raise ChannelClosed(f"the cache process on {path} does not answer")
    finally:
        connection.close()
