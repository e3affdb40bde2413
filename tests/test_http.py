"""The HTTP server in the event loop: requests, limits, shutdown, and no leaks."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.lowlevel
import httpx
import pytest
from fastapi import FastAPI, WebSocket
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

import kvtier.http
from kvtier.errors import ChannelError, SettingsError
from kvtier.http import serving
from tests.rigs.certificates import make_certificate
from tests.rigs.open_files import open_files
from tests.rigs.servers.redis import TLSFiles
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """An application without a lifespan."""
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


def files() -> set[str]:
    gc.collect()
    return set(open_files())


async def get(address: tuple[str, int], path: str = "/", **options: object) -> httpx.Response:
    async with httpx.AsyncClient(**{"trust_env": False, "verify": False, **options}) as client:
        scheme = "https" if "verify" in options else "http"
        return await client.get(f"{scheme}://{address[0]}:{address[1]}{path}")


async def test_serves_on_a_free_port_and_leaves_nothing_behind() -> None:
    async with serving(hello, "127.0.0.1:0") as address:  # Warm-up: some resources are created once.
        assert (await get(address)).text == "hello"
    before, tasks = files(), asyncio.all_tasks()
    async with serving(hello, "127.0.0.1:0") as address:
        response = await get(address)
        assert (response.status_code, response.text) == (200, "hello")
        assert "server" not in response.headers
        async with connect_raw(address):  # An idle connection, still open at the end.
            pass
    assert files() == before
    assert asyncio.all_tasks() == tasks
    with pytest.raises(httpx.ConnectError):
        await get(address)


@asynccontextmanager
async def connect_raw(address: tuple[str, int]) -> AsyncIterator[anyio.abc.SocketStream]:
    stream = await anyio.connect_tcp(*address)
    async with stream:
        yield stream


async def read_to_end(stream: anyio.abc.SocketStream) -> bytes:
    """Return what the server sends until it closes the connection."""
    received = b""
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
        while True:
            received += await stream.receive()
    return received


async def test_serves_on_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 on this machine")
    async with serving(hello, "[::1]:0") as (host, port):
        assert (await get((f"[{host}]", port))).text == "hello"


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("127.0.0.1", "metrics.listen: '127.0.0.1' is not an address: use HOST:PORT"),
        ("::1:80", "in brackets"),
        ("192.0.2.1:0", "set another address or port in metrics.listen"),
        ("no-such-host.invalid:80", "cannot listen on no-such-host.invalid:80"),
        ("x" * 300 + ":80", "set another address"),
        ("127.0.0.1:123456", "metrics.listen: '127.0.0.1:123456' is not an address"),
    ],
)
async def test_invalid_address_is_reported_in_one_line(listen: str, message: str) -> None:
    with pytest.raises(ChannelError) as caught:
        async with serving(hello, listen, setting="metrics.listen"):
            raise AssertionError
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_port_in_use_is_reported() -> None:
    async with serving(hello, "127.0.0.1:0") as (host, port):
        before = files()
        with pytest.raises(
            ChannelError, match=f"cannot listen on {host}:{port}: Address already in use: set"
        ):
            async with serving(hello, f"{host}:{port}"):
                raise AssertionError
        assert files() == before


async def test_signal_handlers_and_logging_are_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async with serving(hello, "127.0.0.1:0") as address:
            os.kill(os.getpid(), signal.SIGTERM)
            async for number in signals:
                assert number == signal.SIGTERM
                break
            assert (await get(address)).text == "hello"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


async def test_lifespan_of_the_application() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        events.append("start")
        yield
        events.append("end")

    async with serving(FastAPI(lifespan=lifespan), "127.0.0.1:0") as address:
        assert events == ["start"]
        assert (await get(address, "/docs")).status_code == 200
    assert events == ["start", "end"]


async def test_startup_error_propagates() -> None:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        raise SettingsError("the state is unreadable")
        yield

    before = files()
    with pytest.raises(SettingsError, match="the state is unreadable"):
        async with serving(FastAPI(lifespan=lifespan), "127.0.0.1:0"):
            raise AssertionError
    assert files() == before


async def test_exception_in_the_block_propagates() -> None:
    with pytest.raises(SettingsError, match="mine"):
        async with serving(hello, "127.0.0.1:0"):
            raise SettingsError("mine")


async def test_stops_on_cancellation() -> None:
    before, tasks = files(), asyncio.all_tasks()
    with anyio.CancelScope() as scope:
        async with serving(hello, "127.0.0.1:0") as address:
            await get(address)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert files() <= before  # Other tests' files may be collected meanwhile.
    assert asyncio.all_tasks() == tasks


def endless(ended: list[str]) -> FastAPI:
    app = FastAPI()

    async def stream() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: x\n\n"
                await anyio.sleep(0.01)
        finally:
            ended.append("stream")

    @app.get("/stream")
    async def _stream() -> StreamingResponse:
        return StreamingResponse(stream(), media_type="text/event-stream")

    @app.websocket("/socket")
    async def _socket(websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            async for message in websocket.iter_bytes():
                await websocket.send_bytes(message)
        finally:
            ended.append("socket")

    return app


async def test_shutdown_closes_streams_and_web_sockets(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []
    tasks, begun = asyncio.all_tasks(), anyio.Event()

    async def read(address: tuple[str, int]) -> None:
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            with suppress(httpx.HTTPError):
                async with client.stream("GET", f"http://{address[0]}:{address[1]}/stream") as response:
                    async for _ in response.aiter_bytes():
                        begun.set()

    async with anyio.create_task_group() as readers:
        async with serving(endless(ended), "127.0.0.1:0") as address:
            readers.start_soon(read, address)
            await begun.wait()
            websocket = await connect(f"ws://{address[0]}:{address[1]}/socket")
            await websocket.send(b"x")
            assert await websocket.recv() == b"x"
        assert sorted(ended) == ["socket", "stream"]
        with pytest.raises(ConnectionClosed) as closed:
            await websocket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012  # "Service restart"
    assert asyncio.all_tasks() == tasks
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_pending_request_is_cancelled_on_shutdown() -> None:
    tasks, begun, ended = asyncio.all_tasks(), anyio.Event(), anyio.Event()

    async def forever(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async with serving(forever, "127.0.0.1:0") as address, connect_raw(address) as stream:
        await stream.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await begun.wait()
    assert ended.is_set()
    assert asyncio.all_tasks() == tasks


async def test_oversized_message_closes_only_its_web_socket() -> None:
    async with serving(endless([]), "127.0.0.1:0", ws_max_size=1000) as (host, port):
        async with (
            connect(f"ws://{host}:{port}/socket") as websocket,
            connect(f"ws://{host}:{port}/socket", max_size=None) as other,
        ):
            await websocket.send(bytes(1001))
            with pytest.raises(ConnectionClosed) as closed:
                await websocket.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009  # "Message too big"
            await other.send(bytes(1000))
            assert await other.recv() == bytes(1000)
        with pytest.raises(InvalidStatus):
            async with connect(f"ws://{host}:{port}/nowhere"):
                raise AssertionError


@pytest.mark.parametrize(
    "sent",
    [
        b"",  # Nothing.
        b"GET / HT",  # An incomplete request.
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET /",  # One request and an incomplete one.
    ],
)
async def test_incomplete_request_times_out(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtier.http, "REQUEST_SECONDS", 0.2)
    async with serving(hello, "127.0.0.1:0") as address, connect_raw(address) as stream:
        if sent:
            await stream.send(sent)
        await read_to_end(stream)


async def test_active_connection_does_not_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtier.http, "REQUEST_SECONDS", 0.2)
    async with (
        serving(endless([]), "127.0.0.1:0") as (host, port),
        httpx.AsyncClient(trust_env=False, verify=False) as client,
        connect(f"ws://{host}:{port}/socket") as websocket,
    ):
        deadline = asyncio.get_running_loop().time() + 0.5
        async with client.stream("GET", f"http://{host}:{port}/stream") as response:
            async for _ in response.aiter_bytes():
                if asyncio.get_running_loop().time() > deadline:
                    break
        await websocket.send(b"still here")
        assert await websocket.recv() == b"still here"


async def test_oversized_or_invalid_head_is_rejected() -> None:
    async with serving(hello, "127.0.0.1:0") as address:
        for sent in (
            b"GET /" + bytes(1 << 20),
            b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 200_000,
            b"\x16\x03\r\n\r\n",
        ):
            async with connect_raw(address) as stream:
                with suppress(anyio.BrokenResourceError):
                    await stream.send(sent)
                assert b"200" not in await read_to_end(stream)
        assert (await get(address)).text == "hello"


async def test_connections_are_limited() -> None:
    async with serving(hello, "127.0.0.1:0", limit_concurrency=4) as address:
        async with anyio.create_task_group() as tasks:
            ended = anyio.create_memory_object_stream[None](100)

            async def idle() -> None:
                async with connect_raw(address) as stream:
                    await read_to_end(stream)
                    ended[0].send_nowait(None)

            for _ in range(12):
                tasks.start_soon(idle)
            for _ in range(4):  # At most 8 of the 12 connections stay open.
                await ended[1].receive()
            tasks.cancel_scope.cancel()
        for stream in ended:
            stream.close()
        # Until the server has noticed the disconnects.
        while (response := await get(address)).status_code == 503:
            await anyio.lowlevel.checkpoint()
        assert response.text == "hello"


async def test_tcp_nodelay_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    nodelay: list[int] = []
    original = socket.socket.accept

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        accepted, address = original(self)
        nodelay.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return accepted, address

    monkeypatch.setattr(socket.socket, "accept", accept)
    async with serving(hello, "127.0.0.1:0") as address:
        assert (await get(address)).text == "hello"
    assert nodelay == [1]


async def test_request_beyond_the_limit_gets_503() -> None:
    async with serving(hello, "127.0.0.1:0", limit_concurrency=1) as address:
        assert (await get(address)).status_code == 503


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> TLSFiles:
    return make_certificate(tmp_path_factory.mktemp("certificate") / "own")


@pytest.mark.parametrize("method", ["POST", "HEAD"])
@pytest.mark.parametrize("answered", ["before", "partly", "after"])
async def test_invalid_body_ends_a_request_without_a_traceback(
    answered: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may become invalid before its response has begun, while it is sent, or when it is complete."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        if answered == "before":
            await hello(scope, receive, send)
            return
        if answered == "partly":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"hello", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        if answered == "after":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"more"})

    head = f"{method} / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n".encode()
    received = b""
    async with serving(answer, "127.0.0.1:0") as address, connect_raw(address) as stream:
        await stream.send(head)
        with anyio.fail_after(30):
            while answered != "after" and b"\r\n\r\n" not in received:
                received += await stream.receive()
            await stream.send(b"no length\r\n")
            received += await read_to_end(stream)
    assert (b" 400 " in received, b" 200 " in received) == (answered == "after", answered != "after")
    assert b"more" not in received
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_serves_tls(certificate: TLSFiles) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.certificate, certificate.key)
    trust = ssl.create_default_context(cafile=str(certificate.authority))
    async with serving(hello, "127.0.0.1:0", ssl=context) as address:
        assert (await get(address, verify=trust)).text == "hello"
        with pytest.raises(httpx.HTTPError):
            await get(address)


async def test_body_in_tiny_chunks_is_parsed_in_slices_and_not_read_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One read of 256 KiB has 43,000 chunks of a byte, which took a second to parse."""
    read: list[int] = []
    original = H11Protocol.data_received

    def data_received(self: H11Protocol, data: bytes) -> None:
        read.append(len(data))
        original(self, data)

    monkeypatch.setattr(H11Protocol, "data_received", data_received)
    opened = anyio.Event()
    pieces: list[bytes] = []

    async def read_late(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        await opened.wait()
        more = True
        while more:
            message = await receive()
            pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
        await hello(scope, receive, send)

    body = os.urandom(200_000)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
    async with serving(read_late, "127.0.0.1:0") as address, connect_raw(address) as stream:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream.send, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
            await until(lambda: read)
            for _ in range(1000):
                await anyio.lowlevel.checkpoint()
            assert sum(read) < 1 << 20, "of the 1.2 MB that the client sends"
            opened.set()
        await stream.send(head + b"Content-Length: 2\r\n\r\nxy")
        answers = b""
        with anyio.fail_after(30):
            while answers.count(b"hello") < 2:
                answers += await stream.receive()
    assert b"".join(pieces) == body + b"xy"
    assert max(map(len, pieces[1:])) <= 4 * kvtier.http.MAX_EVENTS
