"""The instance's end of the conversation with its controller: found, lost, and found again.

A controller that is away, refuses or lies costs the cache nothing: nobody waits for it but who asks it, and
no longer than that has patience.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import urlsplit

import anyio
from anyio import CancelScope
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from kvtier import __version__
from kvtier.agent.commands import Commands
from kvtier.agent.protocol import CONNECT_PATH, VERSION, Hello, TierDescription
from kvtier.agent.served import Served
from kvtier.agent.session import RefusedByController, Session
from kvtier.backends.logs import RareWarning
from kvtier.cache import TieredCache
from kvtier.errors import ChannelClosed, ChannelError
from kvtier.keys import ChunkKey
from kvtier.peers.dialling import printable
from kvtier.peers.pauses import GrowingPause
from kvtier.settings import Settings
from kvtier.settings_peer import split_address
from kvtier.sockets.frames import MAX_FRAME_BYTES

logger = logging.getLogger("kvtier")

CONNECT_SECONDS = 5.0
CLOSE_SECONDS = 0.5
"""How long a farewell may take."""
STEADY_SECONDS = 5.0
"""A connection that lasted longer was a good one: the next one is opened soon."""
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - nothing listens there


@dataclass(frozen=True)
class Serving:
    """How other instances reach this one, where they can."""

    listen: str
    """What the settings say."""
    port: int
    """Where it really listens."""

    def address(self, seen: str) -> str:
        """``HOST:PORT``, with the host that the controller sees where the settings name none."""
        host, _ = split_address(self.listen)
        host = seen if host in WILDCARDS else host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


class Agent:
    """Registers an instance with ``controller.url`` for as long as :meth:`run` runs. One event loop."""

    def __init__(
        self,
        settings: Settings,
        cache: TieredCache,
        served: Served,
        commands: Commands,
        *,
        serving: Serving | None,
        transport: str | None,
    ) -> None:
        """``transport`` is how chunks come from other instances; ``None`` where none can come."""
        assert settings.controller.url is not None
        self._settings = settings.controller
        self._patience = settings.peer.patience
        self._url = settings.controller.url
        self._cache = cache
        self._served = served
        self._commands = commands
        self._serving = serving
        self._transport = transport
        self._name = settings.controller.instance_name
        self._incarnation = secrets.randbits(63)
        self._session: Session | None = None
        self._pause = GrowingPause()
        self._warn = RareWarning(logger)
        self._trouble = ""
        self._refused: str | None = None
        self._lost = 0

    async def run(self) -> None:
        """Stay registered until cancelled. Raises nothing else."""
        while True:
            began = time.monotonic()
            try:
                await self._stay_registered()
            except RefusedByController as error:
                self._refused = printable(str(error))
                self._note(f"it refuses this instance: {self._refused}")
            except (OSError, ChannelError) as error:
                self._refused = None
                self._note(printable(str(error)))
            except Exception as error:  # A bug, which must not harm the cache.
                logger.exception("controller %s: the connection ends", self._url)
                self._note(repr(error))
            if time.monotonic() - began > STEADY_SECONDS:
                self._pause.reset()
            await anyio.sleep(self._pause.next())

    async def who_holds(self, keys: Sequence[ChunkKey]) -> list[tuple[str, int]]:
        """Which instances hold leading ones of ``keys``: where peers reach them, and how many; most first.

        Nothing where the controller is away, or does not answer within ``peer.patience``.
        """
        session = self._session
        holders: list[tuple[str, int]] = []
        if session is not None:
            with anyio.move_on_after(self._patience):
                try:
                    holders = await session.who_holds(keys)
                except ChannelError:
                    logger.debug("the controller was lost with a question")
        return holders

    def status(self) -> dict[str, object]:
        """How it stands with the controller, for people and tests."""
        session = self._session
        return {
            "url": self._url,
            "instance": self._name,
            "connected": session is not None,
            "in_step": session is not None and session.holdings.in_step,
            "told_anew": session.holdings.lost if session is not None else 0,
            "commands": session.commands_running if session is not None else 0,
            "refused": self._refused,
            "trouble": self._trouble,
            "lost": self._lost,
        }

    def _note(self, trouble: str) -> None:
        self._trouble = trouble
        self._warn("controller %s: %s; going on without it", self._url, trouble)

    async def _stay_registered(self) -> None:
        """Register, and serve the controller until the connection ends. Raises why."""
        async with self._connection() as connection:
            session = Session(connection, self._cache, self._served, self._commands)
            welcome = await session.greet(self._hello(connection.local_address[0]))
            if self._trouble:
                logger.info("controller %s: this instance, %s, is registered again", self._url, self._name)
            else:
                logger.info("controller %s: this instance is registered as %s", self._url, self._name)
            self._trouble, self._refused = "", None
            self._session = session
            try:
                await session.run(welcome)
            finally:
                self._session = None
                self._lost += 1

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[ClientConnection]:
        try:
            connection = await connect(
                self._address,
                additional_headers=self._headers,
                compression=None,
                proxy=None,
                ssl=self._tls,
                open_timeout=CONNECT_SECONDS,
                close_timeout=CLOSE_SECONDS,
                ping_interval=None,
                max_size=MAX_FRAME_BYTES,
            )
        except InvalidStatus as error:
            raise _refusal(error.response.status_code) from error
        except WebSocketException as error:
            raise ChannelError(f"what answers there is no controller: {error}") from error
        except TimeoutError as error:
            raise ChannelClosed(f"it has not answered within {CONNECT_SECONDS:g} s") from error
        try:
            yield connection
        finally:
            with CancelScope(shield=True), anyio.move_on_after(CLOSE_SECONDS):
                await connection.close()
            connection.transport.abort()

    @property
    def _address(self) -> str:
        parts = urlsplit(self._url)
        scheme = {"http": "ws", "https": "wss"}[parts.scheme]
        return f"{scheme}://{parts.netloc}{parts.path}{CONNECT_PATH}"

    @property
    def _headers(self) -> dict[str, str]:
        token = self._settings.token
        return {} if token is None else {"Authorization": f"Bearer {token.get_secret_value()}"}

    @cached_property
    def _tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self._url.startswith("https:") else None

    def _hello(self, seen: str) -> Hello:
        tiers = [
            TierDescription(tier.name, tier.settings.type, tier.capacity, tier.shared)
            for tier in self._cache.hierarchy.tiers
        ]
        return Hello(
            VERSION,
            self._name,
            self._incarnation,
            __version__,
            socket.gethostname(),
            os.getpid(),
            None if self._serving is None else self._serving.address(seen),
            self._transport,
            tiers,
        )


def _refusal(status: int) -> ChannelError:
    if status in (401, 403):
        return RefusedByController(
            f"its token is missing or wrong (HTTP {status}): write the controller's in controller.token"
        )
    return ChannelError(f"it answers with HTTP {status} where instances connect: is controller.url right?")
