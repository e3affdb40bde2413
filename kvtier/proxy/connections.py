"""HTTP connections to one engine: as many as there are requests under way, and some that wait for more."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

import httpx

from kvtier.proxy.transport import EngineTransport

CONNECT_SECONDS = 15.0
"""Long enough for a thousand connections at once: whether an engine lives is for its checks to find out."""
WRITE_SECONDS = 30.0


def verification(url: str) -> ssl.SSLContext | None:
    """How to verify who answers at a URL: by the certificates that this host trusts, where it is HTTPS."""
    return _context() if url.startswith("https://") else None


@cache
def _context() -> ssl.SSLContext:
    """One for all: reading the certificates takes a while."""
    return ssl.create_default_context()


class Connections:
    """All connections to one engine. Bounded by who asks: one request has one connection."""

    def __init__(self, verify: ssl.SSLContext | None) -> None:
        self._transport = EngineTransport(verify)
        self.used = 0
        """Connections on which something is under way."""

    @asynccontextmanager
    async def exchange(self, request: httpx.Request, silence: float) -> AsyncIterator[httpx.Response]:
        """Send a request and have the head of its answer; what is not read of the rest is cut off.

        ``silence`` is how many seconds may pass without a byte. Raises :class:`httpx.TransportError`.
        """
        timeouts = {"connect": CONNECT_SECONDS, "write": WRITE_SECONDS, "read": silence, "pool": None}
        request.extensions = {"timeout": timeouts}
        self.used += 1
        try:
            response = await self._transport.handle_async_request(request)
            try:
                yield response
            finally:
                await response.aclose()
        finally:
            self.used -= 1

    async def aclose(self) -> None:
        """Close all; requests that are under way fail."""
        await self._transport.aclose()
