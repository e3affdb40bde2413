"""HTTP connections to one engine: one per request in flight, plus some idle ones.

httpx' own transport yields a stream chunk by chunk, through four generators with a cancel scope each, and
scans all connections of a pool whenever a request starts or ends. That would dominate the CPU time of a proxy
with a thousand streams. Here, all bytes that have arrived are one piece. Like httpx, this uses h11 for
HTTP/1.1, and raises the errors of httpx.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import h11
import httpx

from kvtier.concurrency.processes import LACKING, describe_lack
from kvtier.fleet.proxy.client import BUSY, Refused
from kvtier.logs import RateLimitedLog

logger = logging.getLogger("kvtier.proxy")

CONNECT_SECONDS = 15.0
"""Allows for a thousand connects at once. Health checks, not this timeout, detect a dead engine."""
WRITE_SECONDS = 30.0
IDLE_SECONDS = 2.0
"""uvicorn closes idle connections after 5 s; expire well before, so that no request races with that."""
MAX_IDLE = 64
MAX_UNREAD_BYTES = 256 * 1024
"""Received but unread bytes per connection; beyond it the proxy stops reading from the engine."""
MAX_HEAD_BYTES = 64 * 1024
MAX_READ_BYTES = 4 << 20
NO_DESCRIPTOR = "this proxy has too many open files: try again later, or use another one"


async def read_body(response: httpx.Response, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
    """Return the whole body of a response, or ``None`` if it is too long."""
    content, complete = await read_up_to(pieces(response), max_bytes)
    return content if complete else None


async def read_up_to(pieces: AsyncIterator[bytes], max_bytes: int) -> tuple[bytes, bool]:
    """Read a body until it ends or is longer than that. Return what was read, and whether it has ended."""
    content = bytearray()
    async for piece in pieces:
        content += piece
        if len(content) > max_bytes:
            return bytes(content), False
    return bytes(content), True


def pieces(response: httpx.Response) -> AsyncIterator[bytes]:
    """Return an iterator over the body. httpx' own iterators would cost more than the rest of the relay."""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    return aiter(response.stream)


class Connections:
    """All connections to one engine. Admission bounds their number: each request uses one."""

    def __init__(self, verify: ssl.SSLContext | None) -> None:
        self._verify = verify
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()
        self._warn = RateLimitedLog(logger)
        self.used = 0
        """Connections with a request in flight."""

    @asynccontextmanager
    async def exchange(self, request: httpx.Request, idle_timeout: float) -> AsyncIterator[httpx.Response]:
        """Send a request and yield its response; a body that is not read to its end is aborted.

        ``idle_timeout``: seconds without any data after which reading fails.
        Raises :class:`httpx.TransportError`, and :class:`Refused` if this process lacks file descriptors.
        """
        self.used += 1
        try:
            connection = self._reusable() or await self._connect(request)
            try:
                await connection.send(request, idle_timeout)
                head = await connection.head()
            except BaseException:
                connection.abort()
                raise
            try:
                yield httpx.Response(
                    head.status_code,
                    headers=head.headers.raw_items(),
                    stream=_Body(connection),
                    request=request,
                )
            finally:
                await self._release(connection)
        finally:
            self.used -= 1

    async def aclose(self) -> None:
        """Close all connections; requests in flight fail."""
        for connection in self._open:
            connection.abort()
        # Not a loop over the set: each connection leaves it when it is closed.
        while self._open:
            await next(iter(self._open)).closed.wait()

    async def _release(self, connection: _Connection) -> None:
        """Keep a connection for the next request, or abort it if the response is incomplete."""
        if connection.prepare_reuse() and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
            connection.expire(IDLE_SECONDS)
        else:
            connection.abort()
            await connection.closed.wait()  # The request's next connection may need the descriptor.

    def _reusable(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self, request: httpx.Request) -> _Connection:
        loop = asyncio.get_running_loop()
        secure = request.url.scheme == "https"
        port = request.url.port or (443 if secure else 80)
        context = self._verify if secure else None
        try:
            with anyio.fail_after(CONNECT_SECONDS):
                # No happy eyeballs: with it, asyncio can leak a connection that is established in the moment
                # in which the attempt is cancelled.
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._open), request.url.host, port, ssl=context
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout("connect timed out", request=request) from error
        except OSError as error:
            if error.errno in LACKING:
                self._warn("cannot connect to %s: %s", request.url.netloc.decode(), describe_lack(error))
                raise Refused(503, NO_DESCRIPTOR, BUSY) from error
            raise httpx.ConnectError(str(error), request=request) from error
        return connection


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection: one request at a time."""

    def __init__(self, open_: set[_Connection]) -> None:
        self._open = open_
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._received: list[bytes] = []
        self._unread_bytes = 0
        self._ended = False
        self._error: Exception | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._timer: asyncio.TimerHandle | None = None
        self.closed = asyncio.Event()

    # ── callbacks of the event loop ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._open.add(self)

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._ended = True
        self._wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._error = self._error or exc
        self._ended = True
        self._open.discard(self)
        self._may_write.set()
        self._wake()
        self.closed.set()
        if self._timer is not None:
            self._timer.cancel()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    # ── one request ──

    async def send(self, request: httpx.Request, idle_timeout: float) -> None:
        """Send a whole request; its body is already in memory.

        ``idle_timeout`` bounds each wait for data of the response, in seconds.
        """
        self._request, self._idle_timeout = request, idle_timeout
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        target = request.url.raw_path
        head = h11.Request(method=request.method, target=target, headers=request.headers.raw)
        parts = [self._http.send(head)]
        if request.content:
            parts.append(self._http.send(h11.Data(data=request.content)))
        parts.append(self._http.send(h11.EndOfMessage()))
        self._transport.writelines([part for part in parts if part])
        if not self._may_write.is_set():
            try:
                with anyio.fail_after(WRITE_SECONDS):
                    await self._may_write.wait()
            except TimeoutError as error:
                raise httpx.WriteTimeout("write timed out", request=request) from error

    async def head(self) -> h11.Response:
        """Return the response head; skip informational responses such as ``100 Continue``."""
        while not isinstance(event := self._next(), h11.Response):
            if event is h11.NEED_DATA:
                await self._receive()
            elif isinstance(event, h11.ConnectionClosed):
                raise httpx.RemoteProtocolError("closed without a response", request=self._request)
        return event

    async def piece(self) -> bytes:
        """Return all bytes of the body that have arrived, at least one; empty at its end."""
        parts: list[bytes] = []
        while self._http.their_state is h11.SEND_BODY:
            event = self._next()
            if isinstance(event, h11.Data):
                parts.append(event.data)
            elif event is h11.NEED_DATA:
                if parts:
                    break
                await self._receive()
        return b"".join(parts)

    @property
    def is_open(self) -> bool:
        """Whether the server has neither closed the connection nor sent unexpected data."""
        return not (self._ended or self._received or self._transport.is_closing())

    def prepare_reuse(self) -> bool:
        """Reset for the next request; return false if the response is incomplete or not keep-alive."""
        if not self.is_open or self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def expire(self, seconds: float) -> None:
        """Close the connection if it stays idle for this long."""
        self._timer = self._loop.call_later(seconds, self._transport.abort)

    def abort(self) -> None:
        """Close the connection immediately, without flushing."""
        self._transport.abort()

    def _next(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error), request=self._request) from error

    async def _receive(self) -> None:
        """Feed the parser more data, or the end of the stream. Waits for it if necessary."""
        if not self._received and not self._ended:
            await self._wait_readable()
        if self._received:
            data = b"".join(self._received)
            self._received.clear()
            if self._unread_bytes > MAX_UNREAD_BYTES:
                self._transport.resume_reading()
            self._unread_bytes = 0
            self._http.receive_data(data)
        elif self._error is not None:
            raise httpx.ReadError(str(self._error), request=self._request) from self._error
        else:
            self._http.receive_data(b"")

    async def _wait_readable(self) -> None:
        # A timer costs less than the cancel scope that anyio would need for each piece of a stream.
        waiter = self._waiter = self._loop.create_future()
        timer = self._loop.call_later(self._idle_timeout, self._time_out, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _time_out(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_exception(httpx.ReadTimeout("read timed out", request=self._request))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Body(httpx.AsyncByteStream):
    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if piece := await self._connection.piece():
            return piece
        raise StopAsyncIteration
