"""A socket that the event loop polls and worker threads transfer bytes over, never both at once.

Timeouts: socket(7), SO_SNDTIMEO.
"""

from __future__ import annotations

import errno
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from kvtier import native
from kvtier.concurrency.sockets.connection import (
    POLL_SECONDS,
    SEND,
    Buffers,
    advance,
    first_buffers,
    interrupt,
    progress_of,
    unless_closed,
)
from kvtier.concurrency.sockets.executor import IoExecutor, finished, until_readable, until_writable

_TIMEVAL = struct.pack("@ll", 0, int(POLL_SECONDS * 1e6))
_TLS_BYTES = 1 << 18
"""Size of one TLS write. A write that TLS did not accept must be retried unchanged."""
_NOTHING = bytearray()

Step = tuple[int, Buffers]
"""An operation of :mod:`kvtier.concurrency.sockets.connection`, and its remaining buffers."""


class Stream:
    """A plain socket. It is in blocking mode; calls from the event loop pass ``MSG_DONTWAIT``."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.settimeout(None)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL)

    def interrupt(self) -> None:
        """Shut the socket down, which wakes the thread or task that waits for it. Thread-safe."""
        interrupt(self._socket)

    # Called from the event loop.

    async def receive(self, limit: int) -> bytes:
        """Return 1 to ``limit`` bytes, or none if the peer closed the connection. Raises ``OSError``."""
        while True:
            try:
                return self._socket.recv(limit, socket.MSG_DONTWAIT)
            except BlockingIOError:
                await until_readable(self._socket.fileno())

    def move_now(self, step: Step) -> bool:
        """Transfer as much of a step as possible without blocking. Raises ``OSError``.

        ``False`` if this stream can be used from a thread only.
        """
        kind, buffers = step
        with suppress(BlockingIOError):
            while buffers:
                next_buffers = first_buffers(buffers)
                if kind == SEND:
                    moved = self._socket.sendmsg(next_buffers, [], socket.MSG_DONTWAIT)
                else:
                    moved = unless_closed(self._socket.recvmsg_into(next_buffers, 0, socket.MSG_DONTWAIT)[0])
                advance(buffers, moved)
        return True

    async def until_possible(self, step: Step) -> None:
        """Wait until the socket is ready for the step. Raises ``OSError`` if the connection is lost."""
        if step[0] == SEND:
            await until_writable(self._socket.fileno())
        else:
            await until_readable(self._socket.fileno())

    async def move(self, steps: deque[Step], executor: IoExecutor) -> OSError | None:
        """Run steps in a thread for at most ``POLL_SECONDS``. Completed ones are removed from ``steps``.

        Return the error that broke the connection, if any. If cancelled, interrupt the socket, and release
        the memory before returning.
        """
        if not native.available():
            return await self._move_in_thread(steps, executor)
        operations = [(kind, list(buffers)) for kind, buffers in steps]
        ended = executor.start(self._socket.fileno(), operations, _NOTHING, POLL_SECONDS)
        # A cancelled task may keep this frame, and with it the views, longer than the leases.
        del operations
        done, moved, number = await finished(ended, self.interrupt)
        for _ in range(done):
            steps.popleft()
        if steps:
            advance(steps[0][1], moved)
        return None if number == errno.ETIMEDOUT else progress_of(done, moved, number).error

    async def _move_in_thread(self, steps: deque[Step], executor: IoExecutor) -> OSError | None:
        errors: list[OSError | None] = []
        await finished(executor.threads(lambda: errors.append(self._move_blocking(steps))), self.interrupt)
        return errors[0]

    # Called from a worker thread.

    def _move_blocking(self, steps: deque[Step]) -> OSError | None:
        # Bounded, so that other connections get the thread.
        until = time.monotonic() + POLL_SECONDS
        try:
            while steps and time.monotonic() < until:
                kind, buffers = steps[0]
                if not buffers:
                    steps.popleft()
                elif moved := (self._send_some if kind == SEND else self._receive_some)(
                    first_buffers(buffers)
                ):
                    advance(buffers, moved)
                else:
                    break
        except OSError as error:
            # The traceback refers to views, and would keep them longer than the leases.
            return error.with_traceback(None)
        return None

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        """Send for at most ``POLL_SECONDS``, and return the number of bytes sent."""
        try:
            return self._socket.sendmsg(buffers)
        except BlockingIOError:
            return 0

    def _receive_some(self, views: Sequence[memoryview]) -> int:
        try:
            return unless_closed(self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0])
        except BlockingIOError:
            return 0


class TLSStream(Stream):
    """A TLS socket. It is non-blocking; in worker threads ``ssl`` waits for it with a timeout."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._socket = self._secured = connected
        connected.settimeout(0)

    async def receive(self, limit: int) -> bytes:
        """See :meth:`Stream.receive`."""
        self._secured.settimeout(0)
        while True:
            try:
                return self._secured.recv(limit)
            except ssl.SSLWantReadError:
                await until_readable(self._secured.fileno())
            except ssl.SSLWantWriteError:
                await until_writable(self._secured.fileno())

    def move_now(self, step: Step) -> bool:
        """Return ``False``: encryption is too slow for the event loop."""
        return False

    async def until_possible(self, step: Step) -> None:
        """See :meth:`Stream.until_possible`."""
        if step[0] == SEND or not self._secured.pending():
            await super().until_possible(step)

    async def move(self, steps: deque[Step], executor: IoExecutor) -> OSError | None:
        """See :meth:`Stream.move`."""
        return await self._move_in_thread(steps, executor)

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        self._secured.settimeout(POLL_SECONDS)
        try:
            return self._secured.send(buffers[0][:_TLS_BYTES])
        except TimeoutError:
            return 0

    def _receive_some(self, views: Sequence[memoryview]) -> int:
        self._secured.settimeout(POLL_SECONDS)
        try:
            return unless_closed(self._secured.recv_into(views[0]))
        except TimeoutError:
            return 0


def stream_over(connected: socket.socket) -> Stream:
    """Return the stream for a connected socket, plain or TLS."""
    return TLSStream(connected) if isinstance(connected, ssl.SSLSocket) else Stream(connected)
