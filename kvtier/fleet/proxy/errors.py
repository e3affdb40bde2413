"""Errors of a request, and their representation in OpenAI's API format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

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
