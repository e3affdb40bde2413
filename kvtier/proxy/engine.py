"""One engine as the proxy knows it: where it is, whether it lives, what is under way there, what it holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import count

import anyio
import httpx
from anyio import CancelScope

from kvtier.proxy.connections import Connections
from kvtier.proxy.errors import EngineLost
from kvtier.proxy.prompt import PrefixMemory

AVOIDED_SECONDS = 5.0

_turns = count()


class Role(StrEnum):
    """What an engine is used for."""

    PREFILL = "prefill"
    DECODE = "decode"


class State(StrEnum):
    """How an engine was when it was last asked."""

    NEW = "new"
    UP = "up"
    DOWN = "down"


class Engine:
    """One engine in one role. Its fields are changed by whoever has it, in the event loop."""

    def __init__(
        self, role: Role, url: str, peer: str | None, connections: Connections, remember: int
    ) -> None:
        self.role = role
        self.url = url
        self.host = httpx.URL(url).host
        self.named_peer = peer
        """As whoever added the engine has written it; stands above what the engine says."""
        self.peer = peer
        """Where other instances reach the engine's, ``HOST:PORT``; ``None`` where that is not known."""
        self.instance: str | None = None
        """What the controller calls the engine's instance."""
        self.state = State.NEW
        self.why = "has not been asked yet"
        """Where it is not up: why, in words that follow its name."""
        self.load = 0
        """Requests under way, those that are meant for it included."""
        self.turn = -1
        """When it was last given a request, as a running number."""
        self.served = 0
        self.failed = 0
        self.heard_at = 0.0
        """On the monotonic clock: when an answer of it last went on."""
        self.avoided_until = 0.0
        """On the monotonic clock: others are asked first until then."""
        self.memory = PrefixMemory(remember)
        self.connections = connections
        self._urls: dict[str, httpx.URL] = {}
        self._waiting: set[CancelScope] = set()
        self._removed = anyio.Event()
        self._idle = anyio.Event()

    @property
    def removed(self) -> bool:
        """Whether it is to get nothing more."""
        return self._removed.is_set()

    def remove(self) -> None:
        """Give it nothing more."""
        self._removed.set()

    async def sleep(self, seconds: float) -> None:
        """Let so much time pass, or less where it is removed."""
        with anyio.move_on_after(seconds):
            await self._removed.wait()

    async def until_idle(self) -> None:
        """Wait until nothing is under way."""
        while self.load:
            await self._idle.wait()

    def at(self, path: str) -> httpx.URL:
        """The URL of one of its endpoints."""
        if path not in self._urls:
            self._urls[path] = httpx.URL(self.url + path)
        return self._urls[path]

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Count a request as under way."""
        self.turn = next(_turns)
        self.load += 1
        try:
            yield
        finally:
            self.load -= 1
            if not self.load:
                self._idle.set()
                self._idle = anyio.Event()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for an answer to begin, for as long as the engine lives.

        Raises :class:`EngineLost` where it is found dead meanwhile or the connection fails.
        """
        with CancelScope() as scope:
            self._waiting.add(scope)
            try:
                yield
            except httpx.TransportError as error:
                gone = isinstance(error, httpx.ConnectError)
                again = not isinstance(error, httpx.ConnectError | httpx.TimeoutException)
                raise EngineLost(self, described(error), gone=gone, again=again) from error
            finally:
                self._waiting.discard(scope)
        if scope.cancelled_caught:
            raise EngineLost(self, self.why)

    def lives(self) -> None:
        """It has answered."""
        self.state, self.why = State.UP, ""

    def has_failed(self, lost: EngineLost) -> None:
        """A request has not been answered there, or nobody was there.

        An engine that fails at once is always idle, and would get every request.
        """
        self.failed += 1
        self.avoided_until = time.monotonic() + AVOIDED_SECONDS
        if lost.gone:
            self.state, self.why = State.DOWN, lost.why

    def is_down(self, why: str) -> None:
        """It does not answer. What waits for it to begin goes elsewhere; what it held counts as lost."""
        self.state, self.why = State.DOWN, why
        self.memory.clear()
        if self.named_peer is None:
            self.peer = None  # It may come back with another.
        for scope in list(self._waiting):
            scope.cancel()


def described(error: httpx.TransportError) -> str:
    """What has happened to a connection, in words that follow an engine's name."""
    match error:
        case httpx.ConnectError() | httpx.ConnectTimeout():
            return "cannot be reached"
        case httpx.ReadTimeout():
            return "has said nothing for too long"
        case httpx.WriteTimeout():
            return "takes nothing in"
        case _:
            return "has closed the connection"
