"""Frames as binary WebSocket messages, without their length prefix."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio

from kvtier.errors import ChannelClosed, ProtocolError
from kvtier.rpc.wire import MAX_UNSENT_BYTES, Wire

if TYPE_CHECKING:
    from starlette.websockets import WebSocket
    from websockets.asyncio.client import ClientConnection


class WebSocketWire(Wire):
    """Queues messages. The connection belongs to the caller, who closes it."""

    def __init__(self, limit: int = MAX_UNSENT_BYTES) -> None:
        self._limit = limit
        self._bodies: deque[bytes] = deque()
        self._unsent = 0

    @property
    def unsent(self) -> int:
        """Number of queued bytes."""
        return self._unsent

    def write(self, body: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a message. Raises :class:`ChannelClosed` if too much is queued already."""
        assert not fds
        if self._unsent > self._limit:
            raise ChannelClosed("the other side has not read for too long")
        self._bodies.append(body)
        self._unsent += len(body)

    def flush_now(self) -> None:
        """Do nothing: sending on a WebSocket is a coroutine."""

    async def flush(self) -> None:
        """Send everything. Raises :class:`ChannelClosed`."""
        while self._bodies:
            body = self._bodies.popleft()
            try:
                await self._send(body)
            finally:
                self._unsent -= len(body)

    @abstractmethod
    async def _send(self, body: bytes) -> None: ...

    def close(self) -> None:
        """Do nothing: the caller closes the connection."""


class ClientWire(WebSocketWire):
    """The client's side of a connection."""

    def __init__(self, connection: ClientConnection) -> None:
        # Imported here and below, so that neither side pays for the other's library.
        from websockets.exceptions import ConnectionClosed

        super().__init__()
        self._connection = connection
        self._errors = ConnectionClosed, OSError

    async def receive(self) -> Sequence[bytes]:
        """Wait for a message. Raises :class:`kvtier.errors.ChannelError`."""
        try:
            body = await self._connection.recv()
        except self._errors as error:
            raise ChannelClosed(str(error)) from error
        if isinstance(body, str):
            raise ProtocolError("the other side sends text instead of binary messages")
        return (body,)

    async def _send(self, body: bytes) -> None:
        try:
            await self._connection.send(body)
        except self._errors as error:
            raise ChannelClosed(str(error)) from error


class ServerWire(WebSocketWire):
    """The server's side of an accepted connection."""

    def __init__(
        self, websocket: WebSocket, limit: int = MAX_UNSENT_BYTES, timeout: float | None = None
    ) -> None:
        """``timeout``: seconds within which the client must make room for the next message."""
        from starlette.websockets import WebSocketDisconnect

        super().__init__(limit)
        self._websocket = websocket
        self._errors = WebSocketDisconnect, RuntimeError
        self._timeout = timeout

    async def receive(self) -> Sequence[bytes]:
        """Wait for a message. Raises :class:`kvtier.errors.ChannelError`."""
        event = await self._websocket.receive()
        if event["type"] != "websocket.receive":
            raise ChannelClosed("the other side has closed the connection")
        body = event.get("bytes")
        if not body:
            raise ProtocolError("the other side sends text or nothing instead of binary messages")
        return (body,)

    async def _send(self, body: bytes) -> None:
        try:
            with anyio.move_on_after(self._timeout) as scope:
                await self._websocket.send_bytes(body)
        except self._errors as error:
            raise ChannelClosed("the other side has closed the connection") from error
        if scope.cancelled_caught:
            raise ChannelClosed(f"the other side has read nothing for {self._timeout:g} s")
