"""The controller's HTTP application: authentication, endpoints, web page and error responses."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from anyio.lowlevel import checkpoint
from fastapi import APIRouter, Depends, FastAPI, Query, WebSocket
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvtier.errors import ControllerError
from kvtier.fleet.controller import answers, connection, lmcache
from kvtier.fleet.controller.bodies import (
    Bodies,
    ClearBody,
    LookupBody,
    MoveBody,
    PinBody,
    PrefetchBody,
    UnpinBody,
    WhyBody,
    describe_errors,
    request_body_schema,
)
from kvtier.fleet.controller.errors import AmbiguousModel, TooManyPins, UnknownName, WrongPrompt, WrongRequest
from kvtier.fleet.controller.events import Event
from kvtier.fleet.controller.history import LEVELS, History, Kind
from kvtier.fleet.controller.metrics import ControllerMetrics
from kvtier.fleet.controller.moves import Prefetch
from kvtier.fleet.controller.operations import Operations
from kvtier.fleet.controller.pin_and_clear import PinChunks, UnpinChunks
from kvtier.fleet.controller.registry import Registry
from kvtier.fleet.controller.settings import Span
from kvtier.fleet.controller.stream import Reader, Stream
from kvtier.fleet.member.protocol import CONNECT_PATH
from kvtier.fleet.service import BEARER, add_error_handlers, has_token
from kvtier.settings.peer import is_loopback
from kvtier.version import __version__

WRONG_TOKEN = "the token is wrong or missing: send it as `Authorization: Bearer TOKEN`"  # noqa: S105
LOCAL_ONLY = "without a token the controller answers only its own host: start it with --token-file"
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
        "model": answers.Problem,
        "description": (
            "401: the token is wrong or missing. 403: the controller has no token, and the request is from "
            "another host or site. 404: unknown instance, tier, model or event. 413: the body is too long. "
            "422: the request is invalid."
        ),
    },
    "5XX": {"model": answers.Problem, "description": "503: too many operations are in flight."},
}
OPERATIONS_TAG, STATE_TAG, STREAM_TAG = "Operations", "State", "Stream"
MAX_WAIT_SECONDS = 60.0
MAX_EVENTS = 1000
"""Per response."""
Limit = Annotated[int, Query(ge=1, le=MAX_EVENTS)]
MAX_WHY = 100
"""Requests per response. Each instance is asked for as many."""
PAGE_FILES = Path(__file__).with_name("page")
PAGE_PREFIX = "/page/"
"""Path of the scripts and the style sheet. The page itself is at ``/``."""
PAGE_INDEX = "index.html"
CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Limit the page to its own scripts and its own controller, whatever names instances have."""


async def make_app(
    operations: Operations, history: History, token: str | None = None, grafana: str | None = None
) -> FastAPI:
    """Return the application. Clients must send the ``token``, if there is one.

    The page, its files, the API description and ``/healthz`` need no token. It takes a tenth of a second in
    all, in which a controller that begins to lead answers lookups.
    """
    bodies, authenticator = Bodies(), Authenticator(token)

    app = FastAPI(title="kvtier controller", version=__version__, description=DESCRIPTION, redoc_url=None)
    _add_public_routes(app, operations.registry, authenticator)
    # For all routes added below. A second router would create every route twice.
    app.router.dependencies += [Depends(authenticator.authenticate), Depends(operations.follow)]
    app.router.responses.update(_PROBLEMS)
    _add_operations(app.router, operations, bodies)
    await checkpoint()
    _add_queries(app.router, operations, history)
    await checkpoint()
    _add_why(app.router, operations, bodies)
    await checkpoint()
    lmcache.add_routes(app.router, operations, bodies)
    await checkpoint()
    _add_fleet(app.router, operations, history, grafana)
    mount_page(app)
    add_error_handlers(app, error_response, ControllerError)
    return app


def _add_public_routes(app: FastAPI, registry: Registry, authenticator: Authenticator) -> None:
    def describe(_: Request) -> Response:
        return JSONResponse(app.openapi())

    # In a thread, and before FastAPI's own route, which blocks the event loop for a tenth of a second.
    app.router.routes.insert(0, Route("/openapi.json", describe))

    @app.get("/healthz", tags=[STATE_TAG])
    async def health() -> answers.Health:
        """Check that the controller is alive. Needs no token."""
        return answers.Health(
            status="ok", version=__version__, instances=len(registry.members), leads=registry.term is not None
        )

    @app.websocket(CONNECT_PATH)
    async def connect(websocket: WebSocket) -> None:
        if (refusal := authenticator.refusal(websocket)) is not None:
            await websocket.send_denial_response(await error_response(websocket, refusal))
            return
        await websocket.accept()
        await connection.serve(registry, websocket)


async def error_response(_: HTTPConnection, error: Exception) -> Response:
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


class Authenticator:
    """Accepts clients that have the token.

    Without a token the controller listens on loopback only, which browsers on this host can still reach. To
    prevent cross-site requests and DNS rebinding, requests are refused if their ``Origin`` differs from their
    ``Host``, or if their ``Host`` is not a loopback name.
    """

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()

    def refusal(self, connection: HTTPConnection) -> HTTPException | None:
        """Return the error to refuse a client with, or ``None``."""
        if self._token is None:
            return None if _is_local(connection) else HTTPException(403, LOCAL_ONLY)
        return None if has_token(connection, self._token) else HTTPException(401, WRONG_TOKEN, BEARER)

    async def authenticate(self, connection: HTTPConnection) -> None:
        """Refuse clients with 401 or 403. A FastAPI dependency."""
        if (refusal := self.refusal(connection)) is not None:
            raise refusal


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


def _add_operations(router: APIRouter, operations: Operations, bodies: Bodies) -> None:
    """Add the endpoints of operations, including lookup."""
    decoder = lmcache.decoder
    lookup_body, move_body = Depends(bodies.of(LookupBody)), Depends(bodies.of(MoveBody, decoder))
    prefetch_body, clear_body = Depends(bodies.of(PrefetchBody)), Depends(bodies.of(ClearBody, decoder))
    pin_body, unpin_body = Depends(bodies.of(PinBody, decoder)), Depends(bodies.of(UnpinBody, decoder))

    @router.post("/lookup", tags=[OPERATIONS_TAG], openapi_extra=request_body_schema(LookupBody))
    async def lookup(body: LookupBody = lookup_body) -> lmcache.Layout:
        """Return how many leading tokens of a prompt each tier of each instance holds."""
        return lmcache.layout_of(operations.registry, await operations.lookup(body))

    @router.post("/move", tags=[OPERATIONS_TAG], openapi_extra=request_body_schema(MoveBody))
    async def move(body: MoveBody = move_body) -> answers.Accepted:
        """Move a prompt's chunks to another tier, of the same or another instance.

        A chunk is removed from the source only after the target has confirmed it. Chunks that the target
        already holds are not transferred again, so a move can be repeated at any time.
        """
        return _accepted(await operations.move(body))

    @router.post("/prefetch", tags=[OPERATIONS_TAG], openapi_extra=request_body_schema(PrefetchBody))
    async def prefetch(body: PrefetchBody = prefetch_body) -> answers.Accepted:
        """Prefetch a prompt's chunks into a tier.

        Sources are the instance's other tiers and shared pools, then the instance that holds most.
        """
        return _accepted(await operations.start(Prefetch, body))

    @router.post("/pin", tags=[OPERATIONS_TAG], openapi_extra=request_body_schema(PinBody))
    async def pin(body: PinBody = pin_body) -> answers.Accepted:
        """Protect the chunks of a prompt that a tier holds from eviction. Survives restarts of the instance.

        Moving or clearing the last copy that an instance has of a chunk unpins it. `unpinned` in the event's
        result counts these.
        """
        return _accepted(await operations.start(PinChunks, body))

    @router.post("/unpin", tags=[OPERATIONS_TAG], openapi_extra=request_body_schema(UnpinBody))
    async def unpin(body: UnpinBody = unpin_body) -> answers.Accepted:
        """Allow a prompt's chunks to be evicted again."""
        return _accepted(await operations.start(UnpinChunks, body))

    @router.post("/clear", tags=[OPERATIONS_TAG], openapi_extra=request_body_schema(ClearBody))
    async def clear(body: ClearBody = clear_body) -> answers.Accepted:
        """Remove a prompt's chunks, or all chunks, from one tier or all tiers of an instance.

        The event's result has the number of chunks and bytes removed.
        """
        return _accepted(await operations.clear(body))


def _add_queries(router: APIRouter, operations: Operations, history: History) -> None:
    """Add the read-only endpoints."""
    registry, log = operations.registry, operations.events
    metrics = ControllerMetrics(operations)

    @router.get("/events", tags=[STATE_TAG])
    async def events(limit: Limit = 100) -> answers.EventsAnswer:
        """List the latest events, newest first."""
        return answers.EventsAnswer(events=log.newest(limit))

    @router.get("/events/{event_id}", tags=[STATE_TAG])
    async def event(
        event_id: str,
        wait: Annotated[
            float, Query(ge=0, description="Wait until the event has ended, for at most this many seconds.")
        ] = 0,
    ) -> Event:
        """Return one event. Events are kept for some time after their end."""
        found = log.find(event_id)
        await log.wait(found, min(wait, MAX_WAIT_SECONDS))
        return found

    @router.get("/instances", tags=[STATE_TAG])
    async def instances() -> answers.InstancesAnswer:
        """List the registered instances, with the fill of their tiers."""
        return answers.of_members(registry.members.values(), registry.gone.values(), operations.pins)

    @router.get("/instances/{instance}", tags=[STATE_TAG])
    async def instance_with_history(instance: str) -> answers.InstanceWithHistory:
        """Return one instance, with its history over the last hour."""
        member = registry.find(instance)
        samples = (await history.read("hour", "instance", instance)).get(instance, ())
        return answers.with_history(member, operations.pins, samples)

    @router.get("/findings", tags=[STATE_TAG])
    async def findings() -> answers.FindingsAnswer:
        """Return what keeps instances from sharing chunks: other versions, and engines with other KV."""
        return answers.FindingsAnswer(findings=answers.findings_of(registry.members.values()))

    @router.get("/pins", tags=[STATE_TAG])
    async def pins(instance: str | None = None, limit: Limit = 100) -> answers.PinsAnswer:
        """List the pins of an instance, or of all, newest first, also of instances that are disconnected."""
        return answers.of_pins(operations.pins, instance, limit, registry.held)

    @router.get("/instances/{instance}/whatif", tags=[STATE_TAG])
    async def what_if(instance: str) -> answers.WhatIfAnswer:
        """Return what other capacities and policies of its tiers would bring to an instance.

        It estimates that from its lookups, and reports it every 30 seconds.
        """
        return answers.what_if(registry.find(instance))

    @router.get("/metrics", tags=[STATE_TAG], response_class=Response)
    async def prometheus() -> Response:
        """Return metrics of instances, chunks, events and lookups, in Prometheus' text format."""
        return metrics.response()


def _add_why(router: APIRouter, operations: Operations, bodies: Bodies) -> None:
    """Add the endpoints that ask all instances why tokens were not hits."""
    why_body = Depends(bodies.of(WhyBody))

    @router.get("/why", tags=[STATE_TAG])
    async def why(
        request: Annotated[str, Query(max_length=256, description="A part of the id of requests.")] = "",
        last: Annotated[int, Query(ge=0, le=MAX_WHY)] = 20,
        instance: str | None = None,
    ) -> answers.WhyAnswer:
        """Return what became of the last requests, of all instances or one, and where prompts part."""
        return await operations.explanations.requests(request, last, instance)

    @router.post("/why", tags=[STATE_TAG], openapi_extra=request_body_schema(WhyBody))
    async def why_prompt(body: WhyBody = why_body) -> answers.WhyPromptAnswer:
        """Return what each instance holds of a prompt, and why the rest is not held. Keeps nothing of it."""
        return await operations.explanations.prompt(body)


def _add_fleet(router: APIRouter, operations: Operations, history: History, grafana: str | None) -> None:
    """Add the endpoints about all instances together."""
    registry = operations.registry
    stream = Stream(registry, operations.events, operations.pins)

    @router.get("/history", tags=[STATE_TAG])
    async def of_span(
        span: Span = "hour",
        of: Kind = "fleet",
        name: Annotated[str | None, Query(max_length=256)] = None,
        total: Annotated[bool, Query(description="Only one sample for each name: the sum.")] = False,
    ) -> answers.HistoryAnswer:
        """Return what the fleet, or each model, tenant or instance, did in the last hour, day or week.

        `name` selects one, and is required of an instance.
        """
        if of == "instance" and name is None:
            raise WrongRequest("name: give the name of an instance")
        step, _ = LEVELS[span]
        found = await history.read(span, of, name, total=total)
        return answers.HistoryAnswer(span=span, step=step, history=found)

    @router.get("/peers", tags=[STATE_TAG])
    async def peers(instance: str | None = None, limit: Limit = 100) -> answers.PeersAnswer:
        """List the connections over which an instance, or each, fetches from others, and their throughput."""
        connected = registry.members.values()
        members = connected if instance is None else [registry.find(instance)]
        return answers.of_peers(connected, members, limit)

    @router.get("/whatif", tags=[STATE_TAG])
    async def what_if(limit: Limit = 10) -> answers.ImprovementsAnswer:
        """List what could be changed at all instances, the most useful first."""
        return answers.of_improvements(registry.members.values(), limit)

    @router.get("/about", tags=[STATE_TAG])
    async def about() -> answers.About:
        """Return the version of the controller, and where its dashboard is."""
        return answers.About(version=__version__, grafana=grafana)

    @router.get("/stream", tags=[STREAM_TAG], response_class=Response)
    async def changes() -> Response:
        """Stream server-sent events: `instances` with all instances, `event` with a changed event."""
        if stream.full:
            raise HTTPException(503, "too many clients are reading the stream")
        return Reader(stream)


def _accepted(event: Event) -> answers.Accepted:
    return answers.Accepted(event_id=event.event_id, num_tokens=event.num_tokens)


class _PageFile:
    """One file of the page, with its response headers."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._tag = f'"{blake2b(self._content, digest_size=12).hexdigest()}"'
        self._headers = {"Content-Type": CONTENT_TYPES[path.suffix], "ETag": self._tag, **PAGE_HEADERS}

    async def answer(self, request: Request) -> Response:
        """Return the file, or 304 if the browser has the current version."""
        # A compressing proxy makes the tag weak; it still identifies the same file.
        known = request.headers.get("If-None-Match", "").replace("W/", "").split(",")
        if self._tag in (tag.strip() for tag in known):
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)


def mount_page(app: FastAPI) -> None:
    """Serve the page at ``/`` and its files under ``/page/``, without a token: they contain no secrets.

    Reads the files once, which takes about 1 ms: no request waits for a disk. Browsers revalidate every file
    by its ETag, so an upgrade takes effect at once. Raises: OSError: the files are missing.
    """
    for path in PAGE_FILES.iterdir():
        if path.suffix in CONTENT_TYPES:
            at = "/" if path.name == PAGE_INDEX else PAGE_PREFIX + path.name
            app.router.routes.append(Route(at, _PageFile(path).answer))
