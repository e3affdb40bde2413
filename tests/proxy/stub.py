"""An engine that computes nothing: it answers as it is told to, byte by byte, and keeps what it was asked."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import anyio
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

TOKENS = 4


class Asked(NamedTuple):
    """One request, as it came."""

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
    def ours(self) -> dict[str, Any] | None:
        """What the proxy says to kvtier."""
        params = self.body.get("kv_transfer_params")
        return params.get("kvtier") if isinstance(params, dict) else None

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)


class Answer:
    """The way back."""

    def __init__(self, stub: Stub, asked: Asked, stream: SocketStream) -> None:
        self.stub, self.asked, self.stream = stub, asked, stream

    async def raw(self, content: bytes) -> None:
        await self.stream.send(content)

    async def head(self, status: int = 200, **headers: str) -> None:
        lines = [
            f"HTTP/1.1 {status} Said",
            *(f"{name.replace('_', '-')}: {text}" for name, text in headers.items()),
        ]
        await self.raw("\r\n".join([*lines, "", ""]).encode())

    async def whole(self, content: object, status: int = 200, **headers: str) -> None:
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"content_type": "application/json", **headers}
        await self.head(status, content_length=str(len(text)), **headers)
        await self.raw(text)

    async def begin(self, **headers: str) -> None:
        await self.head(
            200, content_type="text/event-stream; charset=utf-8", transfer_encoding="chunked", **headers
        )

    async def piece(self, content: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(content), content))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def until_cut_off(self) -> None:
        """Return when the other side has closed the connection."""
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            await self.stream.receive()
        self.stub.cut_off.append(self.asked)
        self.stub.changed()


class Died(Exception):
    """The connection is to be dropped without another byte."""


Behaviour = Callable[[Answer], Awaitable[None]]


def event(number: int) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": f" t{number}"}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
EVENTS = [*(event(number) for number in range(TOKENS)), DONE]


async def normal(answer: Answer) -> None:
    """As an engine does."""
    asked = answer.asked
    if asked.body.get("stream"):
        await answer.begin()
        for content in EVENTS:
            await answer.piece(content)
        await answer.end()
        return
    whole: dict[str, Any] = {"id": "cmpl-1", "choices": [{"index": 0, "text": " hello"}], "usage": {"n": 1.0}}
    if asked.ours is not None:
        said: dict[str, Any] = {"peer": answer.stub.peer}
        if "hand_over" in asked.ours:
            said["handed_over"] = {"tokens": answer.stub.hands_over, "from": answer.stub.peer}
        whole["kv_transfer_params"] = {"kvtier": said, "other": 1}
    await answer.whole(whole)


def says(status: int, content: object = None, **headers: str) -> Behaviour:
    async def behave(answer: Answer) -> None:
        await answer.whole(
            {"error": {"message": "mine", "code": status}} if content is None else content, status, **headers
        )

    return behave


async def hangs(answer: Answer) -> None:
    """Never says anything."""
    await answer.until_cut_off()


async def dies(_: Answer) -> None:
    """Before the head."""
    raise Died


async def dies_after_head(answer: Answer) -> None:
    await answer.begin()
    raise Died


async def dies_in_answer(answer: Answer) -> None:
    """In an answer that is no stream."""
    await answer.head(200, content_type="application/json", content_length="1000")
    await answer.raw(b'{"choices": [')
    raise Died


def dies_in_stream(pieces: int, rest: bytes = b"") -> Behaviour:
    async def behave(answer: Answer) -> None:
        await answer.begin()
        for content in EVENTS[:pieces]:
            await answer.piece(content)
        if rest:
            await answer.piece(rest)
        raise Died

    return behave


class Slow:
    """Streams an event whenever it is told to."""

    def __init__(self) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[bytes | None](100)

    def say(self, content: bytes | None) -> None:
        """``None`` for the end."""
        self._send.send_nowait(content)

    async def __call__(self, answer: Answer) -> None:
        await answer.begin()
        with self._send, self._receive:
            async with anyio.create_task_group() as tasks:

                async def watch() -> None:
                    await answer.until_cut_off()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(watch)
                async for content in self._receive:
                    if content is None:
                        break
                    await answer.piece(content)
                tasks.cancel_scope.cancel()
        with suppress(anyio.BrokenResourceError):
            await answer.end()


class Stub:
    """One engine. ``then`` has behaviours for the next requests; afterwards it is ``always``."""

    def __init__(self, peer: str | None = "0.0.0.0:55555") -> None:
        self.peer = peer
        self.hands_over = 300
        self.port = 0
        self.asked: list[Asked] = []
        """Without health checks and probes."""
        self.probes: list[Asked] = []
        self.cut_off: list[Asked] = []
        self.then: deque[Behaviour] = deque()
        self.always: Behaviour = normal
        self.health: Behaviour = says(200, b"")
        self.models: Behaviour = says(200, {"object": "list", "data": [{"id": "m"}]})
        self.tokenize: Behaviour = says(404)
        self.connections = 0
        self._changed = anyio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def changed(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until something is so that it was asked about."""
        with anyio.fail_after(30):
            while not condition():
                await self._changed.wait()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Stub]:
        """Listen; where it did before, on the same port."""
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
                        asked = await _request(buffered)
                        await self._behaviour(asked)(Answer(self, asked, stream))
        finally:
            self.connections -= 1
            self.changed()

    def _behaviour(self, asked: Asked) -> Behaviour:
        if asked.path == "/health":
            return self.health
        if asked.path == "/v1/models":
            return self.models
        if asked.path == "/tokenize":
            return self.tokenize
        if asked.body.get("prompt") == "a":
            self.probes.append(asked)
            return normal if self.always is not hangs else self.always
        self.asked.append(asked)
        self.changed()
        return self.then.popleft() if self.then else self.always


async def _request(buffered: BufferedByteReceiveStream) -> Asked:
    head = (await buffered.receive_until(b"\r\n\r\n", 65536)).decode()
    first, *lines = head.split("\r\n")
    method, path, _ = first.split(" ")
    headers = [(name.lower(), text.strip()) for name, _, text in (line.partition(":") for line in lines)]
    length = int(dict(headers).get("content-length", 0))
    return Asked(method, path, headers, await buffered.receive_exactly(length) if length else b"")
