"""The proxy's HTTP application: what clients of an engine ask, and what those ask who run it."""

from __future__ import annotations

import hmac
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import kvtier
from kvtier.http import Message, Receive, Send
from kvtier.proxy.body import CHAT_PATH
from kvtier.proxy.engine import Engine, Role, State
from kvtier.proxy.errors import error_body
from kvtier.proxy.exchange import Exchange
from kvtier.proxy.metrics import ProxyMetrics
from kvtier.proxy.models import Models
from kvtier.proxy.proxy import Proxy
from kvtier.proxy.settings import engine_url, is_loopback, peer_address

COMPLETIONS = ("/v1/completions", CHAT_PATH)
URL = Annotated[str, AfterValidator(engine_url)]
REFUSAL = "engines are changed from this host alone, or with the token of --token-file"


class EngineBody(BaseModel):
    """An engine to be used."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    role: Role
    url: URL
    peer: Annotated[str, AfterValidator(peer_address)] | None = None


class EngineAnswer(BaseModel):
    """An engine that is used."""

    role: Role
    url: str
    state: State
    why: str
    peer: str | None
    instance: str | None
    load: int
    served: int
    failed: int
    remembered_blocks: int


class _Endpoint:
    """Hands each request to an exchange of its own."""

    def __init__(self, proxy: Proxy, path: str) -> None:
        self._proxy = proxy
        self._path = path

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        await Exchange(self._proxy, self._path)(scope, receive, send)


def make_app(proxy: Proxy) -> FastAPI:
    """The application of one proxy."""
    app = FastAPI(
        title="kvtier proxy", version=kvtier.__version__, openapi_url=None, docs_url=None, redoc_url=None
    )
    # Not FastAPI's own routes: an exchange reads, answers and is cancelled by itself.
    app.router.routes.extend(Route(path, _Endpoint(proxy, path), methods=["POST"]) for path in COMPLETIONS)
    app.router.routes.append(Route("/v1/models", Models(proxy), methods=["GET"]))
    _add_knowledge(app, proxy)
    app.include_router(_engines(proxy))
    app.add_exception_handler(HTTPException, _explain)
    app.add_exception_handler(RequestValidationError, _explain)
    app.add_exception_handler(Exception, _explain)
    return app


def _add_knowledge(app: FastAPI, proxy: Proxy) -> None:
    metrics = ProxyMetrics(proxy)

    @app.get("/health")
    async def health() -> Response:
        """200 while requests can be answered."""
        up = {role: sum(engine.state == State.UP for engine in proxy.fleet.of(role)) for role in Role}
        draining = proxy.admission.draining
        status = "draining" if draining else "ok" if up[Role.DECODE] else "no decode engine is up"
        content = {"status": status, "version": kvtier.__version__, "prefill": up[Role.PREFILL]}
        return JSONResponse({**content, "decode": up[Role.DECODE]}, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        """What Prometheus reads."""
        return metrics.answer()

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        """How long prefills took, as it is printed at the end, and what became of all requests."""
        statistics = proxy.statistics
        return {
            "prefill_ttft": statistics.prefill.summary(),
            "first_byte": statistics.first_byte.summary(),
            "requests": statistics.requests,
            "prefills": statistics.prefills,
            "skipped_prefills": statistics.skipped,
            "retries": statistics.retries,
            "lookups": statistics.look_ups,
            "handed_over_tokens": statistics.handed_over_tokens,
            "under_way": proxy.admission.under_way,
        }


def _engines(proxy: Proxy) -> APIRouter:
    """Adding and removing engines, for whoever may."""
    secret = proxy.settings.token
    token = None if secret is None else secret.get_secret_value().encode()

    async def let_in(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if token is not None:
            if not hmac.compare_digest(given.strip().encode(), token) or scheme.lower() != "bearer":
                raise HTTPException(401, REFUSAL, {"WWW-Authenticate": "Bearer"})
            return
        # A page in a browser of this host reaches it, too, and says where it is from.
        if request.client is None or not is_loopback(request.client.host) or "origin" in request.headers:
            raise HTTPException(403, REFUSAL)

    router = APIRouter(dependencies=[Depends(let_in)])

    @router.get("/engines")
    async def engines() -> list[EngineAnswer]:
        """All engines, and how they are."""
        return [_told(engine) for engine in proxy.fleet]

    @router.post("/engines", status_code=201)
    async def add(body: EngineBody) -> EngineAnswer:
        """Use one more engine, as soon as it answers."""
        try:
            return _told(proxy.add(body.role, body.url, body.peer))
        except ValueError as error:
            raise HTTPException(409, str(error)) from None

    @router.delete("/engines")
    async def remove(
        url: Annotated[str, Query()], role: Annotated[Role | None, Query()] = None
    ) -> list[EngineAnswer]:
        """Send an engine nothing more, in one role or in both. What is under way there may end."""
        roles = tuple(Role) if role is None else (role,)
        try:
            found = [engine for one in roles if (engine := proxy.fleet.find(one, engine_url(url)))]
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        if not found:
            raise HTTPException(404, f"there is no engine {url}")
        for engine in found:
            proxy.remove(engine)
        return [_told(engine) for engine in found]

    return router


def _told(engine: Engine) -> EngineAnswer:
    return EngineAnswer(
        role=engine.role,
        url=engine.url,
        state=engine.state,
        why=engine.why,
        peer=engine.peer,
        instance=engine.instance,
        load=engine.load,
        served=engine.served,
        failed=engine.failed,
        remembered_blocks=len(engine.memory),
    )


async def _explain(_: Request, error: Exception) -> Response:
    """One sentence, as OpenAI's API has it."""
    match error:
        case HTTPException():
            return JSONResponse(error_body(error.status_code, error.detail), error.status_code, error.headers)
        case RequestValidationError():
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            said = str(first["msg"]).removeprefix("Value error, ")
            return JSONResponse(error_body(422, f"{where}: {said}"), 422)
        case _:
            return JSONResponse(error_body(500, "the proxy has made a mistake, which its log describes"), 500)
