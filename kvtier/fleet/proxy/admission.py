"""Admission control: limit the requests in flight, and the memory of their bodies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
from anyio import CancelScope

from kvtier.concurrency.tasks import Changes
from kvtier.fleet.proxy.client import BUSY, CLOSE, ClientDisconnected, Refused
from kvtier.units import format_size

if TYPE_CHECKING:
    from starlette.types import Receive

BODY_SECONDS = 60.0
"""Timeout for receiving a request body."""


class Ticket:
    """One admitted request."""

    def __init__(self) -> None:
        self.scope = CancelScope()
        self.held_bytes = 0
        self.stopped = False

    def stop(self) -> None:
        """Cancel the request, because the proxy shuts down."""
        self.stopped = True
        self.scope.cancel()


class Admission:
    """Admits requests up to a limit, until the proxy drains."""

    def __init__(self, max_requests: int, max_body: int, max_held: int) -> None:
        self._max_requests = max_requests
        self._max_body = max_body
        self._max_held = max_held
        self._in_flight: set[Ticket] = set()
        self._ended = Changes()
        self.draining = False
        self.held_bytes = 0

    @property
    def in_flight(self) -> int:
        """Number of admitted requests that have not ended."""
        return len(self._in_flight)

    @contextmanager
    def admit(self) -> Iterator[Ticket]:
        """Admit a request while the block runs. Raises :class:`Refused` when over the limit or draining."""
        if self.draining:
            message = "this proxy is shutting down and accepts no new requests: use another one"
            raise Refused(503, message, BUSY | CLOSE)
        if len(self._in_flight) >= self._max_requests:
            message = (
                f"{len(self._in_flight)} requests are in flight, the limit of this proxy (--max-requests): "
                "try again later"
            )
            raise Refused(429, message, BUSY | CLOSE)
        ticket = Ticket()
        self._in_flight.add(ticket)
        try:
            yield ticket
        finally:
            self.held_bytes -= ticket.held_bytes
            self._in_flight.discard(ticket)
            if not self._in_flight:
                self._ended.notify()

    async def read(self, ticket: Ticket, receive: Receive, length: str | None) -> bytes:
        """Receive a request's body; ``length`` is its ``Content-Length``.

        Raises :class:`Refused` if it is too long, arrives too slowly, or exceeds the memory for bodies, and
        :class:`ClientDisconnected`.
        """
        if length is not None and length.isdecimal() and int(length) > self._max_body:
            raise self._too_long()
        content = bytearray()
        with anyio.move_on_after(BODY_SECONDS) as scope:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                self._account(ticket, message.get("body", b""), content)
                if not message.get("more_body", False):
                    return bytes(content)
        assert scope.cancelled_caught
        raise Refused(408, f"the body has not arrived within {BODY_SECONDS:g} s", CLOSE)

    async def drain(self, seconds: float) -> None:
        """Admit no new requests and wait for those in flight; cancel them after ``seconds``."""
        self.draining = True
        with anyio.move_on_after(seconds):
            await self._wait_all_ended()
        await self.stop()

    async def stop(self) -> None:
        """Cancel all requests in flight; each client gets an error."""
        self.draining = True
        for ticket in self._in_flight:
            ticket.stop()
        await self._wait_all_ended()

    async def _wait_all_ended(self) -> None:
        while self._in_flight:
            await self._ended.after(self._ended.count)

    def _account(self, ticket: Ticket, piece: bytes, content: bytearray) -> None:
        content += piece
        if len(content) > self._max_body:
            raise self._too_long()
        if self.held_bytes + len(piece) > self._max_held:
            message = (
                f"the bodies of requests in flight fill {format_size(self._max_held)} "
                "(--max-held): try again later"
            )
            raise Refused(429, message, BUSY | CLOSE)
        ticket.held_bytes += len(piece)
        self.held_bytes += len(piece)

    def _too_long(self) -> Refused:
        message = f"the body is longer than {format_size(self._max_body)} (--max-body)"
        return Refused(413, message, CLOSE)
