"""One instance: the tiers of a host, its peers and its controller.

Used by the cache process, and by programs that need peers or a controller; :class:`~kvtier.cache.TieredCache`
alone has neither.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from anyio import CancelScope
from msgspec.structs import replace

from kvtier.backends.base import Backend
from kvtier.cache import TieredCache
from kvtier.catalog.misses import MissReason
from kvtier.catalog.table import MAX_TIERS
from kvtier.concurrency.tasks import open_background_tasks
from kvtier.errors import ChannelError, PeerError, ProtocolError, SettingsError
from kvtier.fleet.member.served_models import EngineModel, ServedModels
from kvtier.fleet.member.tokenizing import Tokenizers
from kvtier.memory.keys import ChunkKey
from kvtier.memory.layout import ChunkLayout
from kvtier.observability.breakers import Around, around
from kvtier.observability.requests import PromptReport, RequestLog, WhyReport
from kvtier.observability.traces.export import exporting
from kvtier.observability.traces.spans import NO_TRACER, Tracer
from kvtier.pipeline.usage import TokenCounts
from kvtier.plugins import Plugins
from kvtier.settings import Settings, TierSettings, load_settings
from kvtier.settings.peer import GUESSABLE, GUESSABLE_REMEDY, join_address, split_address

if TYPE_CHECKING:
    from kvtier.fleet.member.controller_client import Controllers
    from kvtier.observability.whatif.estimator import Estimator
    from kvtier.observability.whatif.report import Report
    from kvtier.peers.backend import PeersBackend
    from kvtier.peers.kv_transfer import KVTransfer, KVTransfers
    from kvtier.peers.server import PeerServer
    from kvtier.peers.staging.buffers import Stagings
    from kvtier.transports.base import Transport

logger = logging.getLogger("kvtier")

PEERS = "peers"
"""Name and type of the tier that represents all peers."""
UNNAMED = "unnamed"
"""Stands for models whose name no engine has reported."""
CALLS_IN_FLIGHT = 16
"""Maximum number of batches in flight from all peers together."""


class Instance:
    """A host's tiers, its peers and its controller. Created with :meth:`open`."""

    def __init__(
        self,
        name: str,
        cache: TieredCache,
        server: PeerServer | None = None,
        peers: PeersBackend | None = None,
        transfer: KVTransfers | None = None,
        served: ServedModels | None = None,
        stagings: Stagings | None = None,
    ) -> None:
        self.name = name
        """Unique name of this process, for peers and logs."""
        self.cache = cache
        self.server = server
        """The server for peers, if ``peer.listen`` is set."""
        self.peers = peers
        """The backend that fetches from peers, if ``peer.others`` or a controller is set."""
        self._kv_transfers = transfer
        self.served = served or ServedModels()
        """The models of the connected engines, maintained by the bridge server, and of programs."""
        cache.observe_model = self._add_model
        self.requests = RequestLog(cache.settings.why.requests, cache.counts)
        """What became of the last requests of the engines."""
        self._tokenizers = Tokenizers(self.served)
        self.stagings = stagings
        """The engines' staging buffers, if ``kv_transfer.device`` is ``cuda``."""
        self.tracer: Tracer = NO_TRACER
        self._controllers: Controllers | None = None
        self._estimator: Estimator | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: Settings | None = None, *, plugins: Plugins | None = None
    ) -> AsyncIterator[Instance]:
        """Open every tier, serve peers and register with the controller until the context exits.

        Arguments as for :meth:`TieredCache.open`. An unreachable peer or controller is not an error. Raises
        :class:`kvtier.errors.PeerError` if this host cannot serve peers because of its port or transport, and
        the errors of :meth:`TieredCache.open`.
        """
        settings = settings or load_settings()
        plugins = plugins or Plugins.load(settings.plugins)
        name = f"{socket.gethostname()}:{os.getpid()}"
        if settings.controller.urls:
            name = settings.controller.instance_name
        name = f"{name}:{secrets.token_hex(4)}"
        async with AsyncExitStack() as stack:
            tracer = await stack.enter_async_context(exporting(settings.traces, "kvtier", name))
            if settings.peer.has_credentials:
                instance = await stack.enter_async_context(cls._with_peers(name, settings, plugins, tracer))
            else:
                cache = await stack.enter_async_context(TieredCache.open(settings, plugins=plugins))
                instance = cls(name, cache)
            if settings.traces:
                instance.tracer, tracer.first_tier = tracer, instance.cache.memory.name
                instance.cache.add_observer(tracer)
            if settings.whatif.enabled:
                # Imported here, so that an instance without it does not pay for the import.
                from kvtier.observability.whatif.estimator import estimating

                instance._estimator = await stack.enter_async_context(estimating(instance.cache, plugins))
            await stack.enter_async_context(instance._tokenizers.open())
            if settings.controller.urls:
                await stack.enter_async_context(instance._registered(settings))
            yield instance

    @classmethod
    @asynccontextmanager
    async def _with_peers(
        cls, name: str, settings: Settings, plugins: Plugins, tracer: Tracer
    ) -> AsyncIterator[Instance]:
        # Imported here, so that an instance without peers does not pay for the import.
        from kvtier.peers.backend import LinkChoices, PeersBackend
        from kvtier.peers.grants import GrantBook
        from kvtier.peers.kv_transfer import KVTransfers
        from kvtier.peers.link_codec import GrantEncoder, LinkDecoder
        from kvtier.peers.push_targets import ArenaTarget
        from kvtier.peers.reservations import Reservations
        from kvtier.peers.server import PeerServer
        from kvtier.peers.staging.buffers import Stagings
        from kvtier.peers.targets import Targets
        from kvtier.rpc.authentication import Credentials
        from kvtier.tiers.encoded_seal import Encoder
        from kvtier.transports.nixl.settings import NixlSettings

        if settings.peer.guessable:
            logger.warning("peer.secret: %s: %s", GUESSABLE, GUESSABLE_REMEDY)
        named = settings.kv_transfer.targets or settings.peer.others or settings.controller.urls
        if settings.role == "prefill" and not named:
            logger.warning(
                "no request can have KV transferred: set kv_transfer.targets to the decode instances, or "
                "controller.url"
            )
        transport_settings = plugins.transport_settings(settings)
        transport = plugins.transport(transport_settings.type)(transport_settings)
        codecs = None if transport.one_sided else plugins.peer_codecs(settings)
        credentials = Credentials.from_settings(settings.peer)
        tier = TierSettings(
            name=PEERS,
            type=PEERS,
            write="never",
            deadline=transport_settings.deadline,
            concurrency=CALLS_IN_FLIGHT,
            codec=settings.peer.codec,
        )
        # KV transfers to a peer need neither peer.others nor a tier for the peers.
        peers = PeersBackend(tier, settings.peer, credentials, transport, name)
        pools: list[tuple[TierSettings, Backend]] = []
        if fetches := bool(settings.peer.others or settings.controller.urls):
            _check_peers_tier(settings)
            pools.append((tier, peers))
        async with (
            TieredCache.open(settings, plugins=plugins, pools=pools) as cache,
            AsyncExitStack() as stack,
        ):
            transfer, served = settings.kv_transfer, ServedModels()
            grants = GrantBook(
                cache.arena, settings.peer, one_sided=transport.one_sided, reserve=transfer.reserve
            )
            await transport.open(cache.arena, grants)
            # Before what uses the transport, which then ends first.
            stack.push_async_callback(_close, transport, peers)
            encoder = decoder = None
            if codecs is not None:
                encoder = Encoder(codecs, cache.layouts, checksum=settings.checksum)
            if encoder is not None and fetches:
                level = cache.lower[-1]
                decoder = LinkDecoder(encoder, level.seal)
                level.written = decoder.written
                if encoder.measured:
                    level.choice = LinkChoices(peers)
            peers.connect(decoder)
            nixl = server = None
            if transfer.device == "cuda":
                if not isinstance(transport_settings, NixlSettings):
                    raise SettingsError(
                        "kv_transfer.device is cuda, which requires NIXL: set peer.transport to nixl"
                    )
                nixl = transport_settings
            stagings = Stagings(settings, nixl, cache)
            await stack.enter_async_context(stagings.serving())
            if settings.peer.listen is not None:
                arena = ArenaTarget(cache, grants, transport.cut_off, transfer.buffer)
                reservations = Reservations(cache, arena, stagings, served.refusal)
                grant_encoder = None if encoder is None else GrantEncoder(cache.arena, grants, encoder)
                server = PeerServer(
                    cache, settings.peer, transport, grants, reservations, name, tracer, grant_encoder
                )
                await stack.enter_async_context(server.serving())
            tasks = await stack.enter_async_context(open_background_tasks())
            kv_transfers = KVTransfers(cache, peers, Targets(settings), tasks, grants.limit)
            stack.callback(kv_transfers.close)
            staging = stagings if stagings.enabled else None
            yield cls(name, cache, server, peers if fetches else None, kv_transfers, served, staging)

    @asynccontextmanager
    async def _registered(self, settings: Settings) -> AsyncIterator[None]:
        # Imported here, so that an instance without a controller does not pay for importing WebSockets.
        from kvtier.fleet.member.commands import Commands, Peers
        from kvtier.fleet.member.controller_client import ControllerClient, Controllers
        from kvtier.fleet.member.counters import counters_of
        from kvtier.fleet.member.session import Session, Term
        from kvtier.observability.transfers import TransferCounts

        peers = serving = None
        if self.peers is not None:
            tier = next(tier for tier in self.cache.lower if tier.name == PEERS)
            peers = Peers(self.peers, tier)
        if self.server is not None and settings.peer.listen is not None:
            host, _ = split_address(settings.peer.listen)
            serving = join_address(host, self.server.address[1])
        transport = settings.peer.transport["type"] if peers or serving else None
        commands = Commands(self.cache, peers, self._tokenizers, self.why, self.why_prompt)
        transfers, status = TransferCounts(self.cache), tuple if self.peers is None else self.peers.status
        session = partial(
            Session,
            cache=self.cache,
            served=self.served,
            commands=commands,
            what_if=self.what_if,
            counters=partial(counters_of, self.cache, transfers, status),
            term=Term(),
        )
        controllers = Controllers(
            [
                ControllerClient(settings, self.cache, url, session, serving=serving, transport=transport)
                for url in settings.controller.urls
            ]
        )
        self.cache.add_observer(transfers)
        async with open_background_tasks() as tasks:
            self._controllers = controllers
            if self.peers is not None and settings.controller.ask:
                self.peers.set_directory(controllers)
            if self._kv_transfers is not None:
                self._kv_transfers.targets.set_registered(controllers)
            tasks.start_soon(controllers.run)
            try:
                yield
            finally:
                # First, so that no further request waits for the controller.
                if self.peers is not None:
                    self.peers.set_directory(None)
                if self._kv_transfers is not None:
                    self._kv_transfers.targets.set_registered(None)

    def _add_model(self, name: str, namespace: bytes, layout: ChunkLayout) -> None:
        self.served.add_model(namespace, layout, EngineModel([name]))

    def transfer_kv(self, to: str, keys: Sequence[ChunkKey], *, hinted: bool = False) -> KVTransfer:
        """Transfer the chunks of a prompt, in prefix order, to the peer at ``HOST:PORT``, each when READY.

        Returns immediately, see :class:`~kvtier.peers.kv_transfer.KVTransfer`. The peer need not be in the
        settings, unless ``to`` is from a request (``hinted``): see :class:`~kvtier.peers.targets.Targets`.
        Raises :class:`kvtier.errors.PeerError` if this instance has no credentials for peers, ``to`` is not
        an address, or too many transfers are in flight.
        """
        if self._kv_transfers is None:
            raise PeerError("cannot transfer KV: set peer.secret or peer.tls to authenticate to peers")
        return self._kv_transfers.begin(to, keys, hinted=hinted)

    async def why(self, request: str, last: int) -> WhyReport:
        """Return what became of the ``last`` requests whose id contains ``request``, and where prompts part.

        Waits for a tokenizer if ``why.show_text`` is set.
        """
        report = self.requests.report(request, last)
        if not self.cache.settings.why.show_text:
            return report
        places = self.requests.breakers.report()
        breakers = [replace(breaker, text=await self._text(around)) for breaker, around in places]
        return replace(report, breakers=breakers)

    async def why_prompt(self, tokens: Sequence[int], model: str, salt: str) -> list[PromptReport]:
        """Return what is held of a prompt now, and why the rest is not, for each layout of one or all models.

        Raises :class:`ProtocolError` for tokens and salts that are none. Waits as :meth:`why` does.
        """
        prompts = []
        for served in self.served.models:
            if not model or model in served.names:
                namespace = served.namespace
                try:
                    hits, misses = await self.cache.explain_prompt(namespace, served.layout, tokens, salt)
                except (OverflowError, UnicodeEncodeError) as error:
                    raise ProtocolError(f"a token is at most 4294967295, a salt is text: {error}") from error
                parts = [miss.position for miss in misses if miss.reason is MissReason.DIVERGES]
                shown = self.cache.settings.why.show_text and bool(parts)
                text = await self._text(around(namespace, tokens, parts[0])) if shown else ""
                prompts.append(PromptReport(served.names[0], len(tokens), hits, misses, text))
        return prompts

    async def _text(self, around: Around | None) -> str:
        """Return a text; empty if there is no tokenizer."""
        try:
            return "" if around is None else await self._tokenizers.text(*around)
        except ChannelError as error:
            logger.debug("where prompts part cannot be shown: %s", error)
            return ""

    def what_if(self) -> Report | None:
        """Return what other capacities and eviction policies would hit.

        ``None`` if it is not estimated, or nothing has been observed yet. Up to 10 s old. See
        ``docs/whatif.md``.
        """
        report = None if self._estimator is None else self._estimator.report()
        return report if report is not None and (report.chunks or report.stopped) else None

    def status(self) -> dict[str, object]:
        """Return the state of the cache, its peers and the controller connection, for display and tests."""
        status = self.cache.status()
        if self.server is not None:
            status["serving"] = self.server.status()
        if self.peers is not None:
            status["peers"] = self.peers.status()
        if self._kv_transfers is not None:
            status["kv_transfers"] = self._kv_transfers.status()
        if self.stagings is not None:
            status["staging"] = self.stagings.status()
        if self._controllers is not None:
            controllers = self._controllers.status()
            status |= {"controllers": controllers, "controller": controllers[0]}
        status["models"] = self._models()
        if self.cache.settings.traces:
            status["traces"] = self.tracer.status()
        return {"instance": self.name, **status}

    def _models(self) -> list[dict[str, object]]:
        names = {model.namespace: model.names[0] for model in self.served.models}
        by_name: dict[str, TokenCounts] = {}
        for namespace, counts in self.cache.usage.models.items():
            total = by_name.setdefault(names.get(namespace, UNNAMED), TokenCounts())
            total.looked_up += counts.looked_up
            total.hit += counts.hit
        return [
            {"model": name, "looked_up_tokens": counts.looked_up, "hit_tokens": counts.hit}
            for name, counts in by_name.items()
        ]


def _check_peers_tier(settings: Settings) -> None:
    if any(tier.get("name") == PEERS for tier in settings.tiers):
        raise SettingsError(f"the tier name {PEERS!r} is reserved for peers: choose another name")
    if len(settings.tiers) == MAX_TIERS:
        raise SettingsError(f"peers count as a tier, and there are already {MAX_TIERS} tiers: remove one")


async def _close(transport: Transport, peers: PeersBackend) -> None:
    """Disconnect the peers, then close the transport: it must be unused, and the arena still mapped."""
    with CancelScope(shield=True):
        await peers.close()
        await transport.close()
