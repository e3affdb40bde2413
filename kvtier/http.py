"""An HTTP server within the running event loop: uvicorn, as one part of a process that has others.

The process keeps its signals, its log and its exit status. What a client may hold on to is bounded, whether
it sends nothing, sends without end or never reads: the process has files and memory to look after.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager, suppress
from ssl import SSLContext
from typing import Any

import anyio
import uvicorn
from anyio import CancelScope
from anyio.abc import TaskStatus
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import Server

from kvtier.errors import ChannelError
from kvtier.settings_peer import split_address
from kvtier.tasks import open_tasks

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
"""What ASGI calls an application."""

MOST_REQUESTS = 256
MOST_HEAD_BYTES = 16 * 1024
"""The address, the method and the headers of a request, where they do not come at once."""
MOST_MESSAGE_BYTES = 1024 * 1024
REQUEST_SECONDS = 10.0
"""How long a connection may stay without the head of a request."""
FINISH_SECONDS = 1.5
"""What is under way when the server ends has so long before its connection is cut off."""
CANCEL_SECONDS = 2
"""What goes on without a connection is cancelled so long after the end."""
UNREAD_SECONDS = 30.0
"""A connection whose other side takes nothing in for so long is cut off, even while it is being closed."""
BACKLOG = 256


@asynccontextmanager
async def serving(
    app: App,
    listen: str | tuple[str, int],
    *,
    setting: str = "listen",
    ssl: SSLContext | None = None,
    limit_concurrency: int = MOST_REQUESTS,
    ws_max_size: int = MOST_MESSAGE_BYTES,
    backlog: int = BACKLOG,
) -> AsyncIterator[tuple[str, int]]:
    """Serve ``app`` until the block is left, and tell the address: port 0 takes any that is free.

    From ``limit_concurrency`` connections on a request is answered with 503, from twice as many on a
    connection is closed at once; WebSockets count as connections. A WebSocket message has ``ws_max_size``
    bytes at most, and is not compressed: it is mostly keys, which are random. ``backlog`` is how many
    connections may be made while the loop is busy; who comes later tries again after a second.

    On the way out requests under way may finish, for two seconds at most. The start and the end of the
    application itself (its "lifespan", where it has one) are waited for, however long they take, and what
    fails in its start is raised as it is. Raises :class:`kvtier.errors.ChannelError` where this cannot be
    listened on; ``setting`` is what the message calls the setting to change.
    """
    _be_quiet()
    watched = _WatchedStart(app)
    config = uvicorn.Config(
        watched,
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
        h11_max_incomplete_event_size=MOST_HEAD_BYTES,
        workers=1,
    )
    config.load()
    config.ssl = ssl
    server = _Server(config)
    with await _bound(listen, setting, backlog) as listener:
        host, port = listener.getsockname()[:2]
        async with open_tasks() as tasks:
            await tasks.start(_run, server, watched, listener)
            try:
                yield host, port
            finally:
                server.should_exit = True


def _be_quiet() -> None:
    """Have uvicorn tell of errors only, unless this process has said how much it wants to hear."""
    logger = logging.getLogger("uvicorn.error")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)


async def _bound(listen: str | tuple[str, int], setting: str, backlog: int) -> socket.socket:
    try:
        host, port = split_address(listen) if isinstance(listen, str) else listen
    except ValueError as error:
        raise ChannelError(f"{setting}: {error}") from error
    if not 0 <= port <= 65535:  # A resolver would shorten it to 16 bits.
        raise ChannelError(f"there is no port {port}: write another in {setting}")
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        listener = socket.create_server(address, family=family, backlog=backlog)
    except (OSError, UnicodeError) as error:
        code = error.errno if isinstance(error, OSError) else None
        why = os.strerror(code) if code and code > 0 else getattr(error, "strerror", None) or error
        raise ChannelError(
            f"cannot listen on {host}:{port}: {why}: write another address or port in {setting}"
        ) from error
    # Or the body of an answer waits 40 ms until its head is acknowledged. What is accepted inherits it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # So is this. What waits for a reader that never reads would keep its connection for good.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_SECONDS * 1000))
    return listener


async def _run(
    server: _Server, watched: _WatchedStart, listener: socket.socket, *, task_status: TaskStatus[None]
) -> None:
    # Shielded: uvicorn would leave connections and tasks behind where it is cancelled. It is told to end.
    with CancelScope(shield=True):
        server.when_started = task_status.started
        with suppress(SystemExit):  # Some versions say so that it has not started.
            await server.serve([listener])
        if not server.started:
            raise watched.error or ChannelError("the application could not start: its log says why")


class _WatchedStart:
    """An application of whose failed start the exception is kept, which uvicorn would only log."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.error: BaseException | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def send_quietly(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed":
                message = {"type": message["type"]}  # Without the traceback.
            await send(message)

        try:
            await self._app(scope, receive, send_quietly)
        except BaseException as error:
            self.error = error
            raise


class _Server(Server):
    when_started: Callable[[], None]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for whoever runs this process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.when_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cut = asyncio.get_running_loop().call_later(FINISH_SECONDS, self._cut_off)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()
            self._cut_off()
            if self.server_state.tasks:  # Cancelled by now.
                await asyncio.wait(self.server_state.tasks, timeout=CANCEL_SECONDS)

    def _cut_off(self) -> None:
        """End streams that have no end, and connections that nobody reads: their requests are told."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _Connection(H11Protocol):
    """One that is closed where no request comes, be it never or bit by bit, and where there are too many."""

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*arguments, **named)
        self.access_log = False
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > 2 * self.limit_concurrency:
            transport.abort()
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._patience is not None:
            self._patience.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def _expect_request(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self.loop.call_later(REQUEST_SECONDS, self._close_if_idle, self.cycle)

    def _close_if_idle(self, last: object) -> None:
        """A WebSocket is not among the connections under this protocol, nor is one that is closed."""
        if self.cycle is last and self in self.connections:
            self.transport.abort()
