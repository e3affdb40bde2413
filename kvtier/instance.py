"""One instance: the tiers of a host, their way to those of its peers, and its controller.

What a cache process serves its engines from, and what a program opens that wants peers or a controller, too;
:class:`~kvtier.cache.TieredCache` alone has none.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from anyio import CancelScope

from kvtier.agent.served import Served
from kvtier.backends.base import Backend
from kvtier.cache import TieredCache
from kvtier.catalog import MAX_TIERS
from kvtier.errors import PeerError, SettingsError
from kvtier.keys import ChunkKey
from kvtier.plugins import Plugins
from kvtier.settings import Settings, TierSettings, load_settings
from kvtier.tasks import open_tasks

if TYPE_CHECKING:
    from kvtier.agent.agent import Agent
    from kvtier.peers.backend import PeersBackend
    from kvtier.peers.handing import HandOver, HandOvers
    from kvtier.peers.server import PeerServer
    from kvtier.peers.staging import Stagings
    from kvtier.transports.base import Transport

PEERS = "peers"
"""The name and the type of the tier that stands for all that peers hold."""
CALLS_UNDER_WAY = 16
"""Batches that are fetched from peers at once, whichever they are."""


class Instance:
    """A host's tiers, its peers and its controller. Made with :meth:`open`."""

    def __init__(
        self,
        name: str,
        cache: TieredCache,
        server: PeerServer | None = None,
        peers: PeersBackend | None = None,
        handing: HandOvers | None = None,
        served: Served | None = None,
        stagings: Stagings | None = None,
    ) -> None:
        self.name = name
        """Of this process alone, for peers and people."""
        self.cache = cache
        self.server = server
        """What serves the peers, where ``peer.listen`` is set."""
        self.peers = peers
        """What fetches from peers, where ``peer.others`` names some or a controller may."""
        self._handing = handing
        self.served = served or Served()
        """The models of the engines: whoever lets engines in tells it."""
        self.stagings = stagings
        """The engines' staging buffers, where ``hand_over.device`` is ``cuda``."""
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
            if settings.peer.can_prove:
                instance = await stack.enter_async_context(cls._with_peers(name, settings, plugins))
            else:
                cache = await stack.enter_async_context(TieredCache.open(settings, plugins=plugins))
                instance = cls(name, cache)
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
        from kvtier.peers.handing import HandOvers
        from kvtier.peers.server import PeerServer
        from kvtier.peers.staging import Stagings
        from kvtier.transports.nixl.settings import NixlSettings

        transport_settings = plugins.transport_settings(settings)
        transport = plugins.transport(transport_settings.type)(transport_settings)
        credentials = Credentials.of(settings.peer)
        tier = TierSettings(
            name=PEERS,
            type=PEERS,
            write="never",
            deadline=transport_settings.deadline,
            concurrency=CALLS_UNDER_WAY,
        )
        # To push to a peer needs none that is configured, and no tier for what they hold.
        peers = PeersBackend(tier, settings.peer, credentials, transport, name)
        pools: list[tuple[TierSettings, Backend]] = []
        if fetches := bool(settings.peer.others) or _borrows(settings):
            _check_place(settings)
            pools.append((tier, peers))
        async with (
            TieredCache.open(settings, plugins=plugins, pools=pools) as cache,
            AsyncExitStack() as stack,
        ):
            handing, served = settings.hand_over, Served()
            grants = GrantBook(
                cache.arena, settings.peer, one_sided=transport.one_sided, reserve=handing.reserve
            )
            await transport.open(cache.arena, grants)
            stack.push_async_callback(_close, transport, peers)
            peers.connect()
            stagings = server = None
            if handing.device == "cuda":
                if not isinstance(transport_settings, NixlSettings):
                    raise SettingsError(
                        "hand_over.device is cuda, which goes over NIXL: write nixl as peer.transport"
                    )
                stagings = Stagings(settings, transport_settings, cache)
                await stack.enter_async_context(stagings.serving())
            if settings.peer.listen is not None:
                server = PeerServer(
                    cache, settings.peer, transport, grants, name, handing.buffer, served.refusal, stagings
                )
                await stack.enter_async_context(server.serving())
            tasks = await stack.enter_async_context(open_tasks())
            hand_overs = HandOvers(cache, peers, tasks, grants.limit)
            stack.callback(hand_overs.close)
            try:
                yield cls(name, cache, server, peers if fetches else None, hand_overs, served, stagings)
            finally:
                tasks.cancel_scope.cancel()

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

    def hand_over(self, to: str, keys: Sequence[ChunkKey]) -> HandOver:
        """Push the chunks of a prompt, in prefix order, to the peer at ``HOST:PORT``, each when it is READY.

        At once, and nothing is waited for: see :class:`~kvtier.peers.handing.HandOver`. The peer need not be
        one of ``peer.others``. Raises :class:`kvtier.errors.PeerError` where this instance has no way to
        peers, ``to`` is no address, or too much is handed over already.
        """
        if self._handing is None:
            raise PeerError("cannot hand over: write peer.secret or peer.tls, by which peers know each other")
        return self._handing.begin(to, keys)

    def status(self) -> dict[str, object]:
        """What is held, what has happened, how the peers are and the controller, for people and tests."""
        status = self.cache.status()
        if self.server is not None:
            status["serving"] = self.server.status()
        if self.peers is not None:
            status["peers"] = self.peers.status()
        if self._handing is not None:
            status["hand_overs"] = self._handing.status()
        if self.stagings is not None:
            status["staging"] = self.stagings.status()
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


def _check_place(settings: Settings) -> None:
    if any(tier.get("name") == PEERS for tier in settings.tiers):
        raise SettingsError(
            f"a tier is called {PEERS!r}, which is what all peers together are called: write another name"
        )
    if len(settings.tiers) == MAX_TIERS:
        raise SettingsError(
            f"peers take the place of a tier, and there are {MAX_TIERS} tiers already: leave one out"
        )


async def _close(transport: Transport, peers: PeersBackend) -> None:
    """Links first: nothing of a transport may be in use when it is closed, nor the arena unmapped before."""
    with CancelScope(shield=True):
        await peers.disconnect()
        await transport.close()
