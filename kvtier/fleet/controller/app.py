"""The controller's HTTP application: endpoints, web page, authentication and error responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Depends, FastAPI, WebSocket
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvtier.errors import ControllerError
from kvtier.fleet.controller import connection, page
from kvtier.fleet.controller.api import Health, Problem
from kvtier.fleet.controller.auth import Authenticator, denial_response
from kvtier.fleet.controller.bodies import Bodies, describe_errors
from kvtier.fleet.controller.errors import (
    AmbiguousModel,
    TooManyPins,
    UnknownName,
    WrongPrompt,
    WrongRequest,
)
from kvtier.fleet.controller.operations import Operations
from kvtier.fleet.controller.registry import Registry
from kvtier.fleet.controller.routes import STATE_TAG, add_operations, add_queries, add_stream
from kvtier.fleet.controller.stream import Stream
from kvtier.fleet.member.protocol import CONNECT_PATH
from kvtier.version import __version__

DESCRIPTION = """
Index of the chunks that all kvtier instances hold, and operations that move, prefetch, pin and clear them.

An operation is an *event*: the request returns the event's id at once, and `GET /events/{event_id}` returns
its state, its result and, if it failed, the reason. If the controller has a token, send it as
`Authorization: Bearer TOKEN`.
"""
CLIENT_ERRORS = (AmbiguousModel, WrongPrompt, WrongRequest, TooManyPins)
INTERNAL_ERROR = "internal error: see the controller's log"
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": Problem,
        "description": (
            "401: the token is wrong or missing. 403: the controller has no token, and the request is from "
            "another host or site. 404: unknown instance, tier, model or event. 413: the body is too long. "
            "422: the request is invalid."
        ),
    },
    "5XX": {"model": Problem, "description": "503: too many operations are in flight."},
}


def make_app(operations: Operations, token: str | None = None) -> FastAPI:
    """Return the application. Clients must send the ``token``, if there is one.

    The page, its files, the API description and ``/healthz`` need no token.
    """
    bodies, authenticator = Bodies(), Authenticator(token)

    app = FastAPI(
        title="kvtier controller",
        version=__version__,
        description=DESCRIPTION,
        redoc_url=None,
    )
    _add_public_routes(app, operations.registry, authenticator)
    # For all routes added below. A second router would create every route twice.
    app.router.dependencies.append(Depends(authenticator.authenticate))
    app.router.responses.update(_PROBLEMS)
    add_operations(app.router, operations, bodies)
    add_queries(app.router, operations)
    add_stream(app.router, Stream(operations.registry, operations.events, operations.pins))
    page.mount(app)
    app.add_exception_handler(ControllerError, _error_response)
    app.add_exception_handler(HTTPException, _error_response)
    app.add_exception_handler(RequestValidationError, _error_response)
    app.add_exception_handler(Exception, _error_response)
    return app


def _add_public_routes(app: FastAPI, registry: Registry, authenticator: Authenticator) -> None:
    @app.get("/healthz", tags=[STATE_TAG])
    async def health() -> Health:
        """Check that the controller is alive. Needs no token."""
        return Health(status="ok", version=__version__, instances=len(registry.members))

    @app.websocket(CONNECT_PATH)
    async def connect(websocket: WebSocket) -> None:
        if (refusal := authenticator.refusal(websocket)) is not None:
            await websocket.send_denial_response(denial_response(refusal))
            return
        await websocket.accept()
        await connection.serve(registry, websocket)


async def _error_response(_: Request, error: Exception) -> Response:
    """Return the error's message and, for an unknown name, the known ones."""
    match error:
        case UnknownName():
            return _problem(404, str(error), error.known)
        case AmbiguousModel():
            return _problem(422, str(error), error.known)
        case ControllerError():
            return _problem(422 if isinstance(error, CLIENT_ERRORS) else 503, str(error))
        case HTTPException():
            return _problem(error.status_code, error.detail, headers=error.headers)
        case RequestValidationError():
            return _problem(422, describe_errors(error.errors()))
        case _:
            return _problem(500, INTERNAL_ERROR)


def _problem(status: int, detail: str, known: Sequence[str] = (), headers: Any = None) -> Response:  # noqa: ANN401 - Starlette's type
    return JSONResponse({"detail": detail, "known": list(known)}, status, headers)
