"""Cache process's end of the bridge. The state of an engine ends with its last connection.

One task per connection reads frames and answers them in order. :class:`~kvtier.cache.TieredCache` decides
answers synchronously; only waiting for a fetch is a separate task.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from kvtier.bridge import protocol
from kvtier.bridge.engine import Engine
from kvtier.bridge.kv_transfer import EngineKVTransfers
from kvtier.bridge.notices import Notices
from kvtier.bridge.protocol import (
    Abandon,
    Cancel,
    Changed,
    Clear,
    Cleared,
    Commit,
    Confirm,
    Confirmed,
    EndKVTransfer,
    Found,
    FromEngine,
    Hello,
    KVTransfer,
    Lookup,
    Notice,
    OfferStaging,
    OpenedStaging,
    Refused,
    Release,
    RequestStaging,
    Reserve,
    Status,
    StatusReport,
    Welcome,
)
from kvtier.errors import ChannelClosed, ProtocolError
from kvtier.events import Report
from kvtier.instance import Instance
from kvtier.logs import ChangedWarnings
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.pipeline.found import Lookup as CacheLookup
from kvtier.sockets.channel import Channel
from kvtier.sockets.frames import FrameReader, Message, encode

if TYPE_CHECKING:
    from kvtier.peers.staging.buffers import Offer

logger = logging.getLogger("kvtier")

HELLO_SECONDS = 10.0
CHANGES_SECONDS = 0.05
"""Interval at which changes are sent."""
CHANGES_LIMIT = 50_000
"""Maximum number of changed keys per batch, in case an engine does not read. Further ones are dropped."""


class BridgeServer:
    """Serves every engine of this host."""

    def __init__(self, instance: Instance) -> None:
        self.cache = instance.cache
        self._instance = instance
        self.epoch = secrets.randbits(63)
        self._numbers = itertools.count(1)
        self._engines: dict[str, Engine] = {}
        self._connections: dict[str, set[Connection]] = {}
        self._warnings = ChangedWarnings("KV transfer to %s failed: %s")
        self.notices = Notices()
        """Warnings for schedulers. The owner of the server enables them with :meth:`Notices.listening`."""
        self.engine_connected = anyio.Event()
        """Set when the first engine connects."""
        self.idle = anyio.Event()
        """Set when the last engine disconnects; replaced when an engine connects."""

    async def handle(self, channel: Channel) -> None:
        """Serve one connection until the engine closes it."""
        if channel.peer_uid not in (0, os.getuid()):
            logger.warning("rejected a connection of user %d", channel.peer_uid)
            return
        async with anyio.create_task_group() as tasks:
            try:
                await Connection(self, channel, tasks).serve()
            except (ChannelClosed, TimeoutError) as error:
                logger.debug("connection closed: %s", error)
            except Exception:
                # Last resort: an error in one connection must not end the others.
                logger.exception("connection failed")
            finally:
                tasks.cancel_scope.cancel()

    @property
    def peer(self) -> str | None:
        """Address on which this instance listens for peers, with the bound port; ``None`` if it does not."""
        listen, serving = self.cache.settings.peer.listen, self._instance.server
        if listen is None or serving is None:
            return None
        return f"{listen.rpartition(':')[0]}:{serving.address[1]}"

    @property
    def stages(self) -> bool:
        """Whether engines may have staging buffers."""
        return self._instance.stagings is not None

    @property
    def engines(self) -> int:
        """Number of connected engines."""
        return len(self._engines)

    def join(self, connection: Connection, hello: Hello) -> Engine:
        """Add a connection to its engine. The first connection creates the engine."""
        engine = self._engines.get(hello.engine)
        if engine is None:
            engine = self._engines[hello.engine] = Engine(self.cache, hello, self._numbers)
            self._connections[hello.engine] = set()
            self.engine_connected.set()
            self.idle = anyio.Event()
            logger.info("engine %s connected", hello.engine)
        elif engine.layout != hello.layout or engine.namespace != hello.namespace:
            raise ProtocolError(f"engine {hello.engine} is already connected with another layout")
        if not 0 <= hello.rank < engine.layout.ranks:
            raise ProtocolError(
                f"rank {hello.rank} is out of range: the layout has {engine.layout.ranks} ranks"
            )
        if hello.role == "scheduler":
            engine.keep_only(hello.holding)
        self._instance.served.add(engine.name, engine.namespace, engine.layout, hello.model)
        self._connections[hello.engine].add(connection)
        return engine

    def kv_transfers(self, connection: Connection, engine: Engine, tasks: TaskGroup) -> EngineKVTransfers:
        """Return the KV transfers of a scheduler's connection."""
        return EngineKVTransfers(
            self._instance.transfer_kv,
            self.cache.hierarchy.catalog,
            engine.layout,
            self._warnings,
            self.cache.settings.kv_transfer.reserve,
            tasks,
            connection.notify,
        )

    async def stage(self, connection: Connection, engine: Engine, rank: int, request: RequestStaging) -> None:
        """Provide a staging buffer for a worker, or report why none is available."""
        stagings = self._instance.stagings
        if stagings is None:
            await connection.notify(OfferStaging(0, b"", 0, "kv_transfer.device is cpu in the cache process"))
            return
        if engine.staging is None:
            engine.staging = stagings.of_engine(engine.name, engine.namespace, engine.layout)
        engine.staging.join(rank, request.gpu, connection.offer)

    def leave(self, connection: Connection, engine: Engine) -> None:
        """Remove a connection from its engine. The last connection closes the engine."""
        connections = self._connections[engine.name]
        connections.discard(connection)
        if not connections:
            del self._connections[engine.name], self._engines[engine.name]
            if engine.staging is not None and self._instance.stagings is not None:
                self._instance.stagings.remove(engine.name)
            engine.close()
            self._instance.served.remove(engine.name)
            logger.info("engine %s disconnected", engine.name)
            if not self._engines:
                self.idle.set()

    def status(self) -> dict[str, object]:
        """Return what each engine holds, and the counters since the start."""
        engines = [engine.status() for engine in self._engines.values()]
        # By function name: a leak shows as a count that only grows.
        tasks = Counter(task.get_name() for task in asyncio.all_tasks())
        process = {"pid": os.getpid(), "epoch": self.epoch, "tasks": tasks}
        return {**process, "engines": engines, **self._instance.status()}


class Connection:
    """One scheduler, worker or observer."""

    def __init__(self, server: BridgeServer, channel: Channel, tasks: TaskGroup) -> None:
        self._server = server
        self._channel = channel
        self._tasks = tasks
        self._reader = FrameReader()
        self._kv_transfers: EngineKVTransfers | None = None

    async def serve(self) -> None:
        """Answer until the client closes the connection, then raise :class:`ChannelClosed`."""
        try:
            hello, more = await self._greeting()
        except ProtocolError as error:
            await self._refuse(str(error))
            return
        if hello.role == "observer":
            await self._welcome()
            await self._answer_all(None, 0, more)
            return
        try:
            engine = self._server.join(self, hello)
        except ProtocolError as error:
            await self._refuse(str(error))
            return
        try:
            await self._welcome()
            if hello.changes:
                self._tasks.start_soon(self._send_changes)
            if hello.role == "scheduler":
                self._kv_transfers = self._server.kv_transfers(self, engine, self._tasks)
                self._tasks.start_soon(self._server.notices.forward, self._send_notices)
            await self._answer_all(engine, hello.rank, more)
        finally:
            if self._kv_transfers is not None:
                self._kv_transfers.close()
            if hello.role == "worker" and engine.staging is not None:
                engine.staging.leave(hello.rank, self.offer)
            self._server.leave(self, engine)

    async def _greeting(self) -> tuple[Hello, list[FromEngine]]:
        with anyio.fail_after(HELLO_SECONDS):
            first, *more = await self._read()
        if not isinstance(first, Hello):
            raise ProtocolError(f"the first frame is {type(first).__name__}, not Hello")
        if first.version != protocol.VERSION:
            raise ProtocolError(
                f"this cache process speaks version {protocol.VERSION} and the engine {first.version}: "
                "restart both with the same kvtier"
            )
        return first, more

    async def _welcome(self) -> None:
        cache = self._server.cache
        staging = [protocol.STAGING] if self._server.stages else []
        welcome = Welcome(
            protocol.VERSION,
            self._server.epoch,
            cache.arena.capacity,
            [*(tier.name for tier in cache.hierarchy.tiers), *staging],
            [*(tier.settings.type for tier in cache.hierarchy.tiers), *staging],
            self._server.peer,
        )
        await self._channel.send(encode(welcome), [cache.arena.fd])

    async def _read(self) -> list[FromEngine]:
        messages: list[FromEngine] = []
        while not messages:
            bodies = self._reader.feed(await self._channel.receive())
            messages = [protocol.decode_from_engine(body) for body in bodies]
        return messages

    async def _answer_all(self, engine: Engine | None, rank: int, messages: list[FromEngine]) -> None:
        try:
            while True:
                answers = [await self._answer(engine, rank, message) for message in messages]
                await self._send([answer for answer in answers if answer is not None])
                # Yield to other tasks after the answer, not before it.
                await anyio.lowlevel.checkpoint()
                messages = await self._read()
        except ProtocolError as error:
            await self._refuse(str(error))

    async def _answer(self, engine: Engine | None, rank: int, message: FromEngine) -> Message | None:
        if isinstance(message, Status):
            return StatusReport(message.ticket, json.dumps(self._server.status()).encode())
        if engine is None or isinstance(message, Hello):
            raise ProtocolError(f"unexpected {type(message).__name__}: from an observer, or a second Hello")
        match message:
            case Lookup():
                answer, fetched = engine.look_up(message)
                if fetched is not None:
                    self._tasks.start_soon(self._send_fetched, engine, message.ticket, fetched)
                return answer
            case Reserve():
                if self._kv_transfers is None:
                    return engine.reserve(message)
                return engine.reserve(message, self._kv_transfers.find)
            case Confirm():
                return Confirmed(message.ticket, engine.holds(message.leases))
            case Clear():
                cleared = await self._server.cache.clear(namespace=engine.namespace)
                return Cleared(message.ticket, cleared.chunks)
            case Commit():
                engine.commit(message.leases, rank)
            case Release():
                engine.release(message.leases)
            case Abandon():
                if self._kv_transfers is None:
                    engine.give_up(message.leases, rank)
                else:
                    engine.abandon(message.leases)
            case Cancel():
                engine.cancel(message.ticket)
            case RequestStaging():
                await self._server.stage(self, engine, rank, message)
            case OpenedStaging():
                if engine.staging is not None:
                    engine.staging.opened(rank, message.number)
            case KVTransfer() | EndKVTransfer():
                return self._kv_transfer(message)
        return None

    def _kv_transfer(self, message: KVTransfer | EndKVTransfer) -> Message | None:
        if self._kv_transfers is None:
            raise ProtocolError(f"unexpected {type(message).__name__}: only schedulers send it")
        if isinstance(message, KVTransfer):
            return self._kv_transfers.begin(message)
        self._kv_transfers.end(message)
        return None

    async def notify(self, message: Message) -> None:
        """Send an unsolicited message."""
        await self._send([message])

    async def offer(self, offer: Offer) -> None:
        """Notify a worker of its staging buffer."""
        await self.notify(OfferStaging(*offer))

    async def _send_notices(self, texts: Sequence[str]) -> None:
        await self._send([Notice(text) for text in texts])

    async def _send_fetched(self, engine: Engine, ticket: int, found: CacheLookup) -> None:
        async def report_progress() -> None:
            """Show the engine that the lookup makes progress, so that it keeps waiting."""
            await self._send([Found(ticket, [], [], [], found.in_flight)])

        try:
            await self._server.cache.settle(found, report_progress)
            answer = engine.fetched(ticket, found)
        except BaseException:
            found.release()
            raise
        if answer is not None:
            await self._send([answer])

    async def _send_changes(self) -> None:
        gathered = _Changes()
        self._server.cache.add_observer(gathered)
        try:
            while True:
                await anyio.sleep(CHANGES_SECONDS)
                if changes := gathered.take():
                    await self._send(changes)
        finally:
            self._server.cache.remove_observer(gathered)

    async def _refuse(self, reason: str) -> None:
        """Send the reason, then wait for the engine to close: until then it may still be copying."""
        logger.warning("rejected an engine: %s", reason)
        await self._send([Refused(reason)])
        while True:
            await self._channel.receive()

    async def _send(self, messages: Sequence[Message]) -> None:
        if not messages:
            return
        data = b"".join(map(encode, messages))
        with suppress(ChannelClosed):  # The reading task also gets this error, and ends the connection.
            await self._channel.send(data)


class _Changes:
    """An observer that collects the chunks stored in and removed from each tier."""

    def __init__(self) -> None:
        self._gathered: dict[int, tuple[list[ChunkKey], list[ChunkKey]]] = {}
        self._room = CHANGES_LIMIT

    def observe(self, report: Report) -> None:
        """Ignore transfers."""

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """Add to the changes that :meth:`take` returns."""
        self._room -= len(stored) + len(removed)
        if self._room >= 0:
            all_stored, all_removed = self._gathered.setdefault(tier, ([], []))
            all_stored += stored
            all_removed += removed

    def take(self) -> list[Changed]:
        """Return the changes since the last call."""
        gathered, self._gathered, self._room = self._gathered, {}, CHANGES_LIMIT
        return [
            Changed(tier, join_keys(stored), join_keys(removed))
            for tier, (stored, removed) in gathered.items()
        ]
