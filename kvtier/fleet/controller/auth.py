"""Authentication of clients: by token, or without a token by restricting access to this host."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response

from kvtier.settings.peer import is_loopback

WRONG_TOKEN = "the token is wrong or missing: send it as `Authorization: Bearer TOKEN`"  # noqa: S105
LOCAL_ONLY = "without a token the controller answers only its own host: start it with --token-file"
_BEARER = {"WWW-Authenticate": "Bearer"}


class Authenticator:
    """Accepts clients that have the token.

    Without a token the controller listens on loopback only, which browsers on this host can still reach. To
    prevent cross-site requests and DNS rebinding, requests are refused if their ``Origin`` differs from their
    ``Host``, or if their ``Host`` is not a loopback name.
    """

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()

    def refusal(self, connection: HTTPConnection) -> HTTPException | None:
        """Return the error to refuse a client with, or ``None``. Compares tokens in constant time."""
        if self._token is None:
            return None if _is_local(connection) else HTTPException(403, LOCAL_ONLY)
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(token.strip().encode(), self._token)
        return None if right and scheme.lower() == "bearer" else HTTPException(401, WRONG_TOKEN, _BEARER)

    async def authenticate(self, connection: HTTPConnection) -> None:
        """Refuse clients with 401 or 403. A FastAPI dependency."""
        if (refusal := self.refusal(connection)) is not None:
            raise refusal


def denial_response(refusal: HTTPException) -> Response:
    """Return the refusal as a response to a WebSocket handshake."""
    return JSONResponse({"detail": refusal.detail, "known": []}, refusal.status_code, refusal.headers)


def _is_local(connection: HTTPConnection) -> bool:
    host = connection.headers.get("host", "")
    origin = connection.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        return False
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or is_loopback(name)
