"""HTTP connections to one engine: one per request in flight, plus some idle ones."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

import httpx

from kvtier.fleet.proxy.transport import EngineTransport

CONNECT_SECONDS = 15.0
"""Allows for a thousand connects at once. Health checks, not this timeout, detect a dead engine."""
WRITE_SECONDS = 30.0


def verification(url: str) -> ssl.SSLContext | None:
    """Return the TLS context for an HTTPS URL, with this host's trusted certificates; ``None`` for HTTP."""
    return _context() if url.startswith("https://") else None


@cache
def _context() -> ssl.SSLContext:
    """Create the shared context once, because loading the certificates is slow."""
    return ssl.create_default_context()


class Connections:
    """All connections to one engine. Admission bounds their number: each request uses one."""

    def __init__(self, verify: ssl.SSLContext | None) -> None:
        self._transport = EngineTransport(verify)
        self.used = 0
        """Connections with a request in flight."""

    @asynccontextmanager
    async def exchange(self, request: httpx.Request, idle_timeout: float) -> AsyncIterator[httpx.Response]:
        """Send a request and yield its response; a body that is not read to its end is aborted.

        ``idle_timeout``: seconds without any data after which reading fails.
        Raises :class:`httpx.TransportError`, and :class:`Refused` if this process lacks file descriptors.
        """
        timeouts = {"connect": CONNECT_SECONDS, "write": WRITE_SECONDS, "read": idle_timeout, "pool": None}
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
        """Close all connections; requests in flight fail."""
        await self._transport.aclose()
