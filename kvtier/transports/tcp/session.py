"""The serving side: one connection of a peer, polled by the event loop.

Worker threads transfer the bytes of large answers over the same socket, never while the event loop uses it.

Timeouts: socket(7), SO_SNDTIMEO.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvtier import native
from kvtier.concurrency.sockets.connection import (
    POLL_SECONDS,
    RECEIVE,
    SEND,
    Buffers,
    ProtocolViolation,
    advance,
    first_buffers,
    interrupt,
    keep_alive,
    progress_of,
    split_runs,
    unless_closed,
)
from kvtier.concurrency.sockets.executor import (
    SMALL_BYTES,
    IoExecutor,
    finished,
    until_readable,
    until_writable,
)
from kvtier.logs import RateLimitedLog
from kvtier.memory.slices import Lease
from kvtier.transports.base import Access, Grants, RemoteSpan
from kvtier.transports.tcp.wire import CONFIRMED_BYTES, MARK, Request, RequestReader, encode_answer

if TYPE_CHECKING:
    import kvtier._native as _native

Step = tuple[int, Buffers]
"""An operation of :mod:`kvtier.concurrency.sockets.connection`, and its remaining buffers."""
ANSWERS_AT_ONCE = 8
"""Maximum number of requests of one connection whose leases are held at once."""
RECEIVE_BYTES = 4096
"""Size of one read of requests. Payload that arrives with them is copied, so this is small."""
SCRATCH_BYTES = 1 << 18

_TIMEVAL = struct.pack("@ll", 0, int(POLL_SECONDS * 1e6))
_TLS_BYTES = 1 << 18
"""Size of one TLS write. A write that TLS did not accept must be retried unchanged."""
_NOTHING = bytearray()

_warn = RateLimitedLog(logging.getLogger("kvtier"))


class Session:
    """A connection of a peer. Answers requests in order, using a thread only while the socket is ready."""

    def __init__(
        self, connected: socket.socket, grants: Grants, executor: IoExecutor, deadline: float
    ) -> None:
        self._socket = connected
        self._stream = stream_over(connected)
        self._grants = grants
        self._executor = executor
        self._deadline = deadline
        self._reader = RequestReader()
        self._next: Request | None = None
        """A write request that arrived after read requests."""

    async def run(self) -> None:
        """Serve until the peer disconnects, is too slow, or violates the protocol."""
        try:
            keep_alive(self._socket)
            while requests := await self._requests():
                # Disconnect a peer that does not read its answers.
                with self._timeout(self._deadline * len(requests)):
                    if requests[0].access is Access.READ:
                        await self._answer(requests)
                    else:
                        await self._receive(requests[0].spans)
        except ProtocolViolation as error:
            _warn("tcp transport: closing the connection of a peer: %s", error)
        except OSError:
            return

    @contextmanager
    def _timeout(self, seconds: float) -> Iterator[None]:
        """Interrupt the connection if the block takes longer. Cheaper than a cancel scope for each part."""
        timer = asyncio.get_running_loop().call_later(seconds, self._stream.interrupt)
        try:
            yield
        finally:
            timer.cancel()

    async def _requests(self) -> list[Request]:
        """Receive requests: several reads, or one write. Empty if the peer closed the connection."""
        while not (requests := self._parse_requests()):
            if self._reader.buffered:
                # An incomplete request has a deadline; an idle connection has none.
                with self._timeout(self._deadline):
                    data = await self._stream.receive(RECEIVE_BYTES)
            else:
                data = await self._stream.receive(RECEIVE_BYTES)
            if not data:
                return []
            self._reader.feed(data)
        return requests

    def _parse_requests(self) -> list[Request]:
        found: list[Request] = []
        while len(found) < ANSWERS_AT_ONCE:
            request = self._next or self._reader.next()
            self._next = None
            if request is None:
                break
            if request.access is Access.WRITE:
                if found:
                    self._next = request
                    break
                return [request]
            found.append(request)
        return found

    async def _answer(self, requests: Sequence[Request]) -> None:
        leases: list[Lease] = []
        buffers: Buffers = deque()
        try:
            for request in requests:
                views = [self._lease(span, Access.READ, leases) for span in request.spans]
                granted = encode_answer(Access.READ, [view is not None for view in views])
                buffers.append(memoryview(granted))
                buffers.extend(view for view in views if view)
            views = []
            await self._run_steps((SEND, buffers))
        finally:
            buffers.clear()
            for lease in leases:
                lease.release()

    async def _receive(self, spans: Sequence[RemoteSpan]) -> None:
        leases: list[Lease] = []
        steps: list[Step] = []
        self._stream.hashes = hashes = native.core.Hashes() if native.available() else None
        try:
            views = [self._lease(span, Access.WRITE, leases) for span in spans]
            confirmation = encode_answer(Access.WRITE, [view is not None for view in views])
            for run in split_runs(_targets(spans, views), CONFIRMED_BYTES):
                steps += [(RECEIVE, run), (SEND, deque([memoryview(confirmation)]))]
                confirmation = MARK
            granted = [span for span, view in zip(spans, views, strict=True) if view]
            if hashes is not None:
                for granted_view in filter(None, views):
                    hashes.add(granted_view, False)
                    del granted_view
            views = []
            self._copy_buffered(steps[0][1])
            await self._run_steps(*steps)
            for span, checksum in zip(granted, hashes.digests(), strict=True) if hashes else ():
                if checksum is not None:
                    self._grants.arrived(span, checksum)
        finally:
            self._stream.hashes = None
            for _, buffers in steps:
                buffers.clear()
            for lease in leases:
                lease.release()

    def _copy_buffered(self, targets: Buffers) -> None:
        """Copy payload that arrived with the request to the first targets."""
        while targets and (data := self._reader.take(len(targets[0]))):
            targets[0][: len(data)] = data
            _advance(targets, len(data), self._stream.hashes)

    def _lease(self, span: RemoteSpan, access: Access, leases: list[Lease]) -> memoryview | None:
        """Lease the memory of a span, append the lease to ``leases``, and return the memory if granted."""
        lease = self._grants.hold(span, access)
        if lease is None:
            return None
        leases.append(lease)
        start = span.offset - lease.offset
        view = lease.view[start : start + span.length]
        return view if start >= 0 and len(view) == span.length else None

    async def _run_steps(self, *given: Step) -> None:
        """Run steps: small ones in the event loop, others in a thread while the socket is ready."""
        steps = deque(given)
        while steps:
            buffers = steps[0][1]
            is_small = sum(map(len, buffers)) <= SMALL_BYTES
            if not (is_small and self._stream.move_now(steps[0])):
                error = await self._stream.move(steps, self._executor)
                if error is not None:
                    raise error
            elif not buffers:
                steps.popleft()
            if steps and buffers:
                await self._stream.until_possible(steps[0])


class Stream:
    """A plain socket. It is in blocking mode; calls from the event loop pass ``MSG_DONTWAIT``."""

    hashes: _native.Hashes | None = None
    """Gets what is moved, except by TLS."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.settimeout(None)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL)

    def interrupt(self) -> None:
        """Shut the socket down, which wakes the thread or task that waits for it. Thread-safe."""
        interrupt(self._socket)

    # Called from the event loop.

    async def receive(self, limit: int) -> bytes:
        """Return 1 to ``limit`` bytes, or none if the peer closed the connection. Raises ``OSError``."""
        while True:
            try:
                return self._socket.recv(limit, socket.MSG_DONTWAIT)
            except BlockingIOError:
                await until_readable(self._socket.fileno())

    def move_now(self, step: Step) -> bool:
        """Transfer as much of a step as possible without blocking. Raises ``OSError``.

        ``False`` if this stream can be used from a thread only.
        """
        kind, buffers = step
        with suppress(BlockingIOError):
            while buffers:
                next_buffers = first_buffers(buffers)
                if kind == SEND:
                    moved = self._socket.sendmsg(next_buffers, [], socket.MSG_DONTWAIT)
                else:
                    moved = unless_closed(self._socket.recvmsg_into(next_buffers, 0, socket.MSG_DONTWAIT)[0])
                _advance(buffers, moved, self.hashes)
        return True

    async def until_possible(self, step: Step) -> None:
        """Wait until the socket is ready for the step. Raises ``OSError`` if the connection is lost."""
        if step[0] == SEND:
            await until_writable(self._socket.fileno())
        else:
            await until_readable(self._socket.fileno())

    async def move(self, steps: deque[Step], executor: IoExecutor) -> OSError | None:
        """Run steps in a thread for at most ``POLL_SECONDS``. Completed ones are removed from ``steps``.

        Return the error that broke the connection, if any. If cancelled, interrupt the socket, and release
        the memory before returning.
        """
        if not native.available():
            return await self._move_in_thread(steps, executor)
        operations = [(kind, list(buffers)) for kind, buffers in steps]
        ended = executor.start(self._socket.fileno(), operations, _NOTHING, POLL_SECONDS, self.hashes)
        # A cancelled task may keep this frame, and with it the views, longer than the leases.
        del operations
        done, moved, number = await finished(ended, self.interrupt)
        for _ in range(done):
            steps.popleft()
        if steps:
            advance(steps[0][1], moved)
        return None if number == errno.ETIMEDOUT else progress_of(done, moved, number).error

    async def _move_in_thread(self, steps: deque[Step], executor: IoExecutor) -> OSError | None:
        errors: list[OSError | None] = []
        await finished(executor.threads(lambda: errors.append(self._move_blocking(steps))), self.interrupt)
        return errors[0]

    # Called from a worker thread.

    def _move_blocking(self, steps: deque[Step]) -> OSError | None:
        # Bounded, so that other connections get the thread.
        until = time.monotonic() + POLL_SECONDS
        try:
            while steps and time.monotonic() < until:
                kind, buffers = steps[0]
                if not buffers:
                    steps.popleft()
                elif moved := (self._send_some if kind == SEND else self._receive_some)(
                    first_buffers(buffers)
                ):
                    advance(buffers, moved)
                else:
                    break
        except OSError as error:
            # The traceback refers to views, and would keep them longer than the leases.
            return error.with_traceback(None)
        return None

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        """Send for at most ``POLL_SECONDS``, and return the number of bytes sent."""
        try:
            return self._socket.sendmsg(buffers)
        except BlockingIOError:
            return 0

    def _receive_some(self, views: Sequence[memoryview]) -> int:
        try:
            return unless_closed(self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0])
        except BlockingIOError:
            return 0


class TLSStream(Stream):
    """A TLS socket. It is non-blocking; in worker threads ``ssl`` waits for it with a timeout."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._socket = self._secured = connected
        connected.settimeout(0)

    async def receive(self, limit: int) -> bytes:
        """See :meth:`Stream.receive`."""
        self._secured.settimeout(0)
        while True:
            try:
                return self._secured.recv(limit)
            except ssl.SSLWantReadError:
                await until_readable(self._secured.fileno())
            except ssl.SSLWantWriteError:
                await until_writable(self._secured.fileno())

    def move_now(self, step: Step) -> bool:
        """Return ``False``: encryption is too slow for the event loop."""
        return False

    async def until_possible(self, step: Step) -> None:
        """See :meth:`Stream.until_possible`."""
        if step[0] == SEND or not self._secured.pending():
            await super().until_possible(step)

    async def move(self, steps: deque[Step], executor: IoExecutor) -> OSError | None:
        """See :meth:`Stream.move`."""
        return await self._move_in_thread(steps, executor)

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        self._secured.settimeout(POLL_SECONDS)
        try:
            return self._secured.send(buffers[0][:_TLS_BYTES])
        except TimeoutError:
            return 0

    def _receive_some(self, views: Sequence[memoryview]) -> int:
        self._secured.settimeout(POLL_SECONDS)
        try:
            return unless_closed(self._secured.recv_into(views[0]))
        except TimeoutError:
            return 0


def stream_over(connected: socket.socket) -> Stream:
    """Return the stream for a connected socket, plain or TLS."""
    return TLSStream(connected) if isinstance(connected, ssl.SSLSocket) else Stream(connected)


def _advance(buffers: Buffers, moved: int, hashes: _native.Hashes | None) -> None:
    """Drop the bytes that have been moved, and hash them."""
    while moved:
        view = buffers[0][:moved]
        if hashes is not None:
            hashes.move(view)
        moved -= len(view)
        advance(buffers, len(view))


def _targets(spans: Sequence[RemoteSpan], views: Sequence[memoryview | None]) -> Iterator[memoryview]:
    """Yield the memory to receive into; for spans that are not granted, a shared scratch buffer."""
    scratch = memoryview(bytearray(SCRATCH_BYTES if None in views else 0))
    for span, view in zip(spans, views, strict=True):
        if view is not None:
            yield view
            continue
        for start in range(0, span.length, SCRATCH_BYTES):
            yield scratch[: span.length - start]
