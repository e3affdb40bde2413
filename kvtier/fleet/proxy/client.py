"""The client side of one request: send the response, or an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvtier.fleet.proxy.errors import Refused, error_body, error_event

if TYPE_CHECKING:
    from kvtier.fleet.proxy.headers import Headers
    from kvtier.http import Message, Receive, Send

EVENT_STREAM = b"text/event-stream"


class Client:
    """One request's ASGI connection to the client. Sends one response or one error."""

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.headers: Headers = list(scope["headers"])
        self.receive = receive
        self._send = send
        self._streams = False
        self._tail = b""
        self.started = False
        self.ended = False
        self.disconnected = False

    def header(self, name: bytes) -> str | None:
        """Return the value of the first header of that name."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers."""
        content_type = next((value for name, value in headers if name == b"content-type"), b"")
        self._streams = content_type.lower().startswith(EVENT_STREAM)
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes) -> None:
        """Send a piece of the body without buffering. Waits while the client does not read (backpressure)."""
        if piece:
            self._tail = piece[-4:] if len(piece) >= 4 else (self._tail + piece)[-4:]
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self, piece: bytes = b"") -> None:
        """Send the last piece of the body."""
        self.ended = True
        await self._send({"type": "http.response.body", "body": piece, "more_body": False})

    async def refuse(self, refused: Refused) -> None:
        """Send an error response, or end a stream that has started with an error event.

        A non-streaming response that has started stays incomplete, and the server closes its connection.
        """
        if self.disconnected or self.ended:
            return
        if not self.started:
            content = msgspec.json.encode(error_body(refused.status, str(refused)))
            headers = [(name.encode(), value.encode()) for name, value in refused.headers.items()]
            headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
            await self.start(refused.status, headers)
            await self.end(content)
        elif self._streams:
            within_event = not self._tail.endswith((b"\n\n", b"\r\n\r\n"))
            await self.end(error_event(refused.status, str(refused), within_event=within_event))

    async def wait_disconnect(self) -> None:
        """Return once the client has disconnected."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
