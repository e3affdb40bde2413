"""A socket in the event loop, Unix, TCP or TLS: bytes in, bytes and file descriptors out, and who is there.

Over :func:`anyio.wait_readable` and not anyio's own Unix streams: those report an error to the loop when a
read is cancelled in the moment in which the peer closes, which is how every cache process ends.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Sequence

import anyio

from kvtier.errors import ChannelClosed

READ_BYTES = 1 << 18

_CREDENTIALS = struct.Struct("3i")


class Channel:
    """One connection. At most one task reads; sends of several tasks do not mix."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        # Without a turn of the loop before each send: that would be a part of every answer's time.
        self._sending = anyio.Lock(fast_acquire=True)

    @property
    def peer_uid(self) -> int:
        """The user who runs the other side, as the kernel says."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        uid: int = _CREDENTIALS.unpack(credentials)[1]
        return uid

    async def receive(self) -> bytes:
        """What has come, at least one byte. Raises :class:`ChannelClosed`."""
        while True:
            try:
                data = self._socket.recv(READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError):
                await anyio.wait_readable(self._socket)
                continue
            except ssl.SSLWantWriteError:
                await anyio.wait_writable(self._socket)
                continue
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("the other side has closed")
            return data

    async def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send all of ``data``, and ``fds`` with its first byte. Raises :class:`ChannelClosed`."""
        async with self._sending:
            left = memoryview(data)
            while left:
                try:
                    if fds:
                        sent = socket.send_fds(self._socket, [left], list(fds))
                        fds = ()
                    else:
                        sent = self._socket.send(left)
                except (BlockingIOError, ssl.SSLWantWriteError):
                    await anyio.wait_writable(self._socket)
                    continue
                except ssl.SSLWantReadError:
                    await anyio.wait_readable(self._socket)
                    continue
                except OSError as error:
                    raise ChannelClosed(str(error)) from error
                left = left[sent:]

    def close(self) -> None:
        """End the connection; harmless when repeated."""
        self._socket.close()


async def accept_all(listener: socket.socket, handle: Callable[[Channel], Awaitable[None]]) -> None:
    """Serve every connection to a listening, non-blocking socket in a task of its own, until cancelled."""

    async def serve(connected: socket.socket) -> None:
        with connected:
            await handle(Channel(connected))

    async with anyio.create_task_group() as tasks:
        while True:
            try:
                connected, _ = listener.accept()
            except BlockingIOError:
                await anyio.wait_readable(listener)
            else:
                tasks.start_soon(serve, connected)
