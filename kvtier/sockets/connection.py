"""One blocking connection to a server, made for values of many megabytes.

A value goes between the socket and the caller's memory without a copy: out with one ``sendmsg`` of all that
is to be sent, in with ``recv_into`` the memory, but for what a buffer of 4 KiB had already taken in with
the line before it. Used from worker threads, each connection by one of them at a time. After any exception
a connection is out of step with its server and good for nothing but :meth:`Connection.close`.

Time-outs: socket(7), SO_RCVTIMEO.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, TypeAlias

from kvtier import native
from kvtier.sockets.buffers import advance, buffers_of, first_of
from kvtier.sockets.conversation import EXPECT, SEND, Operation, Progress, progress_of
from kvtier.sockets.waiting import MOMENT_SECONDS, has_left

Buffer: TypeAlias = bytes | memoryview

BUFFER_BYTES = 4096
"""The longest line that is accepted, and the most of a value that is copied."""
KEEP_ALIVE_IDLE_SECONDS = 15
KEEP_ALIVE_INTERVAL_SECONDS = 5
KEEP_ALIVE_PROBES = 3
UNACKNOWLEDGED_SECONDS = 30

_CRLF = b"\r\n"
_TIMEVAL = struct.Struct("@ll")
_SHORTEST_WAIT = 0.001
"""A time-out of zero would mean none."""


class ProtocolViolation(ConnectionError):
    """What came over the connection is not the protocol, or no answer to what was asked."""


class Deadline:
    """Until when a batch may last, whichever threads and connections work on it. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds
        self._lock = Lock()
        self._is_cut = False
        self._connections: set[Connection] = set()

    @property
    def left(self) -> float:
        """Seconds left; none where there are not any."""
        return max(self._at - time.monotonic(), 0.0)

    def remaining(self) -> float:
        """Seconds left. Raises ``TimeoutError`` where there are none, or the batch was cut short."""
        left = self._at - time.monotonic()
        if self._is_cut or left <= 0:
            raise TimeoutError("no answer in time")
        return max(left, _SHORTEST_WAIT)

    @contextmanager
    def bounds(self, connection: Connection) -> Iterator[None]:
        """While this lasts, ``connection`` obeys this deadline."""
        connection.deadline = self
        with self._lock:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)

    def cut_short(self) -> None:
        """It is over now: who waits for a connection is woken. Does not block; harmless when repeated."""
        with self._lock:
            self._is_cut = True
            for connection in self._connections:
                connection.interrupt()


class Connection:
    """A connection over TCP or a Unix socket. Each call blocks until the deadline that is set, at most.

    All raise ``OSError``: :class:`TimeoutError` past the deadline, :class:`ProtocolViolation` for garbage.
    """

    def __init__(self, family: int) -> None:
        self.deadline = Deadline(0)
        self.in_step = True
        """False where the rest of a reply was left unread: close it."""
        self.is_plain = True
        """Whether what is sent is what goes over the socket, so that others may send for it."""
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._buffer = bytearray(BUFFER_BYTES)
        self._buffer_view = memoryview(self._buffer)
        self._start = self._stop = 0

    def connect(self, address: Any) -> None:  # noqa: ANN401 - what socket.connect takes
        """Connect to an address of the socket's family, for which no name has to be looked up."""
        self._socket.settimeout(self.deadline.remaining())
        self._socket.connect(address)
        if self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._set_up()

    def close(self) -> None:
        """Let go of the socket. Does not block; harmless when repeated."""
        self._socket.close()

    def detach(self) -> socket.socket:
        """The socket, which is the caller's from now on; this connection is good for nothing any more.

        Raises :class:`ProtocolViolation` where something has come that nobody took.
        """
        if self.buffered:
            raise ProtocolViolation("the server says more than it was asked for")
        return self._socket

    def interrupt(self) -> None:
        """Wake the thread that waits for this connection, from another thread: it finds it closed."""
        with suppress(OSError):
            # Not the method of an SSLSocket, which would go on in the clear.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    @property
    def scratch(self) -> bytearray:
        """What holds that which has come and was not taken."""
        return self._buffer

    @property
    def buffered(self) -> bool:
        """Whether something has come that was not yet taken."""
        return self._start < self._stop

    def is_idle(self) -> bool:
        """Whether nothing has come that nobody asked for, such as the news that the server closed it."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not self.buffered and not poll.poll(0)

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send the buffers one after the other, none of them copied."""
        rest = buffers_of(buffers)
        while rest:
            advance(rest, self._send_some(first_of(rest)))

    def line(self) -> bytes:
        """What comes before the next end of line, without it."""
        while (end := self._buffer.find(_CRLF, self._start, self._stop)) < 0:
            self.fill()
        line = bytes(self._buffer_view[self._start : end])
        self._start = end + len(_CRLF)
        return line

    def fill(self, most: int = BUFFER_BYTES) -> None:
        """Read what there is into the free end of the buffer: at least one byte, and ``most`` at most."""
        if self._start:
            held = self._buffer_view[self._start : self._stop]
            self._buffer_view[: len(held)] = held
            self._start, self._stop = 0, len(held)
        if self._stop == BUFFER_BYTES:
            raise ProtocolViolation("a line of a reply has no end")
        self._stop += self._receive_some(self._buffer_view[self._stop : self._stop + most], 0)

    def take(self, view: memoryview) -> None:
        """Fill ``view``, from the buffer first, then straight from the socket."""
        held = min(self._stop - self._start, len(view))
        view[:held] = self._buffer_view[self._start : self._start + held]
        self._start += held
        while held < len(view):
            held += self._receive_some(view[held:], socket.MSG_WAITALL)

    def receive_some(self, views: Sequence[memoryview]) -> int:
        """Fill the views one after the other with what comes: how many bytes that were.

        At least one; all that fit where the kernel can wait for them. Nothing is copied.
        """
        if not self.buffered:
            return self._receive_some_into(views)
        held = min(self._stop - self._start, len(views[0]))
        self.take(views[0][:held])
        return held

    def exchange(self, operations: Sequence[Operation]) -> Progress:
        """Carry a conversation out, as far as it goes. Blocks; raises nothing.

        What came and was not expected is :attr:`buffered`, to be taken next. What is expected is no longer
        than :data:`BUFFER_BYTES`. Native code does this without the GIL, where it is there.
        """
        if self.buffered or not native.available():
            return self._exchange_here(operations)
        try:
            seconds = self.deadline.remaining()
        except TimeoutError as error:
            return Progress(0, 0, error.with_traceback(None))
        ended = native.core.exchange(self._socket.fileno(), operations, self._buffer, seconds)
        progress = progress_of(*ended)
        if operations[progress.operations :] and operations[progress.operations][0] == EXPECT:
            self.put_back(progress.received)
        return progress

    def put_back(self, received: int) -> None:
        """So many bytes lie in :attr:`scratch` that nobody has taken."""
        self._start, self._stop = 0, received

    def unread(self, data: bytes | bytearray) -> None:
        """Have this come next, at most :data:`BUFFER_BYTES`. Where nothing is :attr:`buffered`."""
        self._buffer_view[: len(data)] = data
        self.put_back(len(data))

    def _exchange_here(self, operations: Sequence[Operation]) -> Progress:
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
                    rest = buffers_of(buffers)
                    while rest:
                        moved = self.receive_some(first_of(rest))
                        received += moved
                        advance(rest, moved)
                done += 1
        except OSError as error:
            # Where it was raised there are views, which nobody is to hold any longer.
            return Progress(done, received, error.with_traceback(None))
        return Progress(done)

    def _is_next(self, wanted: Buffer) -> bool:
        """Take what is wanted, where that is what comes. Else it stays."""
        while (held := min(self._stop - self._start, len(wanted))) < len(wanted):
            if self._buffer_view[self._start : self._stop] != wanted[:held]:
                return False
            self.fill(len(wanted) - held)
        if self._buffer_view[self._start : self._start + held] != wanted:
            return False
        self._start += held
        return True

    def keep_alive(self) -> None:
        """Have the kernel find out that the other side is gone. Once it is connected."""
        keep_alive(self._socket)

    def _set_up(self) -> None:
        # Blocking, so that MSG_WAITALL waits for all; how long is said by SO_RCVTIMEO.
        self._socket.settimeout(None)

    def _send_some(self, buffers: Sequence[Buffer]) -> int:
        while True:
            milliseconds = math.ceil(self.deadline.remaining() * 1000)
            try:
                return self._socket.sendmsg(buffers, [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait_until_writable(milliseconds)

    def _wait_until_writable(self, milliseconds: int) -> None:
        # A call that blocks does not see that the other side has closed while its window was shut.
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT | select.POLLRDHUP)
        ready = poll.poll(milliseconds)
        if not ready:
            raise TimeoutError("the server takes nothing in")
        if not ready[0][1] & select.POLLOUT:
            raise ConnectionResetError("the server closed the connection")

    def _receive_some(self, view: memoryview, flags: int) -> int:
        self._set_timeout()
        try:
            received = self._socket.recv_into(view, len(view), flags)
        except BlockingIOError:
            raise TimeoutError("no answer in time") from None
        return _unless_closed(received)

    def _receive_some_into(self, views: Sequence[memoryview]) -> int:
        self._set_timeout()
        try:
            received, *_ = self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("no answer in time") from None
        return _unless_closed(received)

    def _set_timeout(self) -> None:
        whole, part = divmod(self.deadline.remaining(), 1)
        time_left = _TIMEVAL.pack(int(whole), int(part * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, time_left)


class TLSConnection(Connection):
    """A connection over TLS, which moves at most one record of 16 KiB with each call."""

    def __init__(self, family: int, context: ssl.SSLContext, server_name: str) -> None:
        super().__init__(family)
        self.is_plain = False
        # Before it is connected: who interrupts this connection must never meet another socket.
        self._secured = self._socket = context.wrap_socket(
            self._socket, server_hostname=server_name, do_handshake_on_connect=False
        )

    def exchange(self, operations: Sequence[Operation]) -> Progress:
        """See :meth:`Connection.exchange`."""
        return self._exchange_here(operations)

    def _set_up(self) -> None:
        self._secured.settimeout(self.deadline.remaining())
        self._secured.do_handshake()

    def _send_some(self, buffers: Sequence[Buffer]) -> int:
        # A record each would make small commands large.
        data = b"".join(buffers) if sum(map(len, buffers)) <= BUFFER_BYTES else buffers[0]
        while True:
            self._socket.settimeout(min(self.deadline.remaining(), MOMENT_SECONDS))
            try:
                return self._socket.send(data)
            except TimeoutError:
                if has_left(self._socket.fileno()):
                    raise ConnectionResetError("the server closed the connection") from None

    def _receive_some(self, view: memoryview, flags: int) -> int:
        self._socket.settimeout(self.deadline.remaining())
        return _unless_closed(self._socket.recv_into(view))

    def _receive_some_into(self, views: Sequence[memoryview]) -> int:
        return self._receive_some(views[0], 0)


def keep_alive(connected: socket.socket) -> None:
    """Have the kernel find out within half a minute that the other side is gone, idle or not.

    Asks after 15 seconds of silence, and gives up what is not acknowledged. tcp(7), TCP_USER_TIMEOUT.
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


def _unless_closed(received: int) -> int:
    if not received:
        raise ConnectionResetError("the server closed the connection")
    return received
