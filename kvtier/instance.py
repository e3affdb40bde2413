"""One instance: the tiers of a host, their way to those of its peers, and its controller.

What a cache process serves its engines from, and what a program opens that wants peers or a controller, too;
:class:`~kvtier.cache.TieredCache` alone has none.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from anyio import CancelScope

from kvtier.agent.served import Served
from kvtier.backends.base import Backend
from kvtier.cache import TieredCache
from kvtier.catalog import MAX_TIERS
from kvtier.errors import SettingsError
from kvtier.plugins import Plugins
from kvtier.settings import Settings, TierSettings, load_settings
from kvtier.tasks import open_tasks

if TYPE_CHECKING:
    from kvtier.agent.agent import Agent
    from kvtier.peers.backend import PeersBackend
    from kvtier.peers.server import PeerServer
    from kvtier.transports.base import Transport

PEERS = "peers"
"""The name and the type of the tier that stands for all that peers hold."""
CALLS_UNDER_WAY = 16
"""Batches that are fetched from peers at once, whichever they are."""


class Instance:
    """A host's tiers, its peers and its controller. Made with :meth:`open`."""

    def __init__(
        self, name: str, cache: TieredCache, server: PeerServer | None, peers: PeersBackend | None
    ) -> None:
        self.name = name
        """Of this process alone, for peers and people."""
        self.cache = cache
        self.server = server
        """What serves the peers, where ``peer.listen`` is set."""
        self.peers = peers
        """What fetches from peers, where ``peer.others`` names some or a controller may."""
        self.served = Served()
        """The models of the engines: whoever lets engines in tells it."""
        self._agent: Agent | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: Settings | None = None, *, plugins: Plugins | None = None
    ) -> AsyncIterator[Instance]:
        """Open every tier, serve peers and register with the controller until the block is left.

        Arguments are as of :meth:`TieredCache.open`. A peer or a controller that does not answer is no error.
        Raises :class:`kvtier.errors.PeerError` where this host cannot serve, be it for its port or its
        transport, and what :meth:`TieredCache.open` raises.
        """
        settings = settings or load_settings()
        plugins = plugins or Plugins.load(settings.plugins)
        name = f"{_base_name(settings)}:{secrets.token_hex(4)}"
        async with AsyncExitStack() as stack:
            if settings.peer.used or _borrows(settings):
                instance = await stack.enter_async_context(cls._with_peers(name, settings, plugins))
            else:
                cache = await stack.enter_async_context(TieredCache.open(settings, plugins=plugins))
                instance = cls(name, cache, None, None)
            if settings.controller.url is not None:
                await stack.enter_async_context(instance._registered(settings))
            yield instance

    @classmethod
    @asynccontextmanager
    async def _with_peers(cls, name: str, settings: Settings, plugins: Plugins) -> AsyncIterator[Instance]:
        # Here, so that who has no peers does not wait for what serves them to be imported.
        from kvtier.peers.authentication import Credentials
        from kvtier.peers.backend import PeersBackend
        from kvtier.peers.grants import GrantBook
        from kvtier.peers.server import PeerServer

        transport_settings = plugins.transport_settings(settings)
        transport = plugins.transport(transport_settings.type)(transport_settings)
        credentials = Credentials.of(settings.peer)
        pools: list[tuple[TierSettings, Backend]] = []
        peers = None
        if settings.peer.others or _borrows(settings):
            tier = _tier(settings, transport_settings.deadline)
            peers = PeersBackend(tier, settings.peer, credentials, transport, name)
            pools.append((tier, peers))
        async with (
            TieredCache.open(settings, plugins=plugins, pools=pools) as cache,
            AsyncExitStack() as stack,
        ):
            grants = GrantBook(cache.arena, settings.peer, one_sided=transport.one_sided)
            await transport.open(cache.arena, grants)
            stack.push_async_callback(_close, transport, peers)
            if peers is not None:
                peers.connect()
            server = None
            if settings.peer.listen is not None:
                server = PeerServer(cache, settings.peer, transport, grants, name)
                await stack.enter_async_context(server.serving())
            yield cls(name, cache, server, peers)

    @asynccontextmanager
    async def _registered(self, settings: Settings) -> AsyncIterator[None]:
        # Here, so that who has no controller does not wait for WebSockets to be imported.
        from kvtier.agent.agent import Agent, Serving
        from kvtier.agent.commands import Commands, Peers
        from kvtier.agent.tokenizing import Tokenizers

        peers = serving = None
        if self.peers is not None:
            tier = next(tier for tier in self.cache.hierarchy.tiers if tier.name == PEERS)
            peers = Peers(self.peers, tier)
        if self.server is not None and settings.peer.listen is not None:
            serving = Serving(settings.peer.listen, self.server.address[1])
        transport = settings.peer.transport["type"] if peers or serving else None
        tokenizers = Tokenizers(self.served)
        commands = Commands(self.cache, peers, tokenizers)
        agent = Agent(settings, self.cache, self.served, commands, serving=serving, transport=transport)
        async with tokenizers.open(), open_tasks() as tasks:
            self._agent = agent
            if self.peers is not None and settings.controller.ask:
                self.peers.ask_directory(agent)
            tasks.start_soon(agent.run)
            try:
                yield
            finally:
                if self.peers is not None:
                    self.peers.ask_directory(None)
                tasks.cancel_scope.cancel()

    def status(self) -> dict[str, object]:
        """What is held, what has happened, how the peers are and the controller, for people and tests."""
        status = self.cache.status()
        if self.server is not None:
            status["serving"] = self.server.status()
        if self.peers is not None:
            status["peers"] = self.peers.status()
        if self._agent is not None:
            status["controller"] = self._agent.status()
        return {"instance": self.name, **status}


def _base_name(settings: Settings) -> str:
    if settings.controller.url is not None:
        return settings.controller.instance_name
    return f"{socket.gethostname()}:{os.getpid()}"


def _borrows(settings: Settings) -> bool:
    """Whether a controller may have chunks fetched from peers that the settings do not name."""
    return settings.controller.url is not None and settings.peer.can_prove


def _tier(settings: Settings, deadline: float) -> TierSettings:
    if any(tier.get("name") == PEERS for tier in settings.tiers):
        raise SettingsError(
            f"a tier is called {PEERS!r}, which is what all peers together are called: write another name"
        )
    if len(settings.tiers) == MAX_TIERS:
        raise SettingsError(
            f"peers take the place of a tier, and there are {MAX_TIERS} tiers already: leave one out"
        )
    return TierSettings(name=PEERS, type=PEERS, write="never", deadline=deadline, concurrency=CALLS_UNDER_WAY)


async def _close(transport: Transport, peers: PeersBackend | None) -> None:
    """Links first: nothing of a transport may be in use when it is closed, nor the arena unmapped before."""
    with CancelScope(shield=True):
        if peers is not None:
            await peers.disconnect()
        await transport.close()
