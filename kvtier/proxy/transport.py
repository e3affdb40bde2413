"""A transport for httpx whose streams cost little: everything that has arrived is one piece.

httpx' own transport hands on a stream chunk by chunk, through four generators and a cancel scope each, and
looks at every connection of a pool whenever a request begins or ends. That is fine for a client; a proxy with
a thousand streams does nothing else. h11 reads and writes HTTP here, too.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator

import anyio
import h11
import httpx

IDLE_SECONDS = 2.0
"""An engine closes idle connections after 5 s (uvicorn): a request must not meet that moment."""
MOST_IDLE = 64
MOST_WAITING_BYTES = 256 * 1024
"""What was received and not taken yet; beyond it the engine is not read any more."""
MOST_HEAD_BYTES = 64 * 1024


class EngineTransport(httpx.AsyncBaseTransport):
    """Connections to one engine: as many as there are requests under way, and some idle ones.

    The timeouts of a request are those of httpx; ``pool`` is of no use.
    """

    def __init__(self, verify: ssl.SSLContext | None) -> None:
        self._verify = verify
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return the head of its answer. Raises :class:`httpx.TransportError`."""
        timeouts = request.extensions["timeout"]
        connection = self._reusable() or await self._connect(request, timeouts["connect"])
        try:
            await connection.send(request, timeouts["read"], timeouts["write"])
            head = await connection.head()
        except BaseException:
            connection.abort()
            raise
        return httpx.Response(
            head.status_code,
            headers=head.headers.raw_items(),
            stream=_Body(connection, self),
            request=request,
        )

    async def aclose(self) -> None:
        """Close all connections; requests that are under way fail."""
        for connection in self._open:
            connection.abort()
        while self._open:
            await next(iter(self._open)).closed.wait()

    def take_back(self, connection: _Connection) -> None:
        """A request has ended: keep its connection for another, or cut it off where the answer goes on."""
        if connection.may_be_used_again() and len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
            connection.expire(IDLE_SECONDS)
        else:
            connection.abort()

    def _reusable(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self, request: httpx.Request, seconds: float) -> _Connection:
        loop = asyncio.get_running_loop()
        secure = request.url.scheme == "https"
        port = request.url.port or (443 if secure else 80)
        context = self._verify if secure else None
        try:
            with anyio.fail_after(seconds):
                # One address after the other: with happy eyeballs, asyncio may keep open what is connected
                # in the moment in which it is given up.
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._open), request.url.host, port, ssl=context
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout("it does not answer", request=request) from error
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection: a request at a time."""

    def __init__(self, open_: set[_Connection]) -> None:
        self._open = open_
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._received: list[bytes] = []
        self._waiting_bytes = 0
        self._ended = False
        self._error: Exception | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._timer: asyncio.TimerHandle | None = None
        self.closed = asyncio.Event()

    # ── what the loop calls ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_HEAD_BYTES)
        self._open.add(self)

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes > MOST_WAITING_BYTES:
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

    async def send(self, request: httpx.Request, silence: float, write: float) -> None:
        """Send all of it. Its body is there already."""
        self._request, self._silence = request, silence
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
                with anyio.fail_after(write):
                    await self._may_write.wait()
            except TimeoutError as error:
                raise httpx.WriteTimeout("it takes nothing in", request=request) from error

    async def head(self) -> h11.Response:
        """The head of the answer; what comes before it, such as ``100 Continue``, is passed over."""
        while not isinstance(event := self._next(), h11.Response):
            if event is h11.NEED_DATA:
                await self._receive()
            elif isinstance(event, h11.ConnectionClosed):
                raise httpx.RemoteProtocolError("it was closed without an answer", request=self._request)
        return event

    async def piece(self) -> bytes:
        """All of the body that is there, and at least a byte; empty at its end."""
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
        """Whether the other side has neither closed it nor said something unasked."""
        return not (self._ended or self._received or self._transport.is_closing())

    def may_be_used_again(self) -> bool:
        """Whether the answer is complete, and the connection to stay. Makes it ready for the next."""
        if not self.is_open or self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def expire(self, seconds: float) -> None:
        """Close it where it stays idle for so long."""
        self._timer = self._loop.call_later(seconds, self._transport.abort)

    def abort(self) -> None:
        """Close it without another word."""
        self._transport.abort()

    def _next(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error), request=self._request) from error

    async def _receive(self) -> None:
        """Have something more for the parser, be it that there is nothing more."""
        if not self._received and not self._ended:
            await self._arrival()
        if self._received:
            data = b"".join(self._received)
            self._received.clear()
            if self._waiting_bytes > MOST_WAITING_BYTES:
                self._transport.resume_reading()
            self._waiting_bytes = 0
            self._http.receive_data(data)
        elif self._error is not None:
            raise httpx.ReadError(str(self._error), request=self._request) from self._error
        else:
            self._http.receive_data(b"")

    async def _arrival(self) -> None:
        waiter = self._waiter = self._loop.create_future()
        timer = self._loop.call_later(self._silence, self._give_up, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _give_up(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_exception(httpx.ReadTimeout("it says nothing", request=self._request))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Body(httpx.AsyncByteStream):
    """The body of an answer."""

    def __init__(self, connection: _Connection, transport: EngineTransport) -> None:
        self._connection = connection
        self._transport = transport
        self._closed = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if piece := await self._connection.piece():
            return piece
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._transport.take_back(self._connection)
