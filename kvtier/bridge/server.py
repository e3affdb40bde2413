"""Cache process's end of the bridge. The state of an engine ends with its last connection.

Messages of a connection are handled in order, most of them by the event loop as soon as it has read them:
:class:`~kvtier.cache.TieredCache` decides answers synchronously. Waiting for a fetch is a task of its own.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property, partial
from typing import TYPE_CHECKING, NoReturn

import anyio
import msgspec
from anyio.abc import TaskGroup
from blake3 import blake3

from kvtier.bridge import protocol
from kvtier.bridge.engine_kv_transfers import EngineKVTransfers
from kvtier.bridge.leases import WriterProcess
from kvtier.bridge.notices import Notices
from kvtier.bridge.session import NO_LEASE, EngineSession
from kvtier.bridge.watched import WatchedChunks
from kvtier.concurrency.placement import Placement
from kvtier.concurrency.tasks import open_background_tasks
from kvtier.errors import ChannelClosed, ChannelError, PeerError, ProtocolError, SettingsError
from kvtier.fleet.member.served_models import EngineModel
from kvtier.instance import Instance
from kvtier.logs import ChangedWarnings, Finding
from kvtier.observability.traces.spans import following
from kvtier.pipeline.found import FoundPrefix
from kvtier.rpc.endpoint import Endpoint
from kvtier.rpc.frames import Message, check_hello
from kvtier.rpc.wire import SocketWire, peer_credentials
from kvtier.units import format_size
from kvtier.version import __version__

if TYPE_CHECKING:
    from kvtier.observability.canary import Periodic
    from kvtier.observability.recording.recorder import Recorder
    from kvtier.peers.dialing import RemoteEngines
    from kvtier.peers.staging.buffers import Offer

logger = logging.getLogger("kvtier")

HELLO_SECONDS = 10.0
EXPLAIN_SECONDS = 0.001
"""How long after the answer to a lookup it is decided why chunks are missing, at the latest."""
STOPPED_SECONDS = 60.0
"""An engine that has sent nothing for this long, though it holds something, counts as stopped."""
CHECK_SECONDS = 1.0
"""Interval at which to check whether memory is still kept for a process that has disconnected."""


class Connection:
    """One scheduler, worker or observer, until it closes the connection."""

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
        self._unexplained: list[tuple[protocol.Lookup, FoundPrefix]] = []
        """Lookups that have been answered. Why their chunks are missing is not decided yet."""
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
            cache = self._server.cache
            self._kv_transfers = EngineKVTransfers(
                partial(self._server.instance.transfer_kv, hinted=True),
                cache.catalog,
                engine.layout,
                self._server.transfer_warnings,
                self._server.instance.tracer,
                cache.settings.kv_transfer.reserve,
                self._tasks,
                self.notify,
            )
            self._tasks.start_soon(self._server.notices.forward, self._send_notices)
            self._tasks.start_soon(self._server.warn_of_findings)

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
        # It takes a number, so that those granted before it are smaller, and those granted after it greater.
        cache, first = self._server.cache, next(self._server.lease_numbers)
        if self._process is not None:
            filling = hello.holding if hello.epoch == self._server.epoch else ()
            self._process.welcomed(hello.client, first, filling)
        staging = [] if self._server.instance.stagings is None else [protocol.STAGING]
        welcome = protocol.Welcome(
            protocol.VERSION,
            self._server.epoch,
            cache.arena.capacity,
            [*(tier.name for tier in cache.tiers), *staging],
            [*(tier.settings.type for tier in cache.tiers), *staging],
            self._server.peer,
            any(tier.shared for tier in cache.tiers),
            first,
            [cache.memory.name, *(tier.name for tier in cache.lower if tier.write != "never")],
            self._server.instance.tracer.sampling,
            # Prompts do not leave their host for it.
            cache.settings.why.show_text and not self._remote,
            # Tokens of another model mean something else.
            blake3(hello.namespace, key=self._server.signature_key).digest(),
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
                with following(message.trace):
                    answer, found = engine.look_up(message)
                self.send(answer)
                if answer.fetching:
                    self._tasks.start_soon(self._send_fetched, engine, message, found)
                elif message.described is not None:
                    if not self._unexplained:
                        self._tasks.start_soon(self._explain, engine)
                    self._unexplained.append((message, found))
            case protocol.Outcomes():
                self._send_explained(engine)
                for outcome in message.requests:
                    engine.end(outcome, self._server.instance.requests)
                for ended in message.ended:
                    engine.answer_ended(ended)
            case protocol.Reserve():
                self._send_explained(engine)  # Before what was missing is being stored.
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
            case protocol.Spans():
                self._server.instance.tracer.add(message.spans, message.dropped)
            case _:
                return True
        return False

    async def _handle(self, message: protocol.FromEngine) -> None:
        match message:
            case protocol.Status():
                self.send(protocol.StatusReport(message.ticket, json.dumps(self._server.status()).encode()))
            case protocol.WhatIf():
                enabled = self._server.cache.settings.whatif.enabled
                self.send(protocol.WhatIfAnswer(message.ticket, enabled, self._server.instance.what_if()))
            case protocol.Why():
                if not 0 <= message.last <= protocol.MAX_WHY_REQUESTS:
                    raise ProtocolError(f"{message.last} requests, at most {protocol.MAX_WHY_REQUESTS}")
                report = await self._server.instance.why(message.request, message.last)
                self.send(protocol.WhyAnswer(message.ticket, report))
            case protocol.WhyPrompt():
                asked = message.tokens, message.model, message.salt
                prompts = await self._server.instance.why_prompt(*asked)
                self.send(protocol.WhyPromptAnswer(message.ticket, prompts))
            case protocol.ListModels():
                self.send(protocol.ModelList(message.ticket, self._server.engine_models()))
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

    async def _send_fetched(
        self, engine: EngineSession, request: protocol.Lookup, found: FoundPrefix
    ) -> None:
        async def report_progress() -> None:
            """Grant what has arrived, which also shows the engine that it should keep waiting."""
            answer = engine.progress(request.ticket, found)
            if answer is not None:
                await self.notify(answer)

        try:
            await self._server.cache.settle(found, report_progress)
            answer = engine.fetched(request.ticket, found)
        except BaseException:
            engine.give_up(request.ticket, found)
            raise
        if answer is not None:
            await self.notify(answer)
            self._unexplained.append((request, found))
            await self._explain(engine)

    async def _explain(self, engine: EngineSession) -> None:
        """Send why chunks are missing, a little later: it takes longer than to answer the next lookup."""
        await anyio.sleep(EXPLAIN_SECONDS)
        with suppress(ChannelClosed):
            self._send_explained(engine)

    def _send_explained(self, engine: EngineSession) -> None:
        """Send why chunks of lookups that have been answered are missing."""
        unexplained, self._unexplained = self._unexplained, []
        log = self._server.instance.requests
        explanations = [engine.explain(request, found, log) for request, found in unexplained]
        if known := [explanation for explanation in explanations if explanation is not None]:
            self.send(protocol.Explained(known))


class BridgeServer:
    """Serves every engine of this host."""

    def __init__(self, instance: Instance, recorder: Recorder | None = None) -> None:
        self.cache = instance.cache
        self.instance = instance
        self._recorder = recorder
        self.canaries: dict[str, Periodic] = {}
        """By the URL of an engine. Set by the owner of the server, which runs them."""
        self.epoch = secrets.randbits(63)
        self.signature_key = secrets.token_bytes(32)
        self.lease_numbers = itertools.count(1)
        self._engines: dict[str, EngineSession] = {}
        self._connections: dict[str, set[Connection]] = {}
        self._departed: set[EngineSession] = set()
        """Engines without a connection, with memory that their processes may still write to."""
        self.transfer_warnings = ChangedWarnings("KV transfer to %s failed: %s")
        self.notices = Notices()
        """Warnings for schedulers. The owner of the server enables them with :meth:`Notices.listening`."""
        self.engine_connected = anyio.Event()
        """Set while an engine is connected. Replaced only when it is set, so that no waiter is lost."""
        self.idle = anyio.Event()
        """Set when the last engine disconnects, until one connects. Replaced only when it is set."""
        if instance.server is not None:
            instance.server.serve_engine = self.handle_remote

    async def handle(self, connected: socket.socket) -> None:
        """Serve one connection of this host until the engine closes it."""
        _, user = peer_credentials(connected)
        if user not in (0, os.getuid()):
            logger.warning("rejected a connection of user %d", user)
            connected.close()
            return
        await self._serve(SocketWire(connected), remote=False)

    async def handle_remote(self, connected: socket.socket) -> None:
        """Serve the scheduler of an engine of another host, which has authenticated as a peer."""
        await self._serve(SocketWire(connected), remote=True)

    async def _serve(self, wire: SocketWire, *, remote: bool) -> None:
        try:
            endpoint = Endpoint(wire, protocol.decode_from_engine)
            async with open_background_tasks() as tasks:
                process = None if remote else WriterProcess.of(wire.frames.socket)
                await Connection(self, endpoint, tasks, process, remote=remote).serve()
        except ChannelError as error:
            logger.debug("connection closed: %s", error)
        except Exception:
            # Last resort: an error in one connection must not end the others.
            logger.exception("connection failed")
        finally:
            wire.close()

    @property
    def peer(self) -> str | None:
        """Address on which this instance listens for peers, with the bound port; ``None`` if it does not."""
        listen, serving = self.cache.settings.peer.listen, self.instance.server
        if listen is None or serving is None:
            return None
        return f"{listen.rpartition(':')[0]}:{serving.address[1]}"

    @cached_property
    def remote_engines(self) -> RemoteEngines | None:
        """Connects schedulers of this host to other hosts; ``None`` without credentials for them."""
        settings = self.cache.settings.peer
        if not settings.has_credentials:
            return None
        # Imported here, so that an instance without peers does not pay for the import.
        from kvtier.peers.dialing import RemoteEngines
        from kvtier.rpc.authentication import Credentials

        return RemoteEngines(Credentials.from_settings(settings), self.instance.name)

    @property
    def engines(self) -> int:
        """Number of connected engines."""
        return len(self._engines)

    def join(self, connection: Connection, hello: protocol.Hello) -> EngineSession:
        """Add a connection to its engine. The first connection creates the engine.

        Raises :class:`ProtocolError`.
        """
        if not 0 <= hello.rank < hello.layout.ranks:
            raise ProtocolError(
                f"rank {hello.rank} is out of range: the layout has {hello.layout.ranks} ranks"
            )
        engine = self._engines.get(hello.engine)
        if engine is None:
            engine = self._engines[hello.engine] = self._returned(hello) or EngineSession(
                self.cache, hello, self.lease_numbers, self._recorder
            )
            self._connections[hello.engine] = set()
            self.engine_connected.set()
            if self.idle.is_set():
                self.idle = anyio.Event()
            logger.info("engine %s connected", hello.engine)
        elif engine.layout != hello.layout or engine.startup_namespace != hello.namespace:
            raise ProtocolError(f"engine {hello.engine} is already connected with another layout")
        for other in tuple(self._connections[hello.engine]):
            if (other.role, other.rank) == (hello.role, hello.rank):
                other.replace()
        again = hello.epoch == self.epoch
        if hello.role == "scheduler":
            engine.scheduler_joined(hello.holding, hello.seen if again else None)
            engine.model = hello.model
        else:
            engine.absent_ranks.discard(hello.rank)
            engine.writes.worker_writes(hello.rank, hello.client, hello.holding if again else ())
        # A worker knows the weights at startup only.
        self.use_weights(engine, hello.weights or engine.weights)
        self._connections[hello.engine].add(connection)
        return engine

    async def warn_of_findings(self) -> None:
        """Log what an engine that has just joined is not hit for, also for its own log."""
        for finding in self._found_at_start():
            self.cache.warn(finding.remedy, "%s", finding)

    def _found_at_start(self) -> Iterator[Finding]:
        """Yield what keeps the connected engines from being hit, and from sharing chunks."""
        for engine in self._engines.values():
            yield from engine.findings()
        yield from self.instance.served.disagreements()

    def _returned(self, hello: protocol.Hello) -> EngineSession | None:
        """Return the engine of a process that had disconnected, if its memory was kept."""
        client = hello.engine, hello.layout, hello.namespace
        for engine in self._departed:
            if (engine.name, engine.layout, engine.startup_namespace) == client:
                self._departed.remove(engine)
                return engine
        return None

    def worker_left(self, engine: EngineSession, rank: int, process: WriterProcess | None) -> None:
        """Void what a worker was filling. Takes ownership of its process, ``None`` if it writes no more."""
        engine.absent_ranks.add(rank)
        if engine.writes.worker_left(rank, process):
            assert process is not None
            if not process.watched:
                logger.warning(
                    "engine %s, rank %d: its connection was lost, and this kernel does not show whether its "
                    "process writes to its memory: that stays out of use until it returns",
                    engine.name,
                    rank,
                )
            self.cache.tasks.start_soon(self._await_exit, engine, process)
        elif process is not None:
            process.close()

    def reclaim_stopped(self) -> None:
        """Release what stopped engines hold, because another one has found no room or a chunk being stored.

        Except memory that they may still write to, which stays out of use.
        """
        now = time.monotonic()
        for name, engine in self._engines.items():
            last = max(connection.last_message_at for connection in self._connections[name])
            if now - last < STOPPED_SECONDS or engine.idle:
                continue
            engine.reclaim()
            logger.warning(
                "engine %s has sent nothing for %.0f s: its leases are released, and the chunks that it was "
                "storing are void; %s stay reserved for it until it continues or exits",
                name,
                now - last,
                format_size(engine.writes.reserved_bytes),
            )

    async def _await_exit(self, engine: EngineSession, process: WriterProcess) -> None:
        """Keep the memory that a process without a connection may write to, until it has exited."""
        try:
            while engine.writes.awaits(process) and not process.exited:
                with anyio.move_on_after(CHECK_SECONDS):
                    await process.wait_exited()
        finally:
            engine.writes.worker_exited(process)
            process.close()
        if engine in self._departed:
            engine.writes.close()
            if not len(engine.writes):
                self._departed.remove(engine)

    def engine_models(self) -> list[EngineModel]:
        """Return the models of the connected engines, as these have reported them."""
        return [engine.model for engine in self._engines.values() if engine.model is not None]

    def use_weights(self, engine: EngineSession, weights: protocol.Weights) -> None:
        """Process that an engine has other weights."""
        engine.use_weights(weights)
        name = engine.model.names[0] if engine.model is not None and engine.model.names else ""
        self.cache.identify(weights.namespace, name, weights.id)
        self.instance.served.add(engine.name, weights.namespace, engine.layout, engine.model)

    def stage(
        self, connection: Connection, engine: EngineSession, rank: int, request: protocol.RequestStaging
    ) -> None:
        """Provide a staging buffer for a worker, or report why none is available."""
        stagings = self.instance.stagings
        if stagings is None:
            connection.send(
                protocol.OfferStaging(0, b"", 0, "kv_transfer.device is cpu in the cache process")
            )
            return
        if engine.staging is None:
            engine.staging = stagings.of_engine(engine.name, engine.namespace, engine.layout)
        engine.staging.join(rank, request.gpu, connection.offer)

    def leave(self, connection: Connection, engine: EngineSession, *, replaced: bool) -> None:
        """Remove a connection from its engine. The last connection closes the engine, unless ``replaced``."""
        connections = self._connections[engine.name]
        connections.discard(connection)
        if not connections and not replaced:
            del self._connections[engine.name], self._engines[engine.name]
            if engine.staging is not None and self.instance.stagings is not None:
                self.instance.stagings.remove(engine.name)
                engine.staging = None
            engine.close()
            if len(engine.writes):
                self._departed.add(engine)
            self.instance.served.remove(engine.name)
            logger.info("engine %s disconnected", engine.name)
            if not self._engines:
                self.engine_connected = anyio.Event()
                self.idle.set()

    def status(self) -> dict[str, object]:
        """Return what each engine holds, and the counters since the start."""
        engines = [engine.status() for engine in self._engines.values()]
        # By function name: a leak shows as a count that only grows.
        tasks = Counter(task.name for task in anyio.get_running_tasks())
        placement = Placement.current().describe()
        process = {"pid": os.getpid(), "version": __version__, "epoch": self.epoch}
        process |= {"tasks": tasks, "placement": placement}
        findings = [*self._found_at_start(), *self.cache.findings.latest()]
        recording = {} if self._recorder is None else {"recording": self._recorder.status()}
        both = [*self._engines.values(), *self._departed]
        reservations = {
            "bytes": sum(engine.writes.reserved_bytes for engine in both),
            "void_bytes": sum(engine.writes.void_bytes for engine in both),
            "departed_engines": len(self._departed),
        }
        return {
            **process,
            "engines": engines,
            "reservations": reservations,
            "findings": [asdict(finding) for finding in dict.fromkeys(findings)],
            **recording,
            "canary": {url: canary.status for url, canary in self.canaries.items()},
            **self.instance.status(),
        }
