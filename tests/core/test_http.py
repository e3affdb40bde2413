"""A server within the loop: what it serves, what it refuses, and that it leaves nothing behind."""

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
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

import kvtier.http
from kvtier.errors import ChannelError, SettingsError
from kvtier.http import Message, Receive, Send, serving
from kvtier.testing.servers.redis import TLSFiles
from tests.backends.certificates import make_certificate
from tests.open_files import open_files

pytestmark = pytest.mark.anyio


async def hello(scope: Message, receive: Receive, send: Send) -> None:
    """An application without a lifespan."""
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


def files() -> set[str]:
    gc.collect()
    return set(open_files())


async def get(address: tuple[str, int], path: str = "/", **options: object) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, **options) as client:
        scheme = "https" if "verify" in options else "http"
        return await client.get(f"{scheme}://{address[0]}:{address[1]}{path}")


async def test_serves_on_a_free_port_and_leaves_nothing_behind() -> None:
    async with serving(hello, "127.0.0.1:0") as address:  # What is made once for all.
        assert (await get(address)).text == "hello"
    before, tasks = files(), asyncio.all_tasks()
    async with serving(hello, ("127.0.0.1", 0)) as address:
        answer = await get(address)
        assert (answer.status_code, answer.text) == (200, "hello")
        assert "server" not in answer.headers
        async with connect_raw(address):  # One that says nothing, and is open at the end.
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


async def test_serves_version_6_of_the_internet_protocol() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has none")
    async with serving(hello, "[::1]:0") as (host, port):
        assert (await get((f"[{host}]", port))).text == "hello"


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("127.0.0.1", "metrics.listen: '127.0.0.1' is no address: write HOST:PORT"),
        ("::1:80", "in brackets"),
        ("192.0.2.1:0", "write another address or port in metrics.listen"),
        ("no-such-host.invalid:80", "cannot listen on no-such-host.invalid:80"),
        ("x" * 300 + ":80", "write another address"),
        (("127.0.0.1", 123456), "there is no port 123456: write another in metrics.listen"),
    ],
)
async def test_a_wrong_address_is_said_in_one_line(listen: str, why: str) -> None:
    with pytest.raises(ChannelError) as caught:
        async with serving(hello, listen, setting="metrics.listen"):
            raise AssertionError
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_port_that_is_taken_is_named() -> None:
    async with serving(hello, "127.0.0.1:0") as (host, port):
        before = files()
        with pytest.raises(
            ChannelError, match=f"cannot listen on {host}:{port}: Address already in use: write"
        ):
            async with serving(hello, f"{host}:{port}"):
                raise AssertionError
        assert files() == before


async def test_the_process_keeps_its_signals_and_its_log(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_an_application_starts_and_ends() -> None:
    told: list[str] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        told.append("start")
        yield
        told.append("end")

    async with serving(FastAPI(lifespan=lifespan), "127.0.0.1:0") as address:
        assert told == ["start"]
        assert (await get(address, "/docs")).status_code == 200
    assert told == ["start", "end"]


async def test_what_fails_at_the_start_is_raised_as_it_is() -> None:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        raise SettingsError("the state is unreadable")
        yield

    before = files()
    with pytest.raises(SettingsError, match="the state is unreadable"):
        async with serving(FastAPI(lifespan=lifespan), "127.0.0.1:0"):
            raise AssertionError
    assert files() == before


async def test_what_is_raised_in_the_block_is_raised_as_it_is() -> None:
    with pytest.raises(SettingsError, match="mine"):
        async with serving(hello, "127.0.0.1:0"):
            raise SettingsError("mine")


async def test_ends_when_it_is_cancelled() -> None:
    before, tasks = files(), asyncio.all_tasks()
    with anyio.CancelScope() as scope:
        async with serving(hello, "127.0.0.1:0") as address:
            await get(address)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert files() <= before  # Others' may be collected meanwhile.
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


async def test_streams_and_sockets_do_not_outlive_it(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []
    tasks, begun = asyncio.all_tasks(), anyio.Event()

    async def read(address: tuple[str, int]) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            with suppress(httpx.HTTPError):
                async with client.stream("GET", f"http://{address[0]}:{address[1]}/stream") as answer:
                    async for _ in answer.aiter_bytes():
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


async def test_a_request_that_ignores_the_end_is_cancelled() -> None:
    tasks, begun, ended = asyncio.all_tasks(), anyio.Event(), anyio.Event()

    async def forever(scope: Message, receive: Receive, send: Send) -> None:
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


async def test_a_message_that_is_too_long_ends_its_socket_alone() -> None:
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
    "said",
    [
        b"",  # Nothing at all.
        b"GET / HT",  # And no more.
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET /",  # One request, and then half of one.
    ],
)
async def test_who_does_not_finish_a_request_is_closed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtier.http, "REQUEST_SECONDS", 0.2)
    async with serving(hello, "127.0.0.1:0") as address, connect_raw(address) as stream:
        if said:
            await stream.send(said)
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while True:
                await stream.receive()


async def test_who_asks_again_and_again_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtier.http, "REQUEST_SECONDS", 0.2)
    async with (
        serving(endless([]), "127.0.0.1:0") as (host, port),
        httpx.AsyncClient(trust_env=False) as client,
        connect(f"ws://{host}:{port}/socket") as websocket,
    ):
        deadline = asyncio.get_running_loop().time() + 0.5
        async with client.stream("GET", f"http://{host}:{port}/stream") as answer:
            async for _ in answer.aiter_bytes():
                if asyncio.get_running_loop().time() > deadline:
                    break
        await websocket.send(b"still here")
        assert await websocket.recv() == b"still here"


async def test_a_head_that_is_too_long_or_none_is_refused() -> None:
    async with serving(hello, "127.0.0.1:0") as address:
        for said in (
            b"GET /" + bytes(1 << 20),
            b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 200_000,
            b"\x16\x03\r\n\r\n",
        ):
            heard = b""
            async with connect_raw(address) as stream:
                with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                    await stream.send(said)
                    while True:
                        heard += await stream.receive()
            assert b"200" not in heard
        assert (await get(address)).text == "hello"


async def test_there_are_never_too_many_connections() -> None:
    async with serving(hello, "127.0.0.1:0", limit_concurrency=4) as address:
        async with anyio.create_task_group() as tasks:
            ended = anyio.create_memory_object_stream[None](100)

            async def idle() -> None:
                async with connect_raw(address) as stream:
                    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                        await stream.receive()
                    ended[0].send_nowait(None)

            for _ in range(12):
                tasks.start_soon(idle)
            for _ in range(4):  # The rest of eight that may be there.
                await ended[1].receive()
            tasks.cancel_scope.cancel()
        for stream in ended:
            stream.close()
        while (answer := await get(address)).status_code == 503:  # Until it has seen that they are gone.
            await anyio.lowlevel.checkpoint()
        assert answer.text == "hello"


async def test_no_answer_waits_for_an_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[int] = []
    made = kvtier.http._Connection.connection_made

    def connection_made(self: kvtier.http._Connection, transport: asyncio.Transport) -> None:
        made(self, transport)
        connected = transport.get_extra_info("socket")
        delays.append(connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(kvtier.http._Connection, "connection_made", connection_made)
    async with serving(hello, "127.0.0.1:0") as address:
        assert (await get(address)).text == "hello"
    assert delays == [1]


async def test_beyond_its_limit_a_request_is_told_so() -> None:
    async with serving(hello, "127.0.0.1:0", limit_concurrency=1) as address:
        assert (await get(address)).status_code == 503


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> TLSFiles:
    return make_certificate(tmp_path_factory.mktemp("certificate") / "own")


async def test_serves_encrypted(certificate: TLSFiles) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.certificate, certificate.key)
    trust = ssl.create_default_context(cafile=str(certificate.authority))
    async with serving(hello, "127.0.0.1:0", ssl=context) as address:
        assert (await get(address, verify=trust)).text == "hello"
        with pytest.raises(httpx.HTTPError):
            await get(address)
