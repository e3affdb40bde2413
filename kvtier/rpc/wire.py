"""Frames over a non-blocking socket: Unix, TCP or TLS."""

from __future__ import annotations

import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.lowlevel

from kvtier.errors import ChannelClosed
from kvtier.rpc.frames import LENGTH, FrameReader

READ_BYTES = 1 << 16
"""Buffer of each read. One of 256 KiB is new memory each time: two page faults, up to 20 µs on a VM."""
MAX_UNSENT_BYTES = 16 << 20
"""Default limit of queued bytes. Beyond it the other side counts as dead: it does not read."""

TURN_SECONDS = 0.001

_CREDENTIALS = struct.Struct("iII")


def peer_credentials(connected: socket.socket) -> tuple[int, int]:
    """Return process id and user id at the other end of a Unix socket (unix(7), SO_PEERCRED).

    The process id is 0 in another PID namespace.
    """
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


Take = Callable[[Sequence[bytes]], Sequence[bytes]]
"""Handles the bodies of frames without waiting, and returns those that it leaves to its caller."""


class Wire(ABC):
    """Transfers frame bodies in order, in both directions, for an :class:`~kvtier.rpc.endpoint.Endpoint`."""

    @property
    @abstractmethod
    def unsent(self) -> int:
        """Number of queued bytes."""

    @abstractmethod
    async def receive(self) -> Sequence[bytes]:
        """Wait for frames; return at least one body. Raises :class:`kvtier.errors.ChannelError`."""

    async def receive_rest(self, take: Take) -> Sequence[bytes]:
        """Pass bodies to ``take`` as they arrive, until it leaves some of them; return these.

        Raises what ``take`` raises, and :class:`kvtier.errors.ChannelError`.
        """
        while not (rest := take(await self.receive())):
            await anyio.lowlevel.checkpoint()
        return rest

    @abstractmethod
    def write(self, body: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame. Raises :class:`ChannelClosed` if too much is queued already."""

    @abstractmethod
    def flush_now(self) -> None:
        """Send what can be sent without waiting. Raises :class:`ChannelClosed`."""

    @abstractmethod
    async def flush(self) -> None:
        """Send everything. Raises :class:`ChannelClosed`."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Idempotent."""


class FrameSocket:
    """Sends and receives frames without ever blocking. Owns its socket."""

    def __init__(self, connected: socket.socket, limit: int = MAX_UNSENT_BYTES) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.received_fds: list[int] = []
        """File descriptors that arrived while :attr:`takes_fds` was set. The reader of this owns them."""
        self.takes_fds = False
        self.unsent = bytearray()
        """Queued data."""
        self.tls_wants_opposite = False
        """Whether TLS has to write before it can read more, or the other way round. Retry soon."""
        self._limit = limit
        self._fds: list[int] = []
        self._reader = FrameReader()

    def write(self, body: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame; ``fds`` go with its first byte, and need an empty queue."""
        unsent = self.unsent
        if len(unsent) > self._limit:
            raise ChannelClosed("the other side has not read for too long")
        assert not fds or not unsent
        self._fds += fds
        unsent += LENGTH.pack(len(body))
        unsent += body

    def flush(self) -> bool:
        """Send what the socket takes; return whether that is everything. Raises :class:`ChannelClosed`."""
        unsent = self.unsent
        while unsent:
            try:
                if self._fds:
                    sent = socket.send_fds(self.socket, [unsent], self._fds)
                    self._fds = []
                else:
                    sent = self.socket.send(unsent)
            except BlockingIOError:
                return False
            except OSError as error:
                self._wait_for_tls(error, sends=True)
                return False
            del unsent[:sent]
        return True

    def read(self) -> list[bytes] | None:
        """Read once; return the bodies that are complete now, or ``None`` if there is nothing to read.

        Raises :class:`ChannelClosed` and :class:`kvtier.errors.ProtocolError`.
        """
        try:
            data = self._recv_fds() if self.takes_fds else self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            self._wait_for_tls(error, sends=False)
            return None
        if not data:
            raise ChannelClosed("the other side has closed the connection")
        return self._reader.feed(data)

    def _wait_for_tls(self, error: OSError, *, sends: bool) -> None:
        """Record what TLS waits for. Raises :class:`ChannelClosed` for another error."""
        import ssl  # A NIXL process does not need it, and would start 10 ms later.

        if isinstance(error, ssl.SSLWantReadError):
            self.tls_wants_opposite |= sends
        elif isinstance(error, ssl.SSLWantWriteError):
            self.tls_wants_opposite |= not sends
        else:
            raise ChannelClosed(str(error)) from error

    def _recv_fds(self) -> bytes:
        data, fds, _, _ = socket.recv_fds(self.socket, READ_BYTES, 1)
        self.received_fds += fds
        return data

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.socket.close()


class SocketWire(Wire):
    """A :class:`FrameSocket` in an event loop.

    Waits with :func:`anyio.wait_readable` and does not use anyio's streams: those report an error to the loop
    if a read is cancelled while the other side closes, which is how every cache process ends.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.frames = FrameSocket(connected)

    @property
    def unsent(self) -> int:
        """Number of queued bytes."""
        return len(self.frames.unsent)

    async def receive(self) -> Sequence[bytes]:
        """Wait for frames; return at least one body. Raises :class:`kvtier.errors.ChannelError`."""
        frames = self.frames
        while not (bodies := frames.read()):
            if bodies is None:
                await self._wait(anyio.wait_readable)
        return bodies

    async def receive_rest(self, take: Take) -> Sequence[bytes]:
        """See :meth:`Wire.receive_rest`. The event loop calls ``take`` as soon as it has read."""
        if type(self.frames.socket) is not socket.socket:  # TLS may have read what the loop cannot see.
            return await super().receive_rest(take)
        import asyncio  # Slow, and not needed by a NIXL process.

        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Sequence[bytes]] = loop.create_future()
        number = self.frames.socket.fileno()

        def receive() -> None:
            try:
                rest = take(self.frames.read() or ())
            except Exception as error:
                if not ended.done():
                    ended.set_exception(error)
            else:
                if not rest:
                    return
                if not ended.done():
                    ended.set_result(rest)
            # A task handles the rest, and calls this again.
            loop.remove_reader(number)

        loop.add_reader(number, receive)
        try:
            return await ended
        finally:
            loop.remove_reader(number)

    async def _wait(self, wait: Callable[[socket.socket], Awaitable[None]]) -> None:
        if self.frames.tls_wants_opposite:
            # Only one task may wait for each direction, and another one may be waiting for this one.
            self.frames.tls_wants_opposite = False
            await anyio.sleep(TURN_SECONDS)
        else:
            await wait(self.frames.socket)

    def write(self, body: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame. Raises :class:`ChannelClosed` if too much is queued already."""
        self.frames.write(body, fds)

    def flush_now(self) -> None:
        """Send what can be sent without waiting. Raises :class:`ChannelClosed`."""
        self.frames.flush()

    async def flush(self) -> None:
        """Send everything. Raises :class:`ChannelClosed`."""
        while not self.frames.flush():
            await self._wait(anyio.wait_writable)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.frames.close()
