"""A socket that the event loop watches and worker threads move bytes over, never both at once.

Time-outs: socket(7), SO_SNDTIMEO.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from anyio import wait_readable, wait_writable

from kvtier.sockets.buffers import advance, first_of

MOMENT_SECONDS = 0.1
"""How long a thread waits for a socket that takes or gives nothing."""
_TIMEVAL = struct.pack("@ll", 0, int(MOMENT_SECONDS * 1e6))
_TLS_BYTES = 1 << 18
"""A piece that TLS did not take must be offered again as it was, so that pieces have a size."""


class Stream:
    """Plain: the socket blocks, and the loop says each time that it does not want to wait."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.settimeout(None)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL)

    def interrupt(self) -> None:
        """Wake the thread that waits for this socket: it finds it closed. From any thread."""
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
                await wait_readable(self._socket)

    def send_now(self, buffers: deque[memoryview]) -> None:
        """Send what the socket takes at once. Raises ``OSError``."""
        with suppress(BlockingIOError):
            while buffers:
                some = first_of(buffers)
                advance(buffers, self._socket.sendmsg(some, [], socket.MSG_DONTWAIT))

    async def until_readable(self) -> None:
        """Wait until there is something to receive."""
        await wait_readable(self._socket)

    async def until_writable(self) -> None:
        """Wait until something can be sent."""
        await wait_writable(self._socket)

    # In a thread.

    def send_some(self, buffers: Sequence[memoryview]) -> int:
        """Send what goes within a moment: how many bytes that were. Raises ``OSError``."""
        try:
            return self._socket.sendmsg(buffers)
        except BlockingIOError:
            return 0

    def receive_some(self, views: Sequence[memoryview]) -> int:
        """Fill views with what comes within a moment: how many bytes that were. Raises ``OSError``."""
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
                await wait_readable(self._secured)
            except ssl.SSLWantWriteError:
                await wait_writable(self._secured)

    def send_now(self, buffers: deque[memoryview]) -> None:
        """Encrypting is a thread's work."""

    async def until_readable(self) -> None:
        """See :meth:`Stream.until_readable`."""
        if not self._secured.pending():
            await wait_readable(self._secured)

    def send_some(self, buffers: Sequence[memoryview]) -> int:
        """See :meth:`Stream.send_some`."""
        self._secured.settimeout(MOMENT_SECONDS)
        try:
            return self._secured.send(buffers[0][:_TLS_BYTES])
        except TimeoutError:
            return 0

    def receive_some(self, views: Sequence[memoryview]) -> int:
        """See :meth:`Stream.receive_some`."""
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
