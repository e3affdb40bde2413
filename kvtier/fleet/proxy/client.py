"""The client side of one request: the response or an error, and which headers are forwarded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
RETRY_SECONDS = 1
"""``Retry-After`` of a rejected request."""
BUSY = {"retry-after": str(RETRY_SECONDS)}
CLOSE = {"connection": "close"}
"""Of a request whose body was not read, so that the connection cannot be used again."""

EVENT_STREAM = b"text/event-stream"
Headers = list[tuple[bytes, bytes]]
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# The proxy sets these itself: the body may change, and it could not parse a compressed response.
DROPPED_FROM_REQUEST = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"accept-encoding"}
DROPPED_FROM_RESPONSE = HOP_BY_HOP | {b"date"}
IDENTITY = (b"accept-encoding", b"identity")


class Refused(Exception):
    """A request that the proxy answers itself, with the HTTP error ``status``."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


class ClientDisconnected(Exception):
    """The client closed the connection before it got a complete response."""


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return an error object in the format of OpenAI's API and vLLM."""
    kind = KINDS.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_event(status: int, message: str, *, within_event: bool) -> bytes:
    """Return the events that end a failed stream; ``within_event``: its last event is incomplete."""
    body = msgspec.json.encode(error_body(status, message))
    return (b"\n\n" if within_event else b"") + b"data: " + body + b"\n\ndata: [DONE]\n\n"


class Client:
    """One request's ASGI connection to the client. Sends one response or one error."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
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


def to_engine(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers to forward to an engine, API keys included. Names must be lower case."""
    headers = list(headers)
    dropped = DROPPED_FROM_REQUEST | _connection_options(headers)
    return [*((name, value) for name, value in headers if name not in dropped), IDENTITY]


def to_client(headers: Iterable[tuple[bytes, bytes]], length: int | None = None) -> Headers:
    """Return the headers to forward to the client. ``length``: content length of a rewritten body."""
    headers = [(name.lower(), value) for name, value in headers]
    dropped = DROPPED_FROM_RESPONSE | _connection_options(headers)
    if length is not None:
        dropped |= {b"content-length"}
    kept = [(name, value) for name, value in headers if name not in dropped]
    if length is not None:
        kept.append((b"content-length", b"%d" % length))
    return kept


def _connection_options(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Return the header names that ``Connection`` lists as hop-by-hop."""
    return frozenset(
        name.strip().lower()
        for header, value in headers
        if header == b"connection"
        for name in value.split(b",")
    )
