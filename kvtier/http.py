"""An HTTP server (uvicorn) embedded in the running event loop.

The process keeps control of its signals, log and exit status. Resources held by a client are bounded, whether
it sends nothing, sends forever or never reads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from io import FileIO
from pathlib import Path
from ssl import SSLContext
from typing import Any

import anyio
import h11
from anyio import CancelScope
from anyio.abc import TaskStatus
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config, Server
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvtier.concurrency.processes import LACKING, describe_lack
from kvtier.concurrency.tasks import open_tasks
from kvtier.errors import ChannelError
from kvtier.logs import RateLimitedLog
from kvtier.settings.peer import split_address

logger = logging.getLogger("kvtier")

MAX_REQUESTS = 256
MAX_HEAD_BYTES = 16 * 1024
"""Maximum size of a request's method, path and headers if they arrive in several reads."""
MAX_MESSAGE_BYTES = 1024 * 1024
REQUEST_SECONDS = 10.0
"""How long a connection may stay open without complete request headers."""
FINISH_SECONDS = 1.5
"""On shutdown, requests in flight may finish for this long before their connections are aborted."""
CANCEL_SECONDS = 2
"""On shutdown, tasks without a connection are cancelled after this long."""
UNREAD_SECONDS = 30.0
"""A connection whose peer accepts no data for this long is aborted, even while it is closing."""
BACKLOG = 256
MAX_ACCEPTED = 64
"""New connections before open ones are served. asyncio alone would accept a whole backlog."""
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-type: text/plain\r\ncontent-length: 20\r\n\r\ntoo many connections"
)
MAX_EVENTS = 32
"""Parts of requests that a connection parses before others are served: one takes some 15 us."""


@asynccontextmanager
async def serving(
    app: ASGIApp,
    listen: str,
    *,
    setting: str = "listen",
    ssl: SSLContext | None = None,
    limit_concurrency: int = MAX_REQUESTS,
    max_connections: int | None = None,
    ws_max_size: int = MAX_MESSAGE_BYTES,
    backlog: int = BACKLOG,
) -> AsyncIterator[tuple[str, int]]:
    """Serve ``app`` until the context exits. Yields the bound address; port 0 selects a free port.

    Above ``limit_concurrency`` connections, requests get a 503; above twice that (``max_connections``), new
    ones get one and are closed at once, as are those for which there is no file descriptor. WebSockets count
    as connections. A WebSocket message has at most ``ws_max_size`` bytes and is not compressed, because it
    consists mostly of random keys. ``backlog`` is the length of the accept queue; a client that finds it full
    retries its SYN after a second.

    On exit, requests in flight may finish for up to two seconds. Startup and shutdown of the application (its
    ASGI lifespan, if any) are awaited without a timeout, and an exception during startup propagates. Raises
    :class:`kvtier.errors.ChannelError` if the address cannot be bound; its message names ``setting``.
    """
    _limit_uvicorn_log()
    lifespan = _LifespanErrors(app)
    config = Config(
        lifespan,
        interface="asgi3",
        http=_Connection,
        ws="websockets-sansio",
        ws_max_size=ws_max_size,
        ws_per_message_deflate=False,
        lifespan="auto",
        log_config=None,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=limit_concurrency,
        backlog=backlog,
        timeout_graceful_shutdown=CANCEL_SECONDS,
        workers=1,
    )
    # load() makes a context from the names of files, or resets it: one that exists is set after it.
    config.load()
    config.ssl = ssl
    server = Server(config)
    if max_connections is None:
        max_connections = 2 * limit_concurrency
    with (
        await _bind(listen, setting, backlog) as bound,
        _Listener(bound, max_connections, b"" if ssl else REFUSAL) as listener,
    ):
        host, port = listener.getsockname()[:2]
        async with open_tasks() as tasks:
            await tasks.start(_run, server, lifespan, listener)
            try:
                yield host, port
            finally:
                # The tasks are not cancelled: the end of the block waits until the server has stopped.
                server.should_exit = True


def _limit_uvicorn_log() -> None:
    """Limit uvicorn's log to errors, unless its level is configured."""
    logger = logging.getLogger("uvicorn.error")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)


async def _bind(listen: str, setting: str, backlog: int) -> socket.socket:
    try:
        host, port = split_address(listen)
    except ValueError as error:
        raise ChannelError(f"{setting}: {error}") from error
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        listener = socket.create_server(address, family=family, backlog=backlog)
    except (OSError, UnicodeError) as error:
        code = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(code) if code and code > 0 else getattr(error, "strerror", None) or error
        raise ChannelError(
            f"cannot listen on {host}:{port}: {reason}: set another address or port in {setting}"
        ) from error
    # Without it, a response body waits 40 ms for the ACK of the headers. Accepted sockets inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Inherited as well. Without it, a response to a client that never reads holds its connection forever.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_SECONDS * 1000))
    return listener


class _Listener(socket.socket):
    """Refuses connections beyond a limit, and those for which there is no descriptor.

    Without a descriptor, asyncio would let clients wait, and log ``backlog`` tracebacks a second.
    """

    def __init__(self, listener: socket.socket, max_connections: int, refusal: bytes) -> None:
        super().__init__(fileno=listener.detach())
        self._max_connections = max_connections
        self._refusal = refusal
        self._accepted = 0
        self.connections = 0
        """Those that are open."""
        self._spare = _spare_descriptor()
        self._warn = RateLimitedLog(logger)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises ``BlockingIOError`` if none waits, or others have to be served."""
        while True:
            self._accepted += 1
            if self._accepted > MAX_ACCEPTED:  # asyncio calls again until this is raised.
                self._accepted = 0
                raise BlockingIOError
            try:
                accepted, address = super().accept()
                if self.connections < self._max_connections:
                    return _Accepted(self, accepted), address
                self._refuse(accepted)
            except OSError as error:
                if error.errno not in LACKING or not self._refuse_next(error):
                    raise

    def close(self) -> None:
        """Close it. Idempotent."""
        super().close()
        self._spare.close()

    def _refuse(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        with accepted, suppress(OSError):
            accepted.send(self._refusal)
            accepted.recv(MAX_HEAD_BYTES)  # To close with data unread would reset the connection.

    def _refuse_next(self, error: OSError) -> bool:
        """Refuse the next connection, with the descriptor kept for that; return whether there was one."""
        if self._spare.closed:
            return False
        self._spare.close()
        try:
            self._refuse(super().accept()[0])
        finally:
            with suppress(OSError):
                self._spare = _spare_descriptor()
        self._warn("%s:%d refuses connections: %s", *self.getsockname()[:2], describe_lack(error))
        return True


def _spare_descriptor() -> FileIO:
    return Path(os.devnull).open("rb", buffering=0)


class _Accepted(socket.socket):
    """Counts as one of its listener's connections until it is closed."""

    def __init__(self, listener: _Listener, accepted: socket.socket) -> None:
        super().__init__(fileno=accepted.detach())
        self._listener = listener
        listener.connections += 1

    def close(self) -> None:
        """Close it. Idempotent."""
        if self.fileno() >= 0:
            self._listener.connections -= 1
        super().close()


async def _run(
    server: Server, lifespan: _LifespanErrors, listener: socket.socket, *, task_status: TaskStatus[None]
) -> None:
    """Do what :meth:`Server.serve` does, without its signal handlers and with a limited shutdown."""
    # Shielded: uvicorn leaks connections and tasks when cancelled. should_exit stops it.
    with CancelScope(shield=True):
        server.lifespan = server.config.lifespan_class(server.config)
        with suppress(SystemExit):  # Some versions of uvicorn raise it if startup failed.
            await server.startup([listener])
        if not server.started:
            raise lifespan.error or ChannelError("the application failed to start: see its log")
        task_status.started()
        await server.main_loop()
        timer = asyncio.get_running_loop().call_later(FINISH_SECONDS, _abort_connections, server)
        try:
            await server.shutdown([listener])
        finally:
            timer.cancel()
            _abort_connections(server)
            if server.server_state.tasks:  # Already cancelled.
                await asyncio.wait(server.server_state.tasks, timeout=CANCEL_SECONDS)


def _abort_connections(server: Server) -> None:
    """Abort endless streams and connections with a stalled reader. Their requests see a disconnect."""
    for connection in list(server.server_state.connections):
        connection.transport.abort()


class _LifespanErrors:
    """Wraps an application and keeps the exception of a failed startup, which uvicorn would only log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.error: BaseException | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def send_without_traceback(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed":
                message = {"type": message["type"]}
            await send(message)

        try:
            await self._app(scope, receive, send_without_traceback)
        except BaseException as error:
            self.error = error
            raise


class _Parser(h11.Connection):
    """Parses at most :data:`MAX_EVENTS` parts of requests at a time."""

    left = MAX_EVENTS

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if not self.left:
            return h11.NEED_DATA
        self.left -= 1
        return super().next_event()


class _Flow(FlowControl):
    """Does not resume reading while received data is waiting to be parsed."""

    behind = False

    def resume_reading(self) -> None:
        if self.behind:
            self.read_paused = False
        else:
            super().resume_reading()


class _Connection(H11Protocol):
    """Connection with a request timeout, also against slow senders.

    Of a body in chunks of one byte each, one read has 43,000, which take seconds to parse: they are parsed in
    slices.
    """

    conn: _Parser
    flow: _Flow

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*arguments, **named)
        # In place of the one that uvicorn has made: its class is no parameter.
        self.conn = _Parser(h11.SERVER, MAX_HEAD_BYTES)
        self.access_log = False
        self._timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timeout is not None:
            self._timeout.cancel()

    def handle_events(self) -> None:
        """Parse some of what was received, and the rest after others were served."""
        self.conn.left = MAX_EVENTS
        super().handle_events()
        if not self.conn.left:
            self.flow.behind = True
            self.transport.pause_reading()
            self.loop.call_soon(self._catch_up)
        elif self.flow.behind:
            self.flow.behind = False
            if not self.flow.read_paused:
                self.transport.resume_reading()

    def _catch_up(self) -> None:
        if self.flow.behind and not self.transport.is_closing():
            self.handle_events()

    def send_400_response(self, msg: str) -> None:
        """Respond to an invalid request, and end it."""
        with suppress(h11.LocalProtocolError):  # A response has begun, or must have no body.
            super().send_400_response(msg)
        self.transport.close()
        if self.cycle is not None:  # The application would wait for the rest of the body forever.
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def _expect_request(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
        self._timeout = self.loop.call_later(REQUEST_SECONDS, self._close_if_idle, self.cycle)

    def _close_if_idle(self, last: object) -> None:
        """Abort the connection if idle. A WebSocket or a closed connection is not in ``self.connections``."""
        if self.cycle is last and self in self.connections:
            self.transport.abort()
