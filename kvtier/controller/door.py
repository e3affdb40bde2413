"""Who may ask the controller anything: whoever has its token, where it has one."""

from __future__ import annotations

import hmac

from fastapi import HTTPException, Request
from starlette.responses import JSONResponse, Response

REFUSAL = "the token is wrong or missing: send it as `Authorization: Bearer TOKEN`"
_HEADERS = {"WWW-Authenticate": "Bearer"}


class Door:
    """Lets in who has the token, or everybody where there is none."""

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()

    def opens(self, authorization: str | None) -> bool:
        """Whether an ``Authorization`` header is good. Takes equally long for whatever is not."""
        if self._token is None:
            return True
        scheme, _, token = (authorization or "").partition(" ")
        right = hmac.compare_digest(token.strip().encode(), self._token)
        return right and scheme.lower() == "bearer"

    async def let_in(self, request: Request) -> None:
        """A dependency that answers 401 to everybody else."""
        if not self.opens(request.headers.get("authorization")):
            raise HTTPException(401, REFUSAL, _HEADERS)

    def refusal(self) -> Response:
        """The same, for the handshake of a WebSocket."""
        return JSONResponse({"detail": REFUSAL, "known": []}, 401, _HEADERS)
