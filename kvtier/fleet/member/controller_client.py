"""Instance's end of the controller connection, with automatic reconnects.

An unreachable, rejecting or faulty controller does not affect the cache: only
:meth:`ControllerClient.who_holds` waits for the controller, with a timeout.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import TypeVar
from urllib.parse import urlsplit

import anyio
from anyio import CancelScope
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from kvtier.cache import TieredCache
from kvtier.concurrency.breaker import Backoff
from kvtier.errors import ChannelClosed, ChannelError, Rejected
from kvtier.fleet.member.protocol import CONNECT_PATH, VERSION, Hello, TierDescription
from kvtier.fleet.member.session import Session
from kvtier.logs import RateLimitedLog, printable
from kvtier.memory.keys import ChunkKey
from kvtier.rpc.frames import MAX_FRAME_BYTES
from kvtier.settings import Settings
from kvtier.settings.peer import reached_from_elsewhere
from kvtier.version import __version__

logger = logging.getLogger("kvtier")

CONNECT_SECONDS = 5.0
CLOSE_SECONDS = 0.5
"""Timeout of the closing handshake."""
STEADY_SECONDS = 5.0
"""A connection that lasted longer than this resets the back-off."""

AnswerT = TypeVar("AnswerT")


class ControllerClient:
    """Keeps an instance registered with one controller while :meth:`run` runs. One event loop only."""

    def __init__(
        self,
        settings: Settings,
        cache: TieredCache,
        url: str,
        open_session: Callable[[ClientConnection], Session],
        *,
        serving: str | None,
        transport: str | None,
    ) -> None:
        """``serving``: where this instance serves peers, with the bound port; the host may be a wildcard.

        ``transport``: name of the transport for peers; ``None`` if fetching from peers is disabled.
        """
        self._settings = settings.controller
        self._timeout = settings.peer.timeout
        self._cache = cache
        self._url = url
        self._open_session = open_session
        self._serving = serving
        self._transport = transport
        self._name = settings.controller.instance_name
        self._incarnation = secrets.randbits(63)
        self._session: Session | None = None
        self._backoff = Backoff()
        self._warn = RateLimitedLog(logger)
        self._last_error = ""
        self._refused: str | None = None
        self._lost = 0

    @property
    def can_answer(self) -> bool:
        """Whether its controller knows what this instance holds, and probably the others' chunks."""
        return self._session is not None and self._session.inventory.up_to_date

    async def run(self) -> None:
        """Stay registered until cancelled. Does not raise other exceptions."""
        while True:
            began = time.monotonic()
            try:
                await self._stay_registered()
            except Rejected as error:
                self._refused = str(error)
                self._note(f"it rejects this instance: {self._refused}")
            except (OSError, ChannelError) as error:
                self._refused = None
                self._note(printable(str(error)))
            except Exception as error:  # A bug, which must not affect the cache.
                logger.exception("controller %s: the connection failed", self._url)
                self._note(repr(error))
            if time.monotonic() - began > STEADY_SECONDS:
                self._backoff.reset()
            await anyio.sleep(self._backoff.next())

    async def who_holds(self, keys: Sequence[ChunkKey]) -> list[tuple[str, int]]:
        """Return the peer addresses of instances that hold leading ``keys``, and how many; most first.

        Empty if the controller is not connected, or does not answer within ``peer.timeout``.
        """
        with anyio.move_on_after(self._timeout):
            return await self._ask(lambda session: session.who_holds(keys)) or []
        return []

    async def who_serves(self, addresses: Sequence[str]) -> list[str] | None:
        """Return those of ``addresses`` at which a registered instance serves peers.

        ``None`` if the controller is not connected. Waits for its answer without a timeout.
        """
        return await self._ask(lambda session: session.who_serves(addresses))

    async def _ask(self, question: Callable[[Session], Awaitable[AnswerT]]) -> AnswerT | None:
        session = self._session
        if session is None:
            return None
        try:
            return await question(session)
        except ChannelError:
            logger.debug("lost the connection to the controller during a request")
            return None

    def status(self) -> dict[str, object]:
        """Return the state of the connection, for diagnostics and tests."""
        session = self._session
        return {
            "url": self._url,
            "instance": self._name,
            "connected": session is not None,
            "up_to_date": self.can_answer,
            "resyncs": session.inventory.lost if session is not None else 0,
            "commands": len(session.commands_running) if session is not None else 0,
            "refused": self._refused,
            "last_error": self._last_error,
            "lost": self._lost,
        }

    def _note(self, last_error: str) -> None:
        self._last_error = last_error
        self._warn("controller %s: %s; continuing without it", self._url, last_error)

    async def _stay_registered(self) -> None:
        """Register, and serve the controller until the connection ends. Always raises the reason."""
        async with self._connection() as connection:
            session = self._open_session(connection)
            welcome = await session.greet(self._hello(connection.local_address[0]))
            if self._last_error:
                logger.info("controller %s: this instance, %s, is registered again", self._url, self._name)
            else:
                logger.info("controller %s: this instance is registered as %s", self._url, self._name)
            self._last_error, self._refused = "", None
            self._session = session
            try:
                await session.run(welcome)
            finally:
                self._session = None
                self._lost += 1

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[ClientConnection]:
        parts = urlsplit(self._url)
        scheme = {"http": "ws", "https": "wss"}[parts.scheme]
        token = self._settings.token
        headers = {} if token is None else {"Authorization": f"Bearer {token.get_secret_value()}"}
        try:
            connection = await connect(
                f"{scheme}://{parts.netloc}{parts.path}{CONNECT_PATH}",
                additional_headers=headers,
                compression=None,  # Messages are mostly random keys.
                proxy=None,
                ssl=self._tls,
                open_timeout=CONNECT_SECONDS,
                close_timeout=CLOSE_SECONDS,
                ping_interval=None,  # The session has pings of its own.
                max_size=MAX_FRAME_BYTES,
            )
        except InvalidStatus as error:
            raise _refusal(error.response.status_code) from error
        except WebSocketException as error:
            raise ChannelError(f"the server at this address is not a controller: {error}") from error
        except TimeoutError as error:
            raise ChannelClosed(f"no answer within {CONNECT_SECONDS:g} s") from error
        try:
            yield connection
        finally:
            with CancelScope(shield=True), anyio.move_on_after(CLOSE_SECONDS):
                await connection.close()
            # A controller that reads nothing would keep the socket open, with all that is queued for it.
            connection.transport.abort()

    @cached_property
    def _tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self._url.startswith("https:") else None

    def _hello(self, local_host: str) -> Hello:
        tiers = [
            TierDescription(tier.name, tier.settings.type, tier.capacity, tier.shared)
            for tier in self._cache.tiers
        ]
        return Hello(
            VERSION,
            self._name,
            self._incarnation,
            __version__,
            socket.gethostname(),
            os.getpid(),
            None if self._serving is None else reached_from_elsewhere(self._serving, local_host),
            self._transport,
            tiers,
        )


class Controllers:
    """The controllers of an instance: one, or several that share their state, any of which can be asked."""

    def __init__(self, clients: Sequence[ControllerClient]) -> None:
        self._clients = clients
        self._turns = itertools.count()

    async def run(self) -> None:
        """Stay registered with all until cancelled."""
        async with anyio.create_task_group() as tasks:
            for client in self._clients:
                tasks.start_soon(client.run)

    async def who_holds(self, keys: Sequence[ChunkKey]) -> list[tuple[str, int]]:
        """Ask one of them. See :meth:`ControllerClient.who_holds`."""
        return await self._one().who_holds(keys)

    async def who_serves(self, addresses: Sequence[str]) -> list[str] | None:
        """Ask one of them. See :meth:`ControllerClient.who_serves`."""
        return await self._one().who_serves(addresses)

    def _one(self) -> ControllerClient:
        """Return the next one that can answer, if there is any, so that all share the work."""
        clients = [client for client in self._clients if client.can_answer] or self._clients
        return clients[next(self._turns) % len(clients)]

    def status(self) -> list[dict[str, object]]:
        """Return the state of each connection, for diagnostics and tests."""
        return [client.status() for client in self._clients]


def _refusal(status: int) -> ChannelError:
    if status in (401, 403):
        return Rejected(
            f"the token is missing or wrong (HTTP {status}): set controller.token to the controller's token"
        )
    return ChannelError(f"HTTP {status} from {CONNECT_PATH}: is controller.url right?")
