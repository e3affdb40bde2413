"""The side that serves bytes: one connection of a peer, watched by the event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvtier.backends.logs import RareWarning
from kvtier.slices import Lease
from kvtier.sockets.buffers import Buffers, advance, cut
from kvtier.sockets.connection import ProtocolViolation, keep_alive
from kvtier.sockets.conversation import RECEIVE, SEND
from kvtier.sockets.pump import SMALL_BYTES, Pump
from kvtier.transports.base import Access, Grants, RemoteSpan
from kvtier.transports.tcp.stream import Step, stream_over
from kvtier.transports.tcp.wire import CONFIRMED_BYTES, MARK, Request, RequestReader, encode_answer

ANSWERS_AT_ONCE = 8
"""Requests whose leases are held at once, for one connection."""
RECEIVE_BYTES = 4096
"""At once, of requests: what is received beside them is copied."""
SCRATCH_BYTES = 1 << 18

_warn = RareWarning(logging.getLogger("kvtier"))


class Session:
    """Answers requests in their order. A thread is needed only while the socket takes bytes in."""

    def __init__(self, connected: socket.socket, grants: Grants, pump: Pump, deadline: float) -> None:
        self._socket = connected
        self._stream = stream_over(connected)
        self._grants = grants
        self._pump = pump
        self._deadline = deadline
        self._reader = RequestReader()
        self._next: Request | None = None
        """A request to write that came after others to read."""

    async def run(self) -> None:
        """Until the peer closes, breaks off, is too slow, or sends what it must not."""
        try:
            keep_alive(self._socket)
            while requests := await self._requests():
                # Who does not take what it has asked for is not waited for any longer.
                with self._patience(self._deadline * len(requests)):
                    if requests[0].access is Access.READ:
                        await self._answer(requests)
                    else:
                        await self._take_in(requests[0].spans)
        except ProtocolViolation as error:
            _warn("a peer's connection is closed: %s", error)
        except OSError:
            return

    @contextmanager
    def _patience(self, seconds: float) -> Iterator[None]:
        """The connection breaks where this takes longer. Cheaper than a scope, which each part would pay."""
        timer = asyncio.get_running_loop().call_later(seconds, self._stream.interrupt)
        try:
            yield
        finally:
            timer.cancel()

    async def _requests(self) -> list[Request]:
        """Requests that are there, at least one: some to read, or one to write. None: the peer has closed."""
        while not (requests := self._parsed()):
            if self._reader.held:
                # Who has said half of it has a deadline; who says nothing may take as long as it likes.
                with self._patience(self._deadline):
                    data = await self._stream.receive(RECEIVE_BYTES)
            else:
                data = await self._stream.receive(RECEIVE_BYTES)
            if not data:
                return []
            self._reader.feed(data)
        return requests

    def _parsed(self) -> list[Request]:
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
                held = [self._held(span, Access.READ, leases) for span in request.spans]
                granted = encode_answer(Access.READ, [view is not None for view in held])
                buffers.append(memoryview(granted))
                buffers.extend(view for view in held if view)
            held = []
            await self._carry((SEND, buffers))
        finally:
            buffers.clear()
            for lease in leases:
                lease.release()

    async def _take_in(self, spans: Sequence[RemoteSpan]) -> None:
        leases: list[Lease] = []
        steps: list[Step] = []
        try:
            held = [self._held(span, Access.WRITE, leases) for span in spans]
            confirmation = encode_answer(Access.WRITE, [view is not None for view in held])
            for run in cut(_targets(spans, held), CONFIRMED_BYTES):
                steps += [(RECEIVE, run), (SEND, deque([memoryview(confirmation)]))]
                confirmation = MARK
            held = []
            self._take_held(steps[0][1])
            await self._carry(*steps)
        finally:
            for _, buffers in steps:
                buffers.clear()
            for lease in leases:
                lease.release()

    def _take_held(self, targets: Buffers) -> None:
        """Fill the first of them with what came along with the request."""
        while targets and (data := self._reader.take(len(targets[0]))):
            targets[0][: len(data)] = data
            advance(targets, len(data))

    def _held(self, span: RemoteSpan, access: Access, leases: list[Lease]) -> memoryview | None:
        """The memory of a span that is granted, leased as long as ``leases`` are."""
        lease = self._grants.hold(span, access)
        if lease is None:
            return None
        leases.append(lease)
        start = span.offset - lease.offset
        view = lease.view[start : start + span.length]
        return view if start >= 0 and len(view) == span.length else None

    async def _carry(self, *given: Step) -> None:
        """Carry steps out: small ones in the loop, others in a thread while the socket does its part."""
        steps = deque(given)
        while steps:
            buffers = steps[0][1]
            is_small = sum(map(len, buffers)) <= SMALL_BYTES
            if not (is_small and self._stream.move_now(steps[0])):
                error = await self._stream.move(steps, self._pump)
                if error is not None:
                    raise error
            elif not buffers:
                steps.popleft()
            if steps and buffers:
                await self._stream.until_possible(steps[0])


def _targets(spans: Sequence[RemoteSpan], held: Sequence[memoryview | None]) -> Iterator[memoryview]:
    """Where their bytes go; what is not granted all into the same memory, which nobody keeps."""
    scratch = memoryview(bytearray(SCRATCH_BYTES if None in held else 0))
    for span, view in zip(spans, held, strict=True):
        if view is not None:
            yield view
            continue
        for start in range(0, span.length, SCRATCH_BYTES):
            yield scratch[: span.length - start]
