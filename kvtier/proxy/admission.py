"""How much is under way at once: requests, and bytes of their bodies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
from anyio import CancelScope

from kvtier.proxy.errors import ClientGone, Refused
from kvtier.units import format_size

if TYPE_CHECKING:
    from kvtier.http import Receive

BODY_SECONDS = 60.0
"""That a body may take to arrive."""
RETRY_SECONDS = 1
"""After which a client may find room."""
BUSY = {"retry-after": str(RETRY_SECONDS)}


class Ticket:
    """One request that is under way."""

    def __init__(self) -> None:
        self.scope = CancelScope()
        self.held_bytes = 0
        self.stopped = False

    def stop(self) -> None:
        """Have the request end now: the proxy leaves."""
        self.stopped = True
        self.scope.cancel()


class Admission:
    """Lets requests in, up to a limit, until the proxy is to end."""

    def __init__(self, most_requests: int, most_body: int, most_held: int) -> None:
        self._most_requests = most_requests
        self._most_body = most_body
        self._most_held = most_held
        self._under_way: set[Ticket] = set()
        self._ended = anyio.Event()
        self.draining = False
        self.held_bytes = 0

    @property
    def under_way(self) -> int:
        """Requests that were let in and have not ended."""
        return len(self._under_way)

    @contextmanager
    def admit(self) -> Iterator[Ticket]:
        """Let a request in until the block is left. Raises :class:`Refused`."""
        if self.draining:
            message = "this proxy is about to end, and takes no more requests: send it to another"
            raise Refused(503, message, {**BUSY, "connection": "close"})
        if len(self._under_way) >= self._most_requests:
            message = (
                f"{len(self._under_way)} requests are under way, as many as this proxy takes at once "
                "(--most-requests): try again later"
            )
            raise Refused(429, message, BUSY)
        ticket = Ticket()
        self._under_way.add(ticket)
        try:
            yield ticket
        finally:
            self.held_bytes -= ticket.held_bytes
            self._under_way.discard(ticket)
            if not self._under_way:
                self._ended.set()
                self._ended = anyio.Event()

    async def read(self, ticket: Ticket, receive: Receive, length: str | None) -> bytes:
        """A request's body. Raises :class:`Refused` for one that is too long or too slow."""
        if length is not None and length.isdecimal() and int(length) > self._most_body:
            raise self._too_long()
        content = bytearray()
        with anyio.move_on_after(BODY_SECONDS) as patience:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                self._hold(ticket, message.get("body", b""), content)
                if not message.get("more_body", False):
                    return bytes(content)
        assert patience.cancelled_caught
        raise Refused(408, f"the body has not arrived within {BODY_SECONDS:g} s", {"connection": "close"})

    async def drain(self, seconds: float) -> None:
        """Let nothing more in, and wait until all have ended; after ``seconds`` they are ended."""
        self.draining = True
        with anyio.move_on_after(seconds):
            await self._all_ended()
        await self.stop()

    async def stop(self) -> None:
        """End all requests that are under way: each is told."""
        self.draining = True
        for ticket in self._under_way:
            ticket.stop()
        await self._all_ended()

    async def _all_ended(self) -> None:
        while self._under_way:
            await self._ended.wait()

    def _hold(self, ticket: Ticket, piece: bytes, content: bytearray) -> None:
        content += piece
        if len(content) > self._most_body:
            raise self._too_long()
        if self.held_bytes + len(piece) > self._most_held:
            message = (
                f"the bodies of requests that are under way fill {format_size(self._most_held)} "
                "(--most-held): try again later"
            )
            raise Refused(429, message, {**BUSY, "connection": "close"})
        ticket.held_bytes += len(piece)
        self.held_bytes += len(piece)

    def _too_long(self) -> Refused:
        message = f"the body is longer than {format_size(self._most_body)} (--most-body)"
        return Refused(413, message, {"connection": "close"})
