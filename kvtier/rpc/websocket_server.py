"""Frames as binary WebSocket messages: the server's side."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
from starlette.websockets import WebSocket, WebSocketDisconnect

from kvtier.errors import ChannelClosed, ProtocolError
from kvtier.rpc.websocket import WebSocketWire
from kvtier.rpc.wire import MAX_UNSENT_BYTES


class ServerWire(WebSocketWire):
    """The server's side of an accepted connection."""

    def __init__(
        self, websocket: WebSocket, limit: int = MAX_UNSENT_BYTES, timeout: float | None = None
    ) -> None:
        """``timeout``: seconds within which the client must make room for the next message."""
        super().__init__(limit)
        self._websocket = websocket
        self._timeout = timeout

    async def receive(self) -> Sequence[bytes]:
        """Wait for a message. Raises :class:`kvtier.errors.ChannelError`."""
        event = await self._websocket.receive()
        if event["type"] != "websocket.receive":
            raise ChannelClosed("the other side has closed the connection")
        body = event.get("bytes")
        if not body:
            raise ProtocolError("it sends text or nothing instead of binary messages")
        return (body,)

    async def _send(self, body: bytes) -> None:
        try:
            with anyio.move_on_after(self._timeout) as scope:
                await self._websocket.send_bytes(body)
        except (WebSocketDisconnect, RuntimeError) as error:
            raise ChannelClosed("the other side has closed the connection") from error
        if scope.cancelled_caught:
            raise ChannelClosed(f"it has read nothing for {self._timeout:g} s")
