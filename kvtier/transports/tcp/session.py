"""The serving side: one connection of a peer, polled by the event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvtier.concurrency.sockets.connection import (
    RECEIVE,
    SEND,
    Buffers,
    ProtocolViolation,
    advance,
    keep_alive,
    split_runs,
)
from kvtier.concurrency.sockets.executor import SMALL_BYTES, IoExecutor
from kvtier.logs import RateLimitedLog
from kvtier.memory.slices import Lease
from kvtier.transports.base import Access, Grants, RemoteSpan
from kvtier.transports.tcp.stream import Step, stream_over
from kvtier.transports.tcp.wire import CONFIRMED_BYTES, MARK, Request, RequestReader, encode_answer

ANSWERS_AT_ONCE = 8
"""Maximum number of requests of one connection whose leases are held at once."""
RECEIVE_BYTES = 4096
"""Size of one read of requests. Payload that arrives with them is copied, so this is small."""
SCRATCH_BYTES = 1 << 18

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
        try:
            views = [self._lease(span, Access.WRITE, leases) for span in spans]
            confirmation = encode_answer(Access.WRITE, [view is not None for view in views])
            for run in split_runs(_targets(spans, views), CONFIRMED_BYTES):
                steps += [(RECEIVE, run), (SEND, deque([memoryview(confirmation)]))]
                confirmation = MARK
            views = []
            self._copy_buffered(steps[0][1])
            await self._run_steps(*steps)
        finally:
            for _, buffers in steps:
                buffers.clear()
            for lease in leases:
                lease.release()

    def _copy_buffered(self, targets: Buffers) -> None:
        """Copy payload that arrived with the request to the first targets."""
        while targets and (data := self._reader.take(len(targets[0]))):
            targets[0][: len(data)] = data
            advance(targets, len(data))

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


def _targets(spans: Sequence[RemoteSpan], views: Sequence[memoryview | None]) -> Iterator[memoryview]:
    """Yield the memory to receive into; for spans that are not granted, a shared scratch buffer."""
    scratch = memoryview(bytearray(SCRATCH_BYTES if None in views else 0))
    for span, view in zip(spans, views, strict=True):
        if view is not None:
            yield view
            continue
        for start in range(0, span.length, SCRATCH_BYTES):
            yield scratch[: span.length - start]
