"""What goes wrong on a request's way, and how a client is told: in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from kvtier.proxy.engine import Engine

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


class EngineLost(Exception):
    """An engine cannot be reached, or has gone before its answer began. Says how, in words."""

    def __init__(self, engine: Engine, why: str, *, gone: bool = False, again: bool = False) -> None:
        super().__init__(f"the {engine.role} engine {engine.url} {why}")
        self.engine = engine
        self.why = why
        self.gone = gone
        """Whether nobody listens there, so that nobody else need try."""
        self.again = again
        """Whether the same engine may do better: it has dropped one connection, which it may have to."""


class Refused(Exception):
    """A request that the proxy answers itself, with an error."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


class ClientGone(Exception):
    """Whoever has asked does not wait any longer."""


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error as OpenAI's API and vLLM have it."""
    kind = KINDS.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_event(status: int, message: str, *, within_event: bool) -> bytes:
    """The end of a stream that cannot go on; ``within_event`` where its last event was cut off."""
    body = msgspec.json.encode(error_body(status, message))
    return (b"\n\n" if within_event else b"") + b"data: " + body + b"\n\ndata: [DONE]\n\n"
