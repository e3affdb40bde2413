"""A controller that does not lead: it answers lookups, and forwards all else to the one that leads.

A client may ask any controller. While none leads, its request waits for one.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import httpx
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.concurrency.tasks import open_tasks
from kvtier.fleet.controller.app import PAGE_PREFIX, Authenticator, error_response

if TYPE_CHECKING:
    from kvtier.fleet.controller.shared_state import Lease, SharedState

WAIT_SECONDS = 5.0
"""How long a request waits for a controller that leads."""
RETRY_SECONDS = 0.1
CONNECT_SECONDS = 1.0
ANSWERED_HERE = frozenset(("/", "/healthz", "/metrics", "/docs", "/openapi.json"))
FROM_THE_INDEX = frozenset(("/lookup", "/why"))
"""Answered here once the index is complete. All else needs operations, pins or the history of the leader."""
_OF_ONE_CONNECTION = frozenset(
    (b"connection", b"date", b"expect", b"host", b"keep-alive", b"transfer-encoding", b"upgrade")
)
# It names the site of a page that this controller has served, and was checked here.
_NOT_FORWARDED = _OF_ONE_CONNECTION | {b"origin"}


class Standby:
    """The ASGI application of a controller that shares its state."""

    def __init__(
        self,
        app: ASGIApp,
        state: SharedState,
        is_ready: Callable[[], bool],
        authenticator: Authenticator,
        verify: ssl.SSLContext | bool,
    ) -> None:
        """``app`` answers what any controller can. ``verify`` is for connections to the others.

        ``is_ready`` returns whether this controller knows what all instances hold.
        """
        self.state = state
        self.leading: ASGIApp | None = None
        """Serves all clients while this controller leads."""
        self._app = app
        self._is_ready = is_ready
        self._authenticator = authenticator
        # No timeout: an event may be waited for, and a stream has no end. See `_forward`.
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, verify=verify)

    async def aclose(self) -> None:
        """Close the connections to the leader."""
        await self._http.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or forward it."""
        if (app := self._answering(scope)) is not None:
            await app(scope, receive, send)
            return
        if (refusal := self._authenticator.refusal(HTTPConnection(scope))) is not None:
            await (await error_response(HTTPConnection(scope), refusal))(scope, receive, send)
            return
        forwarded = Forwarded(scope, receive, send)
        deadline = anyio.current_time() + WAIT_SECONDS
        while forwarded.may_be_sent and anyio.current_time() < deadline:
            if (app := self._answering(scope)) is not None:
                await app(scope, receive, send)
                return
            if (lease := self.state.lease) is not None and not lease.mine:
                await self._forward(forwarded, lease)
            with anyio.move_on_after(RETRY_SECONDS):
                await self.state.changes.after(self.state.changes.count)
        if not (forwarded.answering or forwarded.left):
            await forwarded.refuse()

    def _answering(self, scope: Scope) -> ASGIApp | None:
        """Return what answers here and now; ``None`` if another controller has to."""
        if self.leading is not None:
            return self.leading
        # A target such as `@host/` would become a part of the leader's address.
        is_path = scope["type"] == "http" and scope["raw_path"].startswith(b"/")
        if not is_path or scope["path"] in ANSWERED_HERE or scope["path"].startswith(PAGE_PREFIX):
            return self._app
        knows = self._is_ready() or (self.state.has_asked and self.state.lease is None)
        return self._app if scope["path"] in FROM_THE_INDEX and knows else None

    async def _forward(self, forwarded: Forwarded, lease: Lease) -> None:
        """Send a request to the leader, until it has answered, the client leaves, or another one leads."""
        async with open_tasks() as tasks:

            async def watch() -> None:
                while self.state.lease == lease:
                    await self.state.changes.after(self.state.changes.count)
                tasks.cancel_scope.cancel()

            async def watch_client() -> None:
                await forwarded.wait_until_left()
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            tasks.start_soon(watch_client)
            with suppress(httpx.TransportError):
                await forwarded.exchange(self._http, lease.url)
            tasks.cancel_scope.cancel()


class Forwarded:
    """A request on its way to a leader, and its answer on the way back."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._changes = scope["method"] != "GET"
        self._sent = self.answering = self.left = False
        self._received = anyio.Event()

    @property
    def may_be_sent(self) -> bool:
        """Whether no leader can have begun to execute it, or it changes nothing."""
        return not (self.answering or self.left or self._sent)

    async def wait_until_left(self) -> None:
        """Wait until the client has closed its connection."""
        if self._changes:
            await self._received.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left = True

    async def exchange(self, http: httpx.AsyncClient, url: str) -> None:
        """Send it to a leader, and its answer to the client. Raises: httpx.TransportError."""
        path, query = self._scope["raw_path"].decode("ascii"), self._scope["query_string"].decode("ascii")
        headers = [header for header in self._scope["headers"] if header[0] not in _NOT_FORWARDED]
        request = http.build_request(
            self._scope["method"],
            f"{url}{path}?{query}" if query else f"{url}{path}",
            headers=headers,
            content=self._body() if self._changes else None,
        )
        response = await http.send(request, stream=True)
        try:
            self.answering = True
            kept = [pair for pair in response.headers.raw if pair[0].lower() not in _OF_ONE_CONNECTION]
            await self._send({"type": "http.response.start", "status": response.status_code, "headers": kept})
            async for part in response.aiter_raw():
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
            await self._send({"type": "http.response.body"})
        finally:
            await response.aclose()

    async def _body(self) -> AsyncIterator[bytes]:
        self._sent, more = True, True
        while more:
            message: Message = await self._receive()
            yield message.get("body", b"")
            more = message.get("more_body", False)
        self._received.set()

    async def refuse(self) -> None:
        """Answer that no controller leads, or that the one that had the request has ended."""
        detail = (
            "the leading controller ended before it answered: GET /events shows whether it accepted this"
            if self._sent
            else "no controller leads: is the server that --state names reachable?"
        )
        error = HTTPException(503, detail, {"Retry-After": "1"})
        response = await error_response(HTTPConnection(self._scope), error)
        await response(self._scope, self._receive, self._send)
