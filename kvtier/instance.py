"""One instance: the tiers of a host, and their way to those of its peers.

What a cache process serves its engines from, and what a program opens that wants peers, too;
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

from kvtier.backends.base import Backend
from kvtier.cache import TieredCache
from kvtier.catalog import MAX_TIERS
from kvtier.errors import SettingsError
from kvtier.plugins import Plugins
from kvtier.settings import Settings, TierSettings, load_settings

if TYPE_CHECKING:
    from kvtier.peers.backend import PeersBackend
    from kvtier.peers.server import PeerServer
    from kvtier.transports.base import Transport

PEERS = "peers"
"""The name and the type of the tier that stands for all that peers hold."""
CALLS_UNDER_WAY = 16
"""Batches that are fetched from peers at once, whichever they are."""


class Instance:
    """A host's tiers and its peers. Made with :meth:`open`."""

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

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: Settings | None = None, *, plugins: Plugins | None = None
    ) -> AsyncIterator[Instance]:
        """Open every tier and serve peers until the block is left; arguments as of :meth:`TieredCache.open`.

        A peer that does not answer is no error. Raises :class:`kvtier.errors.PeerError` where this host
        cannot serve, be it for its port or its transport, and what :meth:`TieredCache.open` raises.
        """
        settings = settings or load_settings()
        plugins = plugins or Plugins.load(settings.plugins)
        name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        borrows = settings.controller.url is not None and settings.peer.can_prove
        if not settings.peer.used and not borrows:
            async with TieredCache.open(settings, plugins=plugins) as cache:
                yield cls(name, cache, None, None)
            return
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
        if settings.peer.others or borrows:
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

    def status(self) -> dict[str, object]:
        """What is held, what has happened, and how the peers are, for people and tests."""
        status = self.cache.status()
        if self.server is not None:
            status["serving"] = self.server.status()
        if self.peers is not None:
            status["peers"] = self.peers.status()
        return {"instance": self.name, **status}


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
