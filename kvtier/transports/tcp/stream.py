"""A socket that the event loop watches and worker threads move bytes over, never both at once.

Time-outs: socket(7), SO_SNDTIMEO.
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
from kvtier.sockets.buffers import Buffers, advance, first_of
from kvtier.sockets.conversation import SEND, progress_of
from kvtier.sockets.pump import Pump, finished
from kvtier.sockets.waiting import MOMENT_SECONDS, until_readable, until_writable

_TIMEVAL = struct.pack("@ll", 0, int(MOMENT_SECONDS * 1e6))
_TLS_BYTES = 1 << 18
"""A piece that TLS did not take must be offered again as it was, so that pieces have a size."""
_NOTHING = bytearray()

Step = tuple[int, Buffers]
"""One of the operations of :mod:`kvtier.sockets.conversation`, and the buffers that are left of it."""


class Stream:
    """Plain: the socket blocks, and the loop says each time that it does not want to wait."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.settimeout(None)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL)

    def interrupt(self) -> None:
        """Wake who waits for this socket, thread or loop: it finds it closed. From any thread."""
        with suppress(OSError):
            # Not the method of an SSLSocket, which would go on in the clear.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    # In the loop.

    async def receive(self, most: int) -> bytes:
        """What comes, at least one byte; none where the other side has closed. Raises ``OSError``."""
        while True:
            try:
                return self._socket.recv(most, socket.MSG_DONTWAIT)
            except BlockingIOError:
                await until_readable(self._socket.fileno())

    def move_now(self, step: Step) -> bool:
        """As much of it as goes at once; ``False``: not in the loop. Raises ``OSError``."""
        kind, buffers = step
        with suppress(BlockingIOError):
            while buffers:
                some = first_of(buffers)
                if kind == SEND:
                    moved = self._socket.sendmsg(some, [], socket.MSG_DONTWAIT)
                else:
                    moved = unless_closed(self._socket.recvmsg_into(some, 0, socket.MSG_DONTWAIT)[0])
                advance(buffers, moved)
        return True

    async def until_possible(self, step: Step) -> None:
        """Wait until more of it can be done. Raises ``OSError`` where that will never be."""
        if step[0] == SEND:
            await until_writable(self._socket.fileno())
        else:
            await until_readable(self._socket.fileno())

    async def move(self, steps: deque[Step], pump: Pump) -> OSError | None:
        """Carry steps out in a thread, for no longer than a moment; what is left is left. Why it ends, if so.

        Where this is cancelled the socket is interrupted, and the memory let go of before it ends.
        """
        if not native.available():
            return await self._move_here(steps, pump)
        operations = [(kind, list(buffers)) for kind, buffers in steps]
        ended = pump.start(self._socket.fileno(), operations, _NOTHING, MOMENT_SECONDS)
        # A task that is cancelled may keep this frame for longer than the leases.
        del operations
        done, moved, number = await finished(ended, self.interrupt)
        for _ in range(done):
            steps.popleft()
        if steps:
            advance(steps[0][1], moved)
        return None if number == errno.ETIMEDOUT else progress_of(done, moved, number).error

    async def _move_here(self, steps: deque[Step], pump: Pump) -> OSError | None:
        errors: list[OSError | None] = []
        await finished(pump.hop(lambda: errors.append(self._moved(steps))), self.interrupt)
        return errors[0]

    # In a worker thread.

    def _moved(self, steps: deque[Step]) -> OSError | None:
        # Then it is another connection's turn.
        until = time.monotonic() + MOMENT_SECONDS
        try:
            while steps and time.monotonic() < until:
                kind, buffers = steps[0]
                if not buffers:
                    steps.popleft()
                elif moved := (self._send_some if kind == SEND else self._receive_some)(first_of(buffers)):
                    advance(buffers, moved)
                else:
                    break
        except OSError as error:
            # Where it was raised there are views, which nobody is to hold longer than the leases.
            return error.with_traceback(None)
        return None

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        """How many bytes went within a moment."""
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
    """Over TLS: the socket never blocks, and ``ssl`` waits for it where it may."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._socket = self._secured = connected
        connected.settimeout(0)

    async def receive(self, most: int) -> bytes:
        """See :meth:`Stream.receive`."""
        self._secured.settimeout(0)
        while True:
            try:
                return self._secured.recv(most)
            except ssl.SSLWantReadError:
                await until_readable(self._secured.fileno())
            except ssl.SSLWantWriteError:
                await until_writable(self._secured.fileno())

    def move_now(self, step: Step) -> bool:
        """Encrypting is a thread's work."""
        return False

    async def until_possible(self, step: Step) -> None:
        """See :meth:`Stream.until_possible`."""
        if step[0] == SEND or not self._secured.pending():
            await super().until_possible(step)

    async def move(self, steps: deque[Step], pump: Pump) -> OSError | None:
        """See :meth:`Stream.move`."""
        return await self._move_here(steps, pump)

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        self._secured.settimeout(MOMENT_SECONDS)
        try:
            return self._secured.send(buffers[0][:_TLS_BYTES])
        except TimeoutError:
            return 0

    def _receive_some(self, views: Sequence[memoryview]) -> int:
        self._secured.settimeout(MOMENT_SECONDS)
        try:
            return unless_closed(self._secured.recv_into(views[0]))
        except TimeoutError:
            return 0


def stream_over(connected: socket.socket) -> Stream:
    """Over a socket that is connected, whichever way it has been used so far."""
    return TLSStream(connected) if isinstance(connected, ssl.SSLSocket) else Stream(connected)


def unless_closed(received: int) -> int:
    """The same number. Raises ``ConnectionResetError`` where nothing was received."""
    if not received:
        raise ConnectionResetError("the other side has closed")
    return received
