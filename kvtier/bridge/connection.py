"""One connection of an engine or an observer, in the cache process."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import msgspec
from anyio.abc import TaskGroup

from kvtier.bridge import protocol
from kvtier.bridge.engine_kv_transfers import EngineKVTransfers
from kvtier.bridge.leases import WriterProcess
from kvtier.bridge.session import NO_LEASE, EngineSession
from kvtier.bridge.watched import WatchedChunks
from kvtier.errors import ChannelClosed, PeerError, ProtocolError, SettingsError
from kvtier.pipeline.found import FoundPrefix
from kvtier.rpc.endpoint import Endpoint
from kvtier.rpc.frames import Message, check_hello

if TYPE_CHECKING:
    from kvtier.bridge.server import BridgeServer
    from kvtier.peers.staging.buffers import Offer

logger = logging.getLogger("kvtier")

HELLO_SECONDS = 10.0


class Connection:
    """One scheduler, worker or observer."""

    def __init__(
        self,
        server: BridgeServer,
        endpoint: Endpoint,
        tasks: TaskGroup,
        process: WriterProcess | None = None,
        *,
        remote: bool = False,
    ) -> None:
        """``process``: the client's, which this object owns; ``None`` if it cannot be watched.

        ``remote``: whether it comes from another host, and gets no file descriptors.
        """
        self._process = process
        self._remote = remote
        self.role: protocol.Role = "observer"
        self.rank = 0
        self._client = 0
        self._replaced = False
        self._server = server
        self._endpoint = endpoint
        self._tasks = tasks
        self._engine: EngineSession | None = None
        """``None`` for an observer."""
        self._kv_transfers: EngineKVTransfers | None = None
        self._watched: WatchedChunks | None = None
        """``None`` until the scheduler watches a chunk."""

    async def serve(self) -> None:
        """Answer until the client closes the connection. Raises :class:`ChannelError`."""
        try:
            hello = check_hello(await self._endpoint.receive(HELLO_SECONDS), protocol.Hello, protocol.VERSION)
            await self._admit(hello)
            if hello.role != "observer":
                self._engine = self._server.join(self, hello)
                self.role, self.rank, self._client = hello.role, hello.rank, hello.client
            self._welcome(hello)
            if self._engine is not None:
                self._start(self._engine, hello)
            raise await self._endpoint.run(self._handle, at_once=self._handle_at_once, refuses=False)
        except ProtocolError as error:
            logger.warning("rejected an engine: %s", error)
            # The engine keeps its leases until it closes the connection, because it may still be copying.
            await self._endpoint.refuse(error, lingers=True)
        finally:
            # First: a worker that finds it open fills what is reserved from now on.
            self._endpoint.close()
            if not self._replaced:
                self._leave()

    @property
    def last_message_at(self) -> float:
        """When the last message arrived, on the clock of :func:`time.monotonic`."""
        return self._endpoint.last_message_at

    def replace(self) -> None:
        """End this connection, as its client has a new one: nothing more of it is handled."""
        self._replaced = True
        self._leave()
        self._endpoint.end(ChannelClosed("the client has connected again"))

    async def _admit(self, hello: protocol.Hello) -> None:
        """Return if it is for this cache process; else relay, and raise :class:`ChannelError` at the end."""
        if self._remote and (hello.to or hello.role != "scheduler"):
            raise ProtocolError("another host may only connect a scheduler, to this host's engines")
        if hello.to:
            await self._relay(hello)

    async def _relay(self, hello: protocol.Hello) -> NoReturn:
        """Connect a scheduler to the cache process of another host, until that connection ends."""
        engines = self._server.remote_engines
        if engines is None:
            raise ProtocolError("this host cannot authenticate to other hosts: set peer.secret or peer.tls")
        try:
            far = await engines.connect(hello.to)
        except PeerError as error:
            raise ProtocolError(str(error)) from error
        try:
            await self._endpoint.relay(msgspec.structs.replace(hello, to=""), far)
        finally:
            far.close()

    def _start(self, engine: EngineSession, hello: protocol.Hello) -> None:
        if hello.role == "scheduler":
            self._kv_transfers = self._server.kv_transfers(self, engine, self._tasks)
            self._tasks.start_soon(self._server.notices.forward, self._send_notices)

    def _leave(self) -> None:
        engine, process = self._engine, self._process
        self._process = None
        if engine is not None and self.role == "worker":
            self._server.worker_left(engine, self.rank, process)
        elif process is not None:
            process.close()
        if engine is None:
            return
        if self.role == "scheduler":
            engine.writes.void_all()
        if self._kv_transfers is not None:
            self._kv_transfers.close()
        if engine.staging is not None:
            engine.staging.leave(self.rank, self.offer)
        self._server.leave(self, engine, replaced=self._replaced)

    def _welcome(self, hello: protocol.Hello) -> None:
        cache, first = self._server.cache, self._server.next_lease()
        if self._process is not None:
            filling = hello.holding if hello.epoch == self._server.epoch else ()
            self._process.welcomed(hello.client, first, filling)
        staging = [protocol.STAGING] if self._server.stages else []
        welcome = protocol.Welcome(
            protocol.VERSION,
            self._server.epoch,
            cache.arena.capacity,
            [*(tier.name for tier in cache.tiers), *staging],
            [*(tier.settings.type for tier in cache.tiers), *staging],
            self._server.peer,
            any(tier.shared for tier in cache.tiers),
            first,
        )
        self._endpoint.send(welcome, [] if self._remote else [cache.arena.fd])

    def _handle_at_once(self, message: protocol.FromEngine) -> bool:
        """Handle a message. Return ``True`` if that must be left to :meth:`_handle`."""
        engine = self._engine
        if self._replaced:
            return False
        if engine is None:
            return True
        match message:
            case protocol.Lookup():
                answer, fetched = engine.look_up(message)
                if fetched is not None:
                    self._tasks.start_soon(self._send_fetched, engine, message.ticket, fetched)
                self.send(answer)
            case protocol.Reserve():
                if self._kv_transfers is None:
                    reserved = engine.reserve(message)
                else:
                    reserved = engine.reserve(message, self._kv_transfers.find)
                self.send(reserved)
                if NO_LEASE in reserved.leases:
                    self._server.reclaim_stopped()
            case protocol.Confirm():
                self.send(protocol.Confirmed(message.ticket, engine.reads.holds(message.leases)))
            case protocol.UseWeights():
                self._server.use_weights(engine, message.weights)
            case protocol.Commit():
                engine.commit(message.leases, self.rank)
            case protocol.Abandon():
                if self._kv_transfers is None:
                    engine.writes.give_up(message.leases, self.rank)
                else:
                    engine.writes.abandon(message.leases)
            case protocol.Leave():
                engine.writes.worker_writes(self.rank, self._client)
            case protocol.Cancel():
                engine.reads.cancel(message.ticket)
            case protocol.RequestStaging():
                self._server.stage(self, engine, self.rank, message)
            case protocol.OpenedStaging():
                if engine.staging is not None:
                    engine.staging.opened(self.rank, message.number)
            case protocol.KVTransfer() | protocol.EndKVTransfer():
                self._kv_transfer(message)
            case protocol.Watch():
                self._watch(message)
            case _:
                return True
        return False

    async def _handle(self, message: protocol.FromEngine) -> None:
        match message:
            case protocol.Status():
                self.send(protocol.StatusReport(message.ticket, json.dumps(self._server.status()).encode()))
            case protocol.WhatIf():
                enabled = self._server.cache.settings.whatif.enabled
                self.send(protocol.WhatIfAnswer(message.ticket, enabled, self._server.what_if()))
            case protocol.ClearWeights():
                await self._clear_weights(message)
            case protocol.Clear() if self._engine is not None:
                self._endpoint.uncork()
                # Named tiers: pools are still queried if an engine uses these weights again.
                tiers = [tier.name for tier in self._server.cache.tiers]
                cleared = await self._server.cache.clear(namespace=self._engine.namespace, tiers=tiers)
                self.send(protocol.Cleared(message.ticket, cleared.chunks))
            case _:
                kind = type(message).__name__
                raise ProtocolError(f"unexpected {kind}: from an observer, or a second Hello")

    def _watch(self, message: protocol.Watch) -> None:
        if self._watched is None:
            self._watched = WatchedChunks(self._server.cache)
            self._tasks.start_soon(self._watched.report, self.notify)
        self._watched.watch(message)

    async def _clear_weights(self, message: protocol.ClearWeights) -> None:
        self._endpoint.uncork()
        try:
            cleared = await self._server.cache.clear_weights(message.weights_id, tiers=message.tiers)
        except SettingsError as error:
            raise ProtocolError(str(error)) from error
        self.send(protocol.Cleared(message.ticket, cleared.chunks, cleared.bytes))

    def _kv_transfer(self, message: protocol.KVTransfer | protocol.EndKVTransfer) -> None:
        if self._kv_transfers is None:
            raise ProtocolError(f"unexpected {type(message).__name__}: only schedulers send it")
        if isinstance(message, protocol.EndKVTransfer):
            self._kv_transfers.end(message)
        elif (result := self._kv_transfers.begin(message)) is not None:
            self.send(result)

    def send(self, message: Message) -> None:
        """Send a message, in answer to one that is being handled."""
        self._endpoint.send(message)

    async def notify(self, message: Message) -> None:
        """Send an unsolicited message, as soon as the engine reads. No effect if it has disconnected."""
        with suppress(ChannelClosed):  # The receiving task also gets this error, and ends the connection.
            await self._endpoint.drain()
            self._endpoint.send(message)

    async def offer(self, offer: Offer) -> None:
        """Notify a worker of its staging buffer."""
        await self.notify(protocol.OfferStaging(*offer))

    async def _send_notices(self, texts: Sequence[str]) -> None:
        for text in texts:
            await self.notify(protocol.Notice(text))

    async def _send_fetched(self, engine: EngineSession, ticket: int, found: FoundPrefix) -> None:
        async def report_progress() -> None:
            """Grant what has arrived, which also shows the engine that it should keep waiting."""
            answer = engine.progress(ticket, found)
            if answer is not None:
                await self.notify(answer)

        try:
            await self._server.cache.settle(found, report_progress)
            answer = engine.fetched(ticket, found)
        except BaseException:
            engine.give_up(ticket, found)
            raise
        if answer is not None:
            await self.notify(answer)
