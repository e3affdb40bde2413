"""Endpoints over a real WebSocket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import pytest
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect

from kvtier.errors import ChannelClosed, ProtocolError, Rejected
from kvtier.http import serving
from kvtier.rpc.endpoint import Endpoint
from kvtier.rpc.frames import MAX_FRAME_BYTES
from kvtier.rpc.websocket import ClientWire, ServerWire
from tests.rigs.waiting import until
from tests.rpc.endpoints import Answer, Ask, Hello, Note, Welcome, decode

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def connected(serve: Callable[[WebSocket], Awaitable[None]]) -> AsyncIterator[ClientConnection]:
    async def accept(websocket: WebSocket) -> None:
        await websocket.accept()
        await serve(websocket)

    app = Starlette(routes=[WebSocketRoute("/", accept)])
    async with (
        serving(app, "127.0.0.1:0", ws_max_size=MAX_FRAME_BYTES) as (_, port),
        connect(f"ws://127.0.0.1:{port}", compression=None, proxy=None, close_timeout=1) as connection,
    ):
        yield connection


class Server:
    """Runs an endpoint until its connection ends."""

    def __init__(self, timeout: float | None = None, limit: int = 1 << 20) -> None:
        self.endpoint: Endpoint | None = None
        self.cause: Exception | None = None
        self._timeout = timeout
        self._limit = limit

    async def __call__(self, websocket: WebSocket) -> None:
        endpoint = self.endpoint = Endpoint(ServerWire(websocket, self._limit, self._timeout), decode)

        async def handle(message: Ask | Hello) -> None:
            if isinstance(message, Hello):
                endpoint.send(Welcome(message.version))
            else:
                endpoint.send(Answer(message.ticket, message.text.upper()))

        self.cause = await endpoint.run(handle)


async def test_greeting_and_requests() -> None:
    server = Server()
    async with connected(server) as connection, anyio.create_task_group() as tasks:
        endpoint = Endpoint(ClientWire(connection), decode)
        assert await endpoint.greet(Hello(3), Welcome, 3, 30.0) == Welcome(3)
        tasks.start_soon(endpoint.run)
        call = endpoint.call(lambda ticket: Ask(ticket, "hello"), Answer, lambda answer: answer.text)
        assert await call.reply() == "HELLO"
        assert server.endpoint is not None
        assert await server.endpoint.ping().reply()
        assert endpoint._wire.unsent == 0
        await connection.close()
        await until(lambda: endpoint.closed and server.cause)
        assert isinstance(endpoint.error, ChannelClosed)
        assert isinstance(server.cause, ChannelClosed)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("text", "the other side sends text or nothing"),
        (b"", "the other side sends text or nothing"),
        (b"\xc1", "not a message"),
    ],
)
async def test_invalid_message_is_refused(data: bytes | str, reason: str) -> None:
    async with connected(Server()) as connection:
        await connection.send(data)
        error = await Endpoint(ClientWire(connection), decode).run()
        assert isinstance(error, Rejected)
        assert reason in str(error)


async def test_text_of_a_server_ends_the_connection() -> None:
    async def serve(websocket: WebSocket) -> None:
        await websocket.send_text("hello")
        await websocket.receive()

    async with connected(serve) as connection:
        error = await Endpoint(ClientWire(connection), decode).run()
        assert isinstance(error, ProtocolError)
        assert "sends text" in str(error)


async def test_client_that_reads_nothing_is_disconnected() -> None:
    server = Server(timeout=0.2, limit=64 << 20)
    async with connected(server) as connection:
        await until(lambda: server.endpoint)
        connection.transport.pause_reading()
        assert server.endpoint is not None
        for _ in range(16):
            server.endpoint.send(Note(bytes(MAX_FRAME_BYTES - 100)))
        await until(lambda: server.cause)
        assert str(server.cause) == "the other side has read nothing for 0.2 s"
        connection.transport.abort()


async def test_too_long_queue_ends_the_connection() -> None:
    server = Server()
    async with connected(server) as connection:
        await until(lambda: server.endpoint)
        connection.transport.pause_reading()
        assert server.endpoint is not None
        with suppress(ChannelClosed):
            for _ in range(100):
                server.endpoint.send(Note(bytes(1 << 18)))
        await until(lambda: server.cause)
        assert "has not read" in str(server.cause)
        connection.transport.abort()
