"""A stub engine with scripted responses down to single bytes. It records its requests."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import anyio
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from kvtier.fleet.proxy.checks import PROBE

TOKENS = 4


class StubRequest(NamedTuple):
    """One request as received."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    content: bytes

    @property
    def body(self) -> dict[str, Any]:
        try:
            parsed = json.loads(self.content)
        except (ValueError, RecursionError):
            return {}
        return parsed if isinstance(parsed, dict) else {}

    @property
    def kvtier_params(self) -> dict[str, Any] | None:
        """The parameters from the proxy to kvtier."""
        params = self.body.get("kv_transfer_params")
        return params.get("kvtier") if isinstance(params, dict) else None

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)


class Answer:
    """Writes the response to a request."""

    def __init__(self, stub: Stub, request: StubRequest, stream: SocketStream) -> None:
        self.stub, self.request, self.stream = stub, request, stream

    async def raw(self, content: bytes) -> None:
        await self.stream.send(content)

    async def head(self, status: int = 200, **headers: str) -> None:
        lines = [
            f"HTTP/1.1 {status} Stub",
            *(f"{name.replace('_', '-')}: {text}" for name, text in headers.items()),
        ]
        await self.raw("\r\n".join([*lines, "", ""]).encode())

    async def respond(self, content: object, status: int = 200, **headers: str) -> None:
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"content_type": "application/json", **headers}
        await self.head(status, content_length=str(len(text)), **headers)
        await self.raw(text)

    async def begin_stream(self, **headers: str) -> None:
        await self.head(
            200, content_type="text/event-stream; charset=utf-8", transfer_encoding="chunked", **headers
        )

    async def send_chunk(self, content: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(content), content))

    async def end_stream(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def wait_for_disconnect(self) -> None:
        """Wait until the client closes the connection."""
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            await self.stream.receive()
        self.stub.disconnected.append(self.request)


class Died(Exception):
    """Raised to drop the connection without another byte."""


Behaviour = Callable[[Answer], Awaitable[None]]


def event(number: int) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": f" t{number}"}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
EVENTS = [*(event(number) for number in range(TOKENS)), DONE]


def completion(params: dict[str, Any] | None, peer: str | None, tokens: int) -> dict[str, Any]:
    """Return the response to a request with these parameters from the proxy to kvtier."""
    choices = [{"index": 0, "text": " hello"}]
    body: dict[str, Any] = {"id": "cmpl-1", "choices": choices, "usage": {"n": 1.0}}
    if params is not None:
        own: dict[str, Any] = {"peer": peer}
        if "kv_transfer" in params:
            own["transferred"] = {"tokens": tokens, "from": peer}
        body["kv_transfer_params"] = {"kvtier": own, "other": 1}
    return body


async def normal(answer: Answer) -> None:
    """Respond like an engine."""
    request = answer.request
    if request.body.get("stream"):
        await answer.begin_stream()
        for content in EVENTS:
            await answer.send_chunk(content)
        await answer.end_stream()
        return
    stub = answer.stub
    await answer.respond(completion(request.kvtier_params, stub.peer, stub.transferred_tokens))


def responds(status: int, content: object = None, **headers: str) -> Behaviour:
    async def behave(answer: Answer) -> None:
        await answer.respond(
            {"error": {"message": "mine", "code": status}} if content is None else content, status, **headers
        )

    return behave


async def hangs(answer: Answer) -> None:
    """Never respond."""
    await answer.wait_for_disconnect()


async def dies(_: Answer) -> None:
    """Drop the connection before the head of the response."""
    raise Died


async def dies_after_head(answer: Answer) -> None:
    await answer.begin_stream()
    raise Died


async def dies_in_answer(answer: Answer) -> None:
    """Drop the connection within a response that is not a stream."""
    await answer.head(200, content_type="application/json", content_length="1000")
    await answer.raw(b'{"choices": [')
    raise Died


def dies_in_stream(pieces: int, rest: bytes = b"") -> Behaviour:
    async def behave(answer: Answer) -> None:
        await answer.begin_stream()
        for content in EVENTS[:pieces]:
            await answer.send_chunk(content)
        if rest:
            await answer.send_chunk(rest)
        raise Died

    return behave


class Slow:
    """Streams events that the test sends."""

    def __init__(self) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[bytes | None](100)

    def send(self, content: bytes | None) -> None:
        """Send an event, or end the stream with ``None``."""
        self._send.send_nowait(content)

    async def __call__(self, answer: Answer) -> None:
        await answer.begin_stream()
        with self._send, self._receive:
            async with anyio.create_task_group() as tasks:

                async def watch() -> None:
                    await answer.wait_for_disconnect()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(watch)
                async for content in self._receive:
                    if content is None:
                        break
                    await answer.send_chunk(content)
                tasks.cancel_scope.cancel()
        with suppress(anyio.BrokenResourceError):
            await answer.end_stream()


class Stub:
    """One engine. ``then`` holds the behaviours for the next requests, ``always`` the one after that."""

    def __init__(self, peer: str | None = "0.0.0.0:55555") -> None:
        self.peer = peer
        self.transferred_tokens = 300
        self.port = 0
        self.requests: list[StubRequest] = []
        """Requests except health checks and probes."""
        self.probes: list[StubRequest] = []
        self.disconnected: list[StubRequest] = []
        self.then: deque[Behaviour] = deque()
        self.always: Behaviour = normal
        self.health: Behaviour = responds(200, b"")
        self.models: Behaviour = responds(200, {"object": "list", "data": [{"id": "m"}]})
        self.tokenize: Behaviour = responds(404)
        self.connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stream(self, content: bytes) -> Slow:
        """Answer the next request with a stream that begins like this, and goes on as the test sends it."""
        slow = Slow()
        slow.send(content)
        self.then.append(slow)
        return slow

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Stub]:
        """Listen, on the same port as before if there was one."""
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=self.port)
        self.port = listener.extra(SocketAttribute.local_port)
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, self._handle)
            try:
                yield self
            finally:
                tasks.cancel_scope.cancel()

    async def _handle(self, stream: SocketStream) -> None:
        self.connections += 1
        try:
            async with stream:
                buffered = BufferedByteReceiveStream(stream)
                with suppress(anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, Died):
                    while True:
                        request = await _receive_request(buffered)
                        await self._behaviour(request)(Answer(self, request, stream))
        finally:
            self.connections -= 1

    def _behaviour(self, request: StubRequest) -> Behaviour:
        if request.path == "/health":
            return self.health
        if request.path == "/v1/models":
            return self.models
        if request.path == "/tokenize":
            return self.tokenize
        if request.body.get("prompt") == PROBE:
            self.probes.append(request)
            return normal if self.always is not hangs else self.always
        self.requests.append(request)
        return self.then.popleft() if self.then else self.always


async def _receive_request(buffered: BufferedByteReceiveStream) -> StubRequest:
    head = (await buffered.receive_until(b"\r\n\r\n", 65536)).decode()
    first, *lines = head.split("\r\n")
    method, path, _ = first.split(" ")
    headers = [(name.lower(), text.strip()) for name, _, text in (line.partition(":") for line in lines)]
    length = int(dict(headers).get("content-length", 0))
    return StubRequest(method, path, headers, await buffered.receive_exactly(length) if length else b"")
