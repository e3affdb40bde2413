"""A proxy for a real HTTP server that injects faults into single requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress

PIECE = 1 << 16


class FaultyProxy:
    """A proxy for HTTP/1.1 requests with a ``Content-Length``. An async context manager."""

    def __init__(self, port: int) -> None:
        self.cut: Callable[[str], bool] = lambda _: False
        """Whether to hang up in mid-body, given a request line ``PUT /bucket/key?partNumber=2 HTTP/1.1``."""
        self.before: Callable[[str], Awaitable[object]] = _nothing
        """Awaited with the request line before a request is forwarded."""
        self.between: Callable[[int], Awaitable[object]] = _nothing
        """Awaited with the length of each piece of an answer before that; an ``OSError`` hangs up."""
        self.requests: list[str] = []
        """The request lines, in order of arrival."""
        self._port = port
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FaultyProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        """The proxy's URL."""
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _serve(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._connect(client, answer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connect(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        try:
            server, request = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            answer.transport.abort()
            return
        answers = asyncio.ensure_future(self._answer(server, answer))
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                while await self._forward(client, request):
                    pass
        finally:
            answers.cancel()
            request.transport.abort()
            answer.transport.abort()
            await asyncio.wait([answers])

    async def _forward(self, client: asyncio.StreamReader, request: asyncio.StreamWriter) -> bool:
        """Forward one request. ``False`` if it was cut."""
        head = await client.readuntil(b"\r\n\r\n")
        line = head.partition(b"\r\n")[0].decode()
        self.requests.append(line)
        found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        left = int(found[1]) if found else 0
        if self.cut(line):
            await client.readexactly(left // 2)
            return False
        await self.before(line)
        request.write(head)
        while left:
            piece = await client.readexactly(min(left, PIECE))
            request.write(piece)
            await request.drain()
            left -= len(piece)
        return True

    async def _answer(self, server: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while piece := await server.read(PIECE):
                    await self.between(len(piece))
                    client.write(piece)
                    await client.drain()
        finally:
            client.transport.abort()


async def _nothing(_: object) -> None:
    pass
