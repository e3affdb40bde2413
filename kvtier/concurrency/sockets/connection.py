"""A blocking connection to a server, for values of many megabytes.

Values are transferred between the socket and the caller's memory without a copy: sent with one ``sendmsg``,
received with ``recvmsg_into``. Only bytes that arrive in the 4 KiB line buffer, with the preceding line, are
copied. A connection is used from worker threads, by one thread at a time. After any exception it is out of
sync with its server, and must be closed with :meth:`Connection.close`.

A conversation is a list of sends and expected replies, which native code executes. It continues while each
reply equals the expected one, byte for byte, so that no reply is parsed. At the first other reply it stops,
and the caller parses what has arrived.

Timeouts: socket(7), SO_RCVTIMEO.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from threading import Lock
from typing import Any, Final, NamedTuple, TypeAlias

from kvtier import native

Buffer: TypeAlias = bytes | memoryview
Buffers: TypeAlias = deque[memoryview]

SEND: Final = 0
"""Send all buffers, in order."""
EXPECT: Final = 1
"""Receive exactly the bytes of the only buffer."""
RECEIVE: Final = 2
"""Fill all buffers, in order."""

Operation = tuple[int, Sequence[bytes | memoryview]]

BUFFER_BYTES = 4096
"""Maximum length of a line, and of the copied part of a value."""
IOV_MAX = 1024
"""Buffers per system call; IOV_MAX of Linux."""
POLL_SECONDS = 0.1
"""How often a blocked send checks whether the other side has closed."""
KEEP_ALIVE_IDLE_SECONDS = 15
KEEP_ALIVE_INTERVAL_SECONDS = 5
KEEP_ALIVE_PROBES = 3
UNACKNOWLEDGED_SECONDS = 30

_CRLF = b"\r\n"
_TIMEVAL = struct.Struct("@ll")
_MIN_TIMEOUT = 0.001
"""A timeout of zero would mean none."""


class ProtocolViolation(ConnectionError):
    """The received data violates the protocol, or does not answer the request."""


class ClosedUnanswered(ConnectionResetError):
    """A TLS server closed the connection before it sent any data: it may have rejected the client.

    With TLS 1.3, a server rejects a certificate after the client's handshake, and its alert may be lost.
    """


class Progress(NamedTuple):
    """How far a conversation has been executed."""

    operations: int
    """Number of completed operations. The conversation is complete if that is all of them."""
    received: int = 0
    """Bytes received of the next one, if that is to receive."""
    error: OSError | None = None
    """Why it has stopped; ``None`` if it is complete, and after an unexpected reply."""

    def after(self, operations: int) -> Progress:
        """Return the progress without the first ``operations``."""
        return self._replace(operations=self.operations - operations)


class Deadline:
    """Deadline of a batch, shared by its threads and connections. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds
        self._lock = Lock()
        self._is_expired = False
        self._connections: set[Connection] = set()

    @property
    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(self._at - time.monotonic(), 0.0)

    def remaining(self) -> float:
        """Return the seconds left. Raises ``TimeoutError`` past the deadline, or after :meth:`expire`."""
        left = self._at - time.monotonic()
        if self._is_expired or left <= 0:
            raise TimeoutError("no answer in time")
        return max(left, _MIN_TIMEOUT)

    @contextmanager
    def bounds(self, connection: Connection) -> Iterator[None]:
        """Apply this deadline to ``connection`` within the block."""
        connection.deadline = self
        with self._lock:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)

    def expire(self) -> None:
        """Expire now, and wake threads that wait for a connection. Does not block. Idempotent."""
        with self._lock:
            self._is_expired = True
            for connection in self._connections:
                connection.interrupt()


class Connection:
    """A connection over TCP or a Unix socket. Calls block until :attr:`deadline` at most.

    All raise ``OSError``: :class:`TimeoutError` past the deadline, :class:`ProtocolViolation` on bad data.
    """

    def __init__(self, family: int) -> None:
        self.deadline = Deadline(0)
        self.in_sync = True
        """False if a reply was left partly unread. Close the connection then."""
        self.is_plain = True
        """Whether the socket is unencrypted, so that native code may use it directly; false for TLS."""
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self.scratch = bytearray(BUFFER_BYTES)
        """The receive buffer."""
        self._buffer_view = memoryview(self.scratch)
        self._start = self._stop = 0

    def connect(self, address: Any) -> None:  # noqa: ANN401 - what socket.connect takes
        """Connect to a resolved address of the socket's family."""
        self._socket.settimeout(self.deadline.remaining())
        self._socket.connect(address)
        if self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._set_up()

    def close(self) -> None:
        """Close the socket. Does not block. Idempotent."""
        self._socket.close()

    def detach(self) -> socket.socket:
        """Return the socket, which the caller owns from now on. This connection is unusable afterwards.

        Raises :class:`ProtocolViolation` if unread data is buffered.
        """
        if self.buffered:
            raise ProtocolViolation("the server sent unexpected data")
        return self._socket

    def interrupt(self) -> None:
        """Shut the socket down from another thread, which wakes the thread that waits for it."""
        interrupt(self._socket)

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    @property
    def buffered(self) -> bool:
        """Whether received data is buffered and unread."""
        return self._start < self._stop

    def is_idle(self) -> bool:
        """Return whether the socket has no unread data or EOF, so that the connection can be reused."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not self.buffered and not poll.poll(0)

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send the buffers in order, without copying them."""
        rest = to_buffers(buffers)
        while rest:
            advance(rest, self._send_some(first_buffers(rest)))

    def line(self) -> bytes:
        """Read a line, and return it without its CRLF."""
        while (end := self.scratch.find(_CRLF, self._start, self._stop)) < 0:
            self.fill()
        line = bytes(self._buffer_view[self._start : end])
        self._start = end + len(_CRLF)
        return line

    def fill(self, limit: int = BUFFER_BYTES) -> None:
        """Read at least one byte and at most ``limit`` bytes into the free end of the buffer."""
        if self._start:
            held = self._buffer_view[self._start : self._stop]
            self._buffer_view[: len(held)] = held
            self._start, self._stop = 0, len(held)
        if self._stop == BUFFER_BYTES:
            raise ProtocolViolation("a reply line is too long")
        self._stop += self._receive_some([self._buffer_view[self._stop : self._stop + limit]], 0)

    def take(self, view: memoryview) -> None:
        """Fill ``view`` from the buffer first, then directly from the socket."""
        held = min(self._stop - self._start, len(view))
        view[:held] = self._buffer_view[self._start : self._start + held]
        self._start += held
        while held < len(view):
            held += self._receive_some([view[held:]], socket.MSG_WAITALL)

    def read(self, length: int) -> bytes:
        """Read exactly ``length`` bytes."""
        data = bytearray(length)
        self.take(memoryview(data))
        return bytes(data)

    def receive_some(self, views: Sequence[memoryview]) -> int:
        """Receive into the views in order, without copying, and return the number of bytes.

        At least one byte; all that fit where the kernel supports waiting for them.
        """
        if not self.buffered:
            return self._receive_some(views, socket.MSG_WAITALL)
        held = min(self._stop - self._start, len(views[0]))
        self.take(views[0][:held])
        return held

    def exchange(self, operations: Sequence[Operation]) -> Progress:
        """Execute operations until one fails or receives unexpected data. Blocks; raises nothing.

        Unexpected data stays :attr:`buffered`, to be read next. Expected data is at most
        :data:`BUFFER_BYTES` long. Runs in native code without the GIL, if available.
        """
        if self.buffered or not native.available():
            return self._exchange_in_python(operations)
        try:
            seconds = self.deadline.remaining()
        except TimeoutError as error:
            return Progress(0, 0, error.with_traceback(None))
        ended = native.core.exchange(self._socket.fileno(), operations, self.scratch, seconds)
        progress = progress_of(*ended)
        if operations[progress.operations :] and operations[progress.operations][0] == EXPECT:
            self.put_back(progress.received)
        return progress

    def put_back(self, received: int) -> None:
        """Mark the first ``received`` bytes of :attr:`scratch` as unread."""
        self._start, self._stop = 0, received

    def unread(self, data: bytes | bytearray) -> None:
        """Buffer up to :data:`BUFFER_BYTES` to be read next. Requires that nothing is :attr:`buffered`."""
        self._buffer_view[: len(data)] = data
        self.put_back(len(data))

    def _exchange_in_python(self, operations: Sequence[Operation]) -> Progress:
        done = received = 0
        try:
            for kind, buffers in operations:
                received = 0
                if kind == SEND:
                    self.send(buffers)
                elif kind == EXPECT:
                    if not self._is_next(buffers[0]):
                        break
                else:
                    rest = to_buffers(buffers)
                    while rest:
                        moved = self.receive_some(first_buffers(rest))
                        received += moved
                        advance(rest, moved)
                done += 1
        except OSError as error:
            # The traceback holds views of the caller's memory, which must not outlive this call.
            return Progress(done, received, error.with_traceback(None))
        return Progress(done)

    def _is_next(self, expected: Buffer) -> bool:
        """Consume ``expected`` if it comes next. Otherwise leave the data buffered."""
        while (held := min(self._stop - self._start, len(expected))) < len(expected):
            if self._buffer_view[self._start : self._stop] != expected[:held]:
                return False
            self.fill(len(expected) - held)
        if self._buffer_view[self._start : self._start + held] != expected:
            return False
        self._start += held
        return True

    def keep_alive(self) -> None:
        """Enable TCP keep-alive; see :func:`keep_alive`. Call once connected."""
        keep_alive(self._socket)

    def _set_up(self) -> None:
        # Blocking, so that MSG_WAITALL waits for all bytes; SO_RCVTIMEO sets the timeout.
        self._socket.settimeout(None)

    def _send_some(self, buffers: Sequence[Buffer]) -> int:
        while True:
            milliseconds = math.ceil(self.deadline.remaining() * 1000)
            try:
                return self._socket.sendmsg(buffers, [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait_until_writable(milliseconds)

    def _wait_until_writable(self, milliseconds: int) -> None:
        # A blocking send does not notice that the other side closed while its receive window was full.
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT | select.POLLRDHUP)
        ready = poll.poll(milliseconds)
        if not ready:
            raise TimeoutError("timed out sending: the server reads nothing")
        if not ready[0][1] & select.POLLOUT:
            raise ConnectionResetError("the server closed the connection")

    def _receive_some(self, views: Sequence[memoryview], flags: int) -> int:
        whole, part = divmod(self.deadline.remaining(), 1)
        time_left = _TIMEVAL.pack(int(whole), int(part * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, time_left)
        try:
            received, *_ = self._socket.recvmsg_into(views, 0, flags)
        except BlockingIOError:
            raise TimeoutError("no answer in time") from None
        return unless_closed(received)


class TLSConnection(Connection):
    """A connection over TLS, which transfers at most one record of 16 KiB per call."""

    def __init__(self, family: int, context: ssl.SSLContext, server_name: str) -> None:
        super().__init__(family)
        self.is_plain = False
        # Wrapped before it connects, because ``interrupt`` must never see another socket.
        self._secured = self._socket = context.wrap_socket(
            self._socket, server_hostname=server_name, do_handshake_on_connect=False
        )
        self._is_answered = False
        self._alert: ssl.SSLError | None = None

    def exchange(self, operations: Sequence[Operation]) -> Progress:
        """See :meth:`Connection.exchange`."""
        return self._exchange_in_python(operations)

    def _set_up(self) -> None:
        self._secured.settimeout(self.deadline.remaining())
        try:
            self._secured.do_handshake()
        except ConnectionError:
            raise self._closed() from None

    def _send_some(self, buffers: Sequence[Buffer]) -> int:
        # Joined, because one TLS record per buffer would inflate small commands.
        data = b"".join(buffers) if sum(map(len, buffers)) <= BUFFER_BYTES else buffers[0]
        while True:
            self._socket.settimeout(min(self.deadline.remaining(), POLL_SECONDS))
            try:
                return self._socket.send(data)
            except TimeoutError:
                if peer_closed(self._socket.fileno()):
                    raise self._closed() from None
            except (ConnectionError, ssl.SSLEOFError):
                raise self._closed() from None

    def _receive_some(self, views: Sequence[memoryview], flags: int) -> int:
        if self._alert is not None:
            raise copy(self._alert)
        self._socket.settimeout(self.deadline.remaining())
        try:
            received = unless_closed(self._socket.recv_into(views[0]))
        except (ConnectionError, ssl.SSLEOFError):
            raise self._closed() from None
        except ssl.SSLError as error:
            # OpenSSL reports an alert once. Afterwards the connection is merely closed. Copied without the
            # traceback, which holds the view.
            self._alert = copy(error)
            raise
        self._is_answered = True
        return received

    def _closed(self) -> ConnectionResetError:
        kind = ConnectionResetError if self._is_answered else ClosedUnanswered
        return kind("the server closed the connection")


def keep_alive(connected: socket.socket) -> None:
    """Make the kernel detect a dead peer within half a minute, on idle and busy connections.

    Probes after 15 idle seconds, and fails on unacknowledged data. tcp(7), TCP_USER_TIMEOUT.
    """
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, KEEP_ALIVE_IDLE_SECONDS),
        (socket.TCP_KEEPINTVL, KEEP_ALIVE_INTERVAL_SECONDS),
        (socket.TCP_KEEPCNT, KEEP_ALIVE_PROBES),
        (socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_SECONDS * 1000),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


def interrupt(connected: socket.socket) -> None:
    """Shut a socket down, which wakes the thread or task that waits for it. Thread-safe."""
    with suppress(OSError):
        # Not SSLSocket.shutdown, which would drop TLS: later calls would send plain text.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def unless_closed(received: int) -> int:
    """Return ``received``. Raises ``ConnectionResetError`` if it is 0."""
    if not received:
        raise ConnectionResetError("the other side closed the connection")
    return received


def peer_closed(fd: int) -> bool:
    """Return whether the other side has closed without reading all sent data. Does not block.

    A sender does not notice this while the receive window is full, and would wait forever.
    """
    poll = select.poll()
    poll.register(fd, select.POLLOUT | select.POLLRDHUP)
    events = poll.poll(0)
    return bool(events) and not events[0][1] & select.POLLOUT


def progress_of(operations: int, moved: int, number: int) -> Progress:
    """Convert the result of native code."""
    return Progress(operations, moved, _error_of(number) if number else None)


def _error_of(number: int) -> OSError:
    if number == errno.ETIMEDOUT:
        return TimeoutError("no answer in time")
    if number == errno.ESHUTDOWN:
        return ConnectionResetError("the server closed the connection")
    return OSError(number, os.strerror(number))


def to_buffers(buffers: Iterable[bytes | memoryview]) -> Buffers:
    """Return views of the non-empty buffers, to be consumed with :func:`advance`."""
    return deque(memoryview(buffer) for buffer in buffers if buffer)


def first_buffers(buffers: Buffers) -> list[memoryview]:
    """Return the leading buffers, as many as one system call takes."""
    return [buffers[index] for index in range(min(len(buffers), IOV_MAX))]


def split_runs(buffers: Iterable[memoryview], length: int) -> list[Buffers]:
    """Split buffers into runs of ``length`` bytes; the last may be shorter. No buffers give one empty run."""
    runs: list[Buffers] = [deque()]
    room = length
    for buffer in buffers:
        left = buffer
        while left:
            if not room:
                runs.append(deque())
                room = length
            runs[-1].append(left[:room])
            room -= len(runs[-1][-1])
            left = left[len(runs[-1][-1]) :]
    return runs


def advance(buffers: Buffers, moved: int) -> None:
    """Drop the first ``moved`` bytes."""
    while buffers and moved >= len(buffers[0]):
        moved -= len(buffers.popleft())
    if moved:
        buffers[0] = buffers[0][moved:]
