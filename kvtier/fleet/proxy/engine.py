"""One engine as the proxy sees it: address, health, load, and the prefixes it probably caches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import count

import anyio
import httpx
from anyio import CancelScope

from kvtier.fleet.proxy.connections import Connections
from kvtier.fleet.proxy.prompt import PrefixMemory

AVOIDED_SECONDS = 5.0

_sequence = count()


class Role(StrEnum):
    """What an engine is used for."""

    PREFILL = "prefill"
    DECODE = "decode"


class State(StrEnum):
    """Health of an engine, as of the last check or request."""

    NEW = "new"
    UP = "up"
    DOWN = "down"


class EngineLost(Exception):
    """An engine cannot be reached, or failed before it sent a response."""

    def __init__(
        self, engine: Engine, reason: str, *, unreachable: bool = False, retryable: bool = False
    ) -> None:
        super().__init__(f"{engine.role} engine {engine.url} {reason}")
        self.engine = engine
        self.reason = reason
        """A predicate that follows the engine's name, such as "cannot be reached"."""
        self.unreachable = unreachable
        """Whether nothing listens at the address: no other request needs to try."""
        self.retryable = retryable
        """Whether the same engine may be retried: it closed one connection, as a server may at any time."""


class Engine:
    """One engine in one role. Not thread-safe: use on the event loop."""

    def __init__(
        self, role: Role, url: str, peer: str | None, connections: Connections, remember: int
    ) -> None:
        self.role = role
        self.url = url
        self.host = httpx.URL(url).host
        self.configured_peer = peer
        """Peer address given by the operator; takes precedence over the one that the engine reports."""
        self.peer = peer
        """``HOST:PORT`` at which other instances reach this one; ``None`` if unknown."""
        self.instance: str | None = None
        """Name of the engine's instance at the controller."""
        self.state = State.NEW
        self.reason = "has not been checked yet"
        """Why it is not up: a predicate that follows the engine's name."""
        self.load = 0
        """Requests in flight, including those that reserved the engine but wait for their prefill."""
        self.last_used = -1
        """Sequence number of its last request, for round robin."""
        self.served = 0
        self.failed = 0
        self.last_response_at = 0.0
        """Monotonic time at which response data last arrived."""
        self.avoided_until = 0.0
        """Monotonic time until which other engines are preferred, after a failure."""
        self.memory = PrefixMemory(remember)
        self.connections = connections
        self._urls: dict[str, httpx.URL] = {}
        self._waiting: set[CancelScope] = set()
        self._removed = anyio.Event()
        self._idle = anyio.Event()

    @property
    def removed(self) -> bool:
        """Whether the engine was removed and gets no further requests."""
        return self._removed.is_set()

    def remove(self) -> None:
        """Mark the engine as removed: it gets no further requests."""
        self._removed.set()

    async def sleep(self, seconds: float) -> None:
        """Sleep for that time, or until the engine is removed."""
        with anyio.move_on_after(seconds):
            await self._removed.wait()

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        while self.load:
            await self._idle.wait()

    def endpoint(self, path: str) -> httpx.URL:
        """Return the URL of an endpoint. Parsed URLs are cached."""
        if path not in self._urls:
            self._urls[path] = httpx.URL(self.url + path)
        return self._urls[path]

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Count a request as in flight while the block runs."""
        self.last_used = next(_sequence)
        self.load += 1
        try:
            yield
        finally:
            self.load -= 1
            if not self.load:
                self._idle.set()
                self._idle = anyio.Event()

    @contextmanager
    def awaiting_response(self) -> Iterator[None]:
        """Cancel the block if a health check marks the engine down.

        Raises :class:`EngineLost` in that case, and if the connection fails.
        """
        with CancelScope() as scope:
            self._waiting.add(scope)
            try:
                yield
            except httpx.TransportError as error:
                unreachable = isinstance(error, httpx.ConnectError)
                retryable = not isinstance(error, httpx.ConnectError | httpx.TimeoutException)
                raise EngineLost(
                    self, describe_transport_error(error), unreachable=unreachable, retryable=retryable
                ) from error
            finally:
                self._waiting.discard(scope)
        if scope.cancelled_caught:
            raise EngineLost(self, self.reason)

    def mark_up(self) -> None:
        """Record that the engine is healthy."""
        self.state, self.reason = State.UP, ""

    def record_failure(self, lost: EngineLost) -> None:
        """Count a failed request, and avoid the engine for a while.

        An engine that fails immediately is always the least loaded one, and would get every request.
        """
        self.failed += 1
        self.avoided_until = time.monotonic() + AVOIDED_SECONDS
        if lost.unreachable:
            self.state, self.reason = State.DOWN, lost.reason

    def mark_down(self, reason: str) -> None:
        """Record that the engine is unhealthy: cancel waits for a response, and forget its prefixes."""
        self.state, self.reason = State.DOWN, reason
        self.memory.clear()
        if self.configured_peer is None:
            self.peer = None  # After a restart it may have another address.
        for scope in list(self._waiting):
            scope.cancel()


def describe_transport_error(error: httpx.TransportError) -> str:
    """Return a predicate that follows the engine's name."""
    match error:
        case httpx.ConnectError() | httpx.ConnectTimeout():
            return "cannot be reached"
        case httpx.ReadTimeout():
            return "timed out: no data from it"
        case httpx.WriteTimeout():
            return "timed out: it does not read"
        case _:
            return "closed the connection"
