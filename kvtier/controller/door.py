"""Who may ask the controller anything: whoever has its token, or else this host's own programs."""

from __future__ import annotations

import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response

WRONG_TOKEN = "the token is wrong or missing: send it as `Authorization: Bearer TOKEN`"  # noqa: S105 - it is none
STRANGER = "without a token the controller answers programs of its own host alone: start it with --token-file"
_BEARER = {"WWW-Authenticate": "Bearer"}


class Door:
    """Lets in who has the token.

    Where there is none, only this host can connect, its browsers included. So what a browser sends because
    some other site told it to is refused: it names that site as its origin, or, where that site's name was
    made to mean this host, as the host that it believes to talk to.
    """

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()

    def refusal(self, connection: HTTPConnection) -> HTTPException | None:
        """Why this one must stay out, or ``None``. Takes equally long for whatever token is wrong."""
        if self._token is None:
            return None if _is_at_home(connection) else HTTPException(403, STRANGER)
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(token.strip().encode(), self._token)
        return None if right and scheme.lower() == "bearer" else HTTPException(401, WRONG_TOKEN, _BEARER)

    async def let_in(self, connection: HTTPConnection) -> None:
        """A dependency that answers everybody else with 401 or 403."""
        if (refusal := self.refusal(connection)) is not None:
            raise refusal


def denial(refusal: HTTPException) -> Response:
    """The same, as an answer to the handshake of a WebSocket."""
    return JSONResponse({"detail": refusal.detail, "known": []}, refusal.status_code, refusal.headers)


def _is_at_home(connection: HTTPConnection) -> bool:
    host = connection.headers.get("host", "")
    origin = connection.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        return False
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
