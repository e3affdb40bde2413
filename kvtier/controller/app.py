"""The controller's HTTP application: its calls, its page, who may ask, and what is said where that fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, WebSocket
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import kvtier
from kvtier.agent.protocol import CONNECT_PATH
from kvtier.controller import connection, page
from kvtier.controller.api import Health, Problem
from kvtier.controller.bodies import Bodies, sentence
from kvtier.controller.door import Door, denial
from kvtier.controller.errors import (
    AmbiguousModel,
    TooManyPins,
    UnknownName,
    WrongPrompt,
    WrongRequest,
)
from kvtier.controller.operations import Operations
from kvtier.controller.registry import Registry
from kvtier.controller.routes import KNOW, add_knowledge, add_operations, add_stream
from kvtier.controller.stream import Stream
from kvtier.errors import ControllerError

DESCRIPTION = """
One place that knows what every instance of kvtier holds, and has it moved, fetched, pinned and removed.

What changes something is an *event*: it is answered at once with the event's id, and `GET /events/{event_id}`
tells when it is done or has failed, and why. Where the controller has a token, send it as
`Authorization: Bearer TOKEN`.
"""
WRONG = (AmbiguousModel, WrongPrompt, WrongRequest, TooManyPins)
MISTAKE = "the controller has made a mistake, which its log describes"
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": Problem,
        "description": (
            "401: the token is wrong or missing. 403: there is none, and another host or site asks. "
            "404: there is no such instance, tier, model or event. 413: the body is too long. "
            "422: what was asked for makes no sense."
        ),
    },
    "5XX": {"model": Problem, "description": "503: too much is under way already."},
}


def make_app(operations: Operations, token: str | None = None) -> FastAPI:
    """The application. Who asks must have the ``token``, where there is one.

    Only the page, its files, the description of all calls and ``/healthz`` are for everybody.
    """
    bodies, door = Bodies(), Door(token)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        bodies.close()

    app = FastAPI(
        title="kvtier controller",
        version=kvtier.__version__,
        description=DESCRIPTION,
        redoc_url=None,
        lifespan=lifespan,
    )
    _add_open_calls(app, operations.registry, door)
    # From here on: not through a second router, which would make every route twice.
    app.router.dependencies.append(Depends(door.let_in))
    app.router.responses.update(_PROBLEMS)
    add_operations(app.router, operations, bodies)
    add_knowledge(app.router, operations)
    add_stream(app.router, Stream(operations.registry, operations.events))
    page.mount(app)
    app.add_exception_handler(ControllerError, _explain)
    app.add_exception_handler(HTTPException, _explain)
    app.add_exception_handler(RequestValidationError, _explain)
    app.add_exception_handler(Exception, _explain)
    return app


def _add_open_calls(app: FastAPI, registry: Registry, door: Door) -> None:
    @app.get("/healthz", tags=[KNOW])
    async def health() -> Health:
        """Whether the controller is there. Needs no token."""
        return Health(status="ok", version=kvtier.__version__, instances=len(registry.members))

    @app.websocket(CONNECT_PATH)
    async def connect(websocket: WebSocket) -> None:
        if (refusal := door.refusal(websocket)) is not None:
            await websocket.send_denial_response(denial(refusal))
            return
        await websocket.accept()
        await connection.serve(registry, websocket)


async def _explain(_: Request, error: Exception) -> Response:
    """One sentence, and the names that exist where one does not."""
    match error:
        case UnknownName():
            return _problem(404, str(error), error.known)
        case AmbiguousModel():
            return _problem(422, str(error), error.known)
        case ControllerError():
            return _problem(422 if isinstance(error, WRONG) else 503, str(error))
        case HTTPException():
            return _problem(error.status_code, error.detail, headers=error.headers)
        case RequestValidationError():
            return _problem(422, sentence(error.errors()))
        case _:
            return _problem(500, MISTAKE)


def _problem(status: int, detail: str, known: Sequence[str] = (), headers: Any = None) -> Response:  # noqa: ANN401 - as Starlette has it
    return JSONResponse({"detail": detail, "known": list(known)}, status, headers)
