"""HTTP connections to one engine: as many as there are requests under way, and some that wait for more."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

import httpx

POOL_SIZE = 16
"""httpx looks at every connection of a pool whenever a request begins or ends: many small pools, then."""
IDLE_SECONDS = 2.0
"""An engine closes idle connections after 5 s (uvicorn): a request must not meet that moment."""
CONNECT_SECONDS = 5.0
WRITE_SECONDS = 30.0


def verification(url: str) -> ssl.SSLContext | bool:
    """How to verify who answers at a URL: by the certificates that this host trusts, where it is HTTPS."""
    return _context() if url.startswith("https://") else False


@cache
def _context() -> ssl.SSLContext:
    """One for all: reading the certificates takes a while."""
    return ssl.create_default_context()


class Connections:
    """All connections to one engine. Bounded by who asks: one request has one connection."""

    def __init__(self, verify: ssl.SSLContext | bool) -> None:
        self._verify = verify
        self._pools: list[_Pool] = []

    @property
    def used(self) -> int:
        """Connections on which something is under way."""
        return sum(pool.used for pool in self._pools)

    @asynccontextmanager
    async def exchange(
        self, request: httpx.Request, silence: float, connect: float = CONNECT_SECONDS
    ) -> AsyncIterator[httpx.Response]:
        """Send a request and have the head of its answer; what is not read of the rest is cut off.

        ``silence`` is how many seconds may pass without a byte. Raises :class:`httpx.TransportError`.
        """
        request.extensions = {
            "timeout": {"connect": connect, "write": WRITE_SECONDS, "read": silence, "pool": None}
        }
        pool = self._free_pool()
        pool.used += 1
        try:
            response = await pool.transport.handle_async_request(request)
            try:
                yield response
            finally:
                await response.aclose()
        finally:
            pool.used -= 1

    async def aclose(self) -> None:
        """Close all; requests that are under way fail."""
        for pool in self._pools:
            await pool.transport.aclose()

    def _free_pool(self) -> _Pool:
        """The first with room, so that the last ones fall idle and their connections expire."""
        for pool in self._pools:
            if pool.used < POOL_SIZE:
                return pool
        self._pools.append(_Pool(self._verify))
        return self._pools[-1]


class _Pool:
    def __init__(self, verify: ssl.SSLContext | bool) -> None:
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=POOL_SIZE, keepalive_expiry=IDLE_SECONDS
        )
        self.transport = httpx.AsyncHTTPTransport(verify=verify, trust_env=False, limits=limits)
        self.used = 0
