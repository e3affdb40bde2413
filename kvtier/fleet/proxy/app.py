"""The proxy's HTTP application: the OpenAI API for clients, and monitoring and ``/engines`` for operators."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvtier.fleet.proxy.body import CHAT_PATH
from kvtier.fleet.proxy.client import Refused, error_body
from kvtier.fleet.proxy.exchange import Exchange, list_models
from kvtier.fleet.proxy.metrics import ProxyMetrics
from kvtier.fleet.proxy.proxy import Proxy
from kvtier.fleet.proxy.settings import URL, engine_url, peer_address
from kvtier.fleet.proxy.upstream import Role, State, Upstream
from kvtier.fleet.service import BEARER, add_error_handlers, has_token
from kvtier.settings.peer import is_loopback
from kvtier.version import __version__

COMPLETIONS = ("/v1/completions", CHAT_PATH)
FORBIDDEN = "/engines is open to this host only, or to clients with the token of --token-file"


class EngineBody(BaseModel):
    """Request to add an engine."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    role: Role
    url: URL
    peer: Annotated[str, AfterValidator(peer_address)] | None = None


class EngineAnswer(BaseModel):
    """State of one engine, from its :class:`Upstream`."""

    role: Role
    url: str
    state: State
    why: str = Field(validation_alias="reason")
    peer: str | None
    instance: str | None
    load: int
    served: int
    failed: int
    remembered_blocks: int


class _Endpoint:
    """ASGI application that creates an :class:`Exchange` per request."""

    def __init__(self, proxy: Proxy, path: str) -> None:
        self._proxy = proxy
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Exchange(self._proxy, self._path)(scope, receive, send)


def make_app(proxy: Proxy) -> FastAPI:
    """Return the ASGI application of a proxy."""

    async def models(request: Request) -> Response:
        return await list_models(proxy.upstreams, request.headers.raw)

    app = FastAPI(title="kvtier proxy", version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    # Plain routes instead of FastAPI's: an exchange reads the body, responds and handles disconnects itself.
    app.router.routes.extend(Route(path, _Endpoint(proxy, path), methods=["POST"]) for path in COMPLETIONS)
    app.router.routes.append(Route("/v1/models", models, methods=["GET"]))
    _add_monitoring(app, proxy)
    app.include_router(_engines(proxy))
    add_error_handlers(app, _error_response, Refused)
    return app


def _add_monitoring(app: FastAPI, proxy: Proxy) -> None:
    metrics = ProxyMetrics(proxy.statistics, proxy.admission, proxy.upstreams)

    @app.get("/health")
    async def health() -> Response:
        """Return 200 while the proxy can serve requests, else 503."""
        up = {role: sum(upstream.state == State.UP for upstream in proxy.upstreams.of(role)) for role in Role}
        draining = proxy.admission.draining
        status = "draining" if draining else "ok" if up[Role.DECODE] else "no decode engine is up"
        content = {"status": status, "version": __version__, "prefill": up[Role.PREFILL]}
        return JSONResponse({**content, "decode": up[Role.DECODE]}, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return metrics.response()

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        statistics = proxy.statistics
        return {
            "prefill_ttft": statistics.prefill.summary(),
            "first_byte": statistics.first_byte.summary(),
            "requests": statistics.requests,
            "prefills": statistics.prefills,
            "skipped_prefills": statistics.skipped,
            "retries": statistics.retries,
            "lookups": statistics.lookups,
            "transferred_tokens": statistics.transferred_tokens,
            "in_flight": proxy.admission.in_flight,
        }


def _engines(proxy: Proxy) -> APIRouter:
    """Return the routes that list, add and remove engines; they require authorization."""
    secret = proxy.settings.token
    token = None if secret is None else secret.get_secret_value().encode()

    async def authorize(request: Request) -> None:
        if token is not None:
            if not has_token(request, token):
                raise HTTPException(401, FORBIDDEN, BEARER)
            return
        # Web pages in a browser on this host can reach it as well, but their requests have an Origin header.
        if request.client is None or not is_loopback(request.client.host) or "origin" in request.headers:
            raise HTTPException(403, FORBIDDEN)

    router = APIRouter(dependencies=[Depends(authorize)])

    @router.get("/engines", response_model=list[EngineAnswer])
    async def engines() -> list[Upstream]:
        return list(proxy.upstreams)

    @router.post("/engines", status_code=201, response_model=EngineAnswer)
    async def add(body: EngineBody) -> Upstream:
        """Add an engine; it gets requests once its health check passes."""
        try:
            return proxy.add(body.role, body.url, body.peer)
        except ValueError as error:
            raise HTTPException(409, str(error)) from None

    @router.delete("/engines", response_model=list[EngineAnswer])
    async def remove(
        url: Annotated[str, Query()], role: Annotated[Role | None, Query()] = None
    ) -> list[Upstream]:
        """Remove an engine from one role or both. Requests in flight complete."""
        roles = tuple(Role) if role is None else (role,)
        try:
            found = [upstream for role in roles if (upstream := proxy.upstreams.find(role, engine_url(url)))]
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        if not found:
            raise HTTPException(404, f"unknown engine {url}")
        for upstream in found:
            proxy.upstreams.remove(upstream)
        return found

    return router


async def _error_response(_: Request, error: Exception) -> Response:
    """Return an error in the format of OpenAI's API."""
    match error:
        case Refused():
            return JSONResponse(error_body(error.status, str(error)), error.status, error.headers)
        case HTTPException():
            return JSONResponse(error_body(error.status_code, error.detail), error.status_code, error.headers)
        case RequestValidationError():
            first = error.errors()[0]
            location = ".".join(str(part) for part in first["loc"])
            message = str(first["msg"]).removeprefix("Value error, ")
            return JSONResponse(error_body(422, f"{location}: {message}"), 422)
        case _:
            return JSONResponse(error_body(500, "internal error in the proxy: see its log"), 500)
