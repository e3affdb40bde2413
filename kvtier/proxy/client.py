"""The client's side of one request: what it is sent, and how it is told that there is no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvtier.proxy.errors import Refused, error_body, error_event

if TYPE_CHECKING:
    from kvtier.http import Message, Receive, Send
    from kvtier.proxy.headers import Headers

EVENT_STREAM = b"text/event-stream"


class Client:
    """Sends one answer, or the error that it becomes."""

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.headers: Headers = list(scope["headers"])
        self.receive = receive
        self._send = send
        self._streams = False
        self._tail = b""
        self.started = False
        self.ended = False
        self.gone = False

    def header(self, name: bytes) -> str | None:
        """The first header of that name."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head."""
        content_type = next((value for name, value in headers if name == b"content-type"), b"")
        self._streams = content_type.lower().startswith(EVENT_STREAM)
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes) -> None:
        """Send a piece of the body, at once. Waits while the client does not read."""
        if piece:
            self._tail = piece[-4:] if len(piece) >= 4 else (self._tail + piece)[-4:]
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self, piece: bytes = b"") -> None:
        """Send the last piece."""
        self.ended = True
        await self._send({"type": "http.response.body", "body": piece, "more_body": False})

    async def refuse(self, refused: Refused) -> None:
        """Answer with an error; a stream that has begun ends with it.

        What has begun and is no stream is cut off by the server, as it stays incomplete.
        """
        if self.gone or self.ended:
            return
        if not self.started:
            content = msgspec.json.encode(error_body(refused.status, str(refused)))
            headers = [(name.encode(), value.encode()) for name, value in refused.headers.items()]
            headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
            await self.start(refused.status, headers)
            await self.end(content)
        elif self._streams:
            within = not self._tail.endswith((b"\n\n", b"\r\n\r\n"))
            await self.end(error_event(refused.status, str(refused), within_event=within))

    async def leave(self) -> None:
        """Return when the client has gone."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.gone = True
