"""Engines as the proxy sees them: address, health, load, cached prefixes; and the choice of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import count

import anyio
import httpx
from anyio import CancelScope

from kvtier.concurrency.tasks import Changes
from kvtier.fleet.proxy.connections import Connections
from kvtier.fleet.proxy.prompt import PrefixMemory
from kvtier.fleet.proxy.settings import MAX_ENGINES
from kvtier.fleet.service import trusted_certificates

AVOIDED_SECONDS = 5.0
UNREACHABLE = "cannot be reached"
"""A predicate that follows the engine's name."""
_sequence = count()
SLACK = 4
"""An engine is chosen for its cached prefix only if its load is at most 1.5 times the smallest load plus
this: a cached prefix is worth some queueing, but not much."""


class Role(StrEnum):
    """What an engine is used for."""

    PREFILL = "prefill"
    DECODE = "decode"


class State(StrEnum):
    """Health of an engine, as of the last check or request."""

    NEW = "new"
    UP = "up"
    DOWN = "down"


class UpstreamLost(Exception):
    """An engine cannot be reached, or failed before it sent a response."""

    def __init__(
        self, upstream: Upstream, reason: str, *, unreachable: bool = False, retryable: bool = False
    ) -> None:
        super().__init__(f"{upstream.role} engine {upstream.url} {reason}")
        self.upstream = upstream
        self.reason = reason
        """A predicate that follows the engine's name, such as "cannot be reached"."""
        self.unreachable = unreachable
        """Whether nothing listens at the address: no other request needs to try."""
        self.retryable = retryable
        """Whether the same engine may be retried: it closed one connection, as a server may at any time."""


class Upstream:
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
        self._idle = Changes()

    @property
    def remembered_blocks(self) -> int:
        """Blocks of prompts that it probably caches."""
        return len(self.memory)

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
            await self._idle.after(self._idle.count)

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
                self._idle.notify()

    @contextmanager
    def awaiting_response(self) -> Iterator[None]:
        """Cancel the block if a health check marks the engine down.

        Raises :class:`UpstreamLost` in that case, and if the connection fails.
        """
        with CancelScope() as scope:
            self._waiting.add(scope)
            try:
                yield
            except httpx.TransportError as error:
                unreachable = isinstance(error, httpx.ConnectError)
                retryable = not isinstance(error, httpx.ConnectError | httpx.TimeoutException)
                raise UpstreamLost(
                    self, describe_transport_error(error), unreachable=unreachable, retryable=retryable
                ) from error
            finally:
                self._waiting.discard(scope)
        if scope.cancelled_caught:
            raise UpstreamLost(self, self.reason)

    def mark_up(self) -> None:
        """Record that the engine is healthy."""
        self.state, self.reason = State.UP, ""

    def record_failure(self, lost: UpstreamLost) -> None:
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
            return UNREACHABLE
        case httpx.ReadTimeout():
            return "timed out: no data from it"
        case httpx.WriteTimeout():
            return "timed out: it does not read"
        case _:
            return "closed the connection"


class Upstreams:
    """Engines by role and URL. Engines can be added and removed while the proxy runs."""

    def __init__(self, remember: int) -> None:
        self._remember = remember
        self._upstreams: dict[tuple[Role, str], Upstream] = {}
        self.draining: set[Upstream] = set()
        """Removed engines with requests in flight."""

    def __iter__(self) -> Iterator[Upstream]:
        return iter(self._upstreams.values())

    def __len__(self) -> int:
        return len(self._upstreams)

    def of(self, role: Role) -> list[Upstream]:
        """Return all engines of a role."""
        return [upstream for upstream in self if upstream.role == role]

    def find(self, role: Role, url: str) -> Upstream | None:
        """Return the engine with that role and URL, if any."""
        return self._upstreams.get((role, url))

    def add(self, role: Role, url: str, peer: str | None = None) -> Upstream:
        """Add an engine. Raises ``ValueError`` if it exists already, or there are too many."""
        if (role, url) in self._upstreams:
            raise ValueError(f"{role} engine {url} exists already")
        if len(self._upstreams) >= 2 * MAX_ENGINES:
            raise ValueError(f"there are {len(self._upstreams)} engines already: start another proxy")
        tls = trusted_certificates() if url.startswith("https://") else None
        upstream = Upstream(role, url, peer, Connections(tls), self._remember)
        self._upstreams[role, url] = upstream
        return upstream

    def remove(self, upstream: Upstream) -> None:
        """Send an engine no further requests; requests in flight complete normally."""
        del self._upstreams[upstream.role, upstream.url]
        upstream.remove()
        self.draining.add(upstream)

    def choose(
        self, role: Role, held: Callable[[Upstream], int], exclude: Collection[Upstream] = ()
    ) -> Upstream | None:
        """Return the engine with the longest cached prefix among those with a load close to the smallest.

        ``held`` returns how many tokens of the prompt an engine caches. Ties go to the least loaded engine,
        then to the least recently used one. Engines that failed recently are a last resort. Every request
        needs a decoder: if no decode engine is known to be up, one in any state is returned.
        """
        upstreams = [upstream for upstream in self.of(role) if upstream not in exclude]
        candidates = [upstream for upstream in upstreams if upstream.state == State.UP]
        if not candidates and role == Role.DECODE:
            candidates = upstreams
        if not candidates:
            return None
        now = time.monotonic()
        candidates = [upstream for upstream in candidates if upstream.avoided_until <= now] or candidates
        max_load = min(upstream.load for upstream in candidates) * 1.5 + SLACK
        return max(
            (upstream for upstream in candidates if upstream.load <= max_load),
            key=lambda upstream: (held(upstream), -upstream.load, -upstream.last_used),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        for upstream in [*self, *self.draining]:
            await upstream.connections.aclose()
