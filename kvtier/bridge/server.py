"""The cache process's end of the bridge: connections come and go, nothing of an engine outlives them.

One task per connection reads frames and answers them in order. Answers are decided synchronously by
:class:`~kvtier.cache.TieredCache`; only the wait for a fetch is a task of its own.
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

from kvtier.backends.logs import Troubles
from kvtier.bridge import protocol
from kvtier.bridge.engine import Engine
from kvtier.bridge.handing import EngineHandOvers
from kvtier.bridge.notices import Notices
from kvtier.bridge.protocol import (
    Abandon,
    AskStaging,
    Cancel,
    Changed,
    Clear,
    Cleared,
    Commit,
    Confirm,
    Confirmed,
    EndHandOver,
    Found,
    FromEngine,
    HandOver,
    Hello,
    LookUp,
    Notice,
    OfferStaging,
    OpenedStaging,
    Refused,
    Release,
    Reserve,
    Status,
    StatusReport,
    Welcome,
)
from kvtier.errors import ChannelClosed, ProtocolError
from kvtier.events import Report
from kvtier.instance import Instance
from kvtier.keys import ChunkKey, join_keys
from kvtier.pipeline.found import LookUp as CacheLookUp
from kvtier.sockets.channel import Channel
from kvtier.sockets.frames import FrameReader, Message, encode

if TYPE_CHECKING:
    from kvtier.peers.staging import Offer

logger = logging.getLogger("kvtier")

HELLO_SECONDS = 10.0
CHANGES_SECONDS = 0.05
"""How long changes are gathered before they are told."""
CHANGES_LIMIT = 50_000
"""Changed keys in one telling. What an engine that does not read misses beyond that is not told."""


class BridgeServer:
    """Serves every engine of this host."""

    def __init__(self, instance: Instance) -> None:
        self.cache = instance.cache
        self._instance = instance
        self.epoch = secrets.randbits(63)
        self._numbers = itertools.count(1)
        self._engines: dict[str, Engine] = {}
        self._connections: dict[str, set[Connection]] = {}
        self._troubles = Troubles("cannot hand over to %s: %s")
        self.notices = Notices()
        """Warnings that schedulers are sent. Whoever serves has it listen."""
        self.came = anyio.Event()
        """Set when the first engine has come."""
        self.left = anyio.Event()
        """Set when the last engine has left; a new event once one has come."""

    async def handle(self, channel: Channel) -> None:
        """Serve one connection until the engine closes it."""
        if channel.peer_uid not in (0, os.getuid()):
            logger.warning("refused a connection of user %d", channel.peer_uid)
            return
        async with anyio.create_task_group() as tasks:
            try:
                await Connection(self, channel, tasks).serve()
            except (ChannelClosed, TimeoutError) as error:
                logger.debug("a connection has ended: %s", error)
            except Exception:
                # The last resort: whatever is wrong with one engine must not end the others.
                logger.exception("a connection failed")
            finally:
                tasks.cancel_scope.cancel()

    @property
    def peer(self) -> str | None:
        """Where this instance listens for peers, with the port that it has; ``None`` where it does not."""
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
        """How many engines are connected."""
        return len(self._engines)

    def join(self, connection: Connection, hello: Hello) -> Engine:
        """Let a connection into its engine, which begins with its first."""
        engine = self._engines.get(hello.engine)
        if engine is None:
            engine = self._engines[hello.engine] = Engine(self.cache, hello, self._numbers)
            self._connections[hello.engine] = set()
            self.came.set()
            self.left = anyio.Event()
            logger.info("engine %s has come", hello.engine)
        elif engine.layout != hello.layout or engine.namespace != hello.namespace:
            raise ProtocolError(f"engine {hello.engine} is here with another layout")
        if not 0 <= hello.rank < engine.layout.ranks:
            raise ProtocolError(f"rank {hello.rank} of a layout with {engine.layout.ranks}")
        if hello.role == "scheduler":
            engine.keep_only(hello.holding)
        self._instance.served.came(engine.name, engine.namespace, engine.layout, hello.model)
        self._connections[hello.engine].add(connection)
        return engine

    def hand_overs(self, connection: Connection, engine: Engine, tasks: TaskGroup) -> EngineHandOvers:
        """Those that a scheduler may ask for, over its connection."""
        return EngineHandOvers(
            self._instance.hand_over,
            self.cache.hierarchy.catalog,
            engine.layout,
            self._troubles,
            self.cache.settings.hand_over.reserve,
            tasks,
            connection.tell,
        )

    async def stage(self, connection: Connection, engine: Engine, rank: int, ask: AskStaging) -> None:
        """See to a buffer for a worker, or tell it that there is none."""
        stagings = self._instance.stagings
        if stagings is None:
            await connection.tell(OfferStaging(0, b"", 0, "hand_over.device is cpu in the cache process"))
            return
        if engine.staging is None:
            engine.staging = stagings.of(engine.name, engine.namespace, engine.layout)
        engine.staging.join(rank, ask.gpu, connection.offer)

    def leave(self, connection: Connection, engine: Engine) -> None:
        """Take a connection out of its engine, which ends with its last."""
        connections = self._connections[engine.name]
        connections.discard(connection)
        if not connections:
            del self._connections[engine.name], self._engines[engine.name]
            if engine.staging is not None and self._instance.stagings is not None:
                self._instance.stagings.left(engine.name)
            engine.close()
            self._instance.served.left(engine.name)
            logger.info("engine %s has left", engine.name)
            if not self._engines:
                self.left.set()

    def status(self) -> dict[str, object]:
        """What is held, by whom, and what has happened since the start."""
        engines = [engine.status() for engine in self._engines.values()]
        # By the names of their functions: a leak shows as a count that only grows.
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
        self._handing: EngineHandOvers | None = None

    async def serve(self) -> None:
        """Answer until the other side closes. Raises :class:`ChannelClosed` then."""
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
                self._tasks.start_soon(self._tell_changes)
            if hello.role == "scheduler":
                self._handing = self._server.hand_overs(self, engine, self._tasks)
                self._tasks.start_soon(self._server.notices.forward, self._notify)
            await self._answer_all(engine, hello.rank, more)
        finally:
            if self._handing is not None:
                self._handing.close()
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
                # Now, not before the answer: whoever else has something to do gets a turn.
                await anyio.lowlevel.checkpoint()
                messages = await self._read()
        except ProtocolError as error:
            await self._refuse(str(error))

    async def _answer(self, engine: Engine | None, rank: int, message: FromEngine) -> Message | None:
        if isinstance(message, Status):
            return StatusReport(message.ticket, json.dumps(self._server.status()).encode())
        if engine is None or isinstance(message, Hello):
            raise ProtocolError(f"{type(message).__name__} is not for an observer, nor Hello twice")
        match message:
            case LookUp():
                answer, fetched = engine.look_up(message)
                if fetched is not None:
                    self._tasks.start_soon(self._tell_fetched, engine, message.ticket, fetched)
                return answer
            case Reserve():
                if self._handing is None:
                    return engine.reserve(message)
                return engine.reserve(message, self._handing.find)
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
                if self._handing is None:
                    engine.give_up(message.leases, rank)
                else:
                    engine.abandon(message.leases)
            case Cancel():
                engine.cancel(message.ticket)
            case AskStaging():
                await self._server.stage(self, engine, rank, message)
            case OpenedStaging():
                if engine.staging is not None:
                    engine.staging.opened(rank, message.number)
            case HandOver() | EndHandOver():
                return self._hand_over(message)
        return None

    def _hand_over(self, message: HandOver | EndHandOver) -> Message | None:
        if self._handing is None:
            raise ProtocolError(f"{type(message).__name__} is for schedulers")
        if isinstance(message, HandOver):
            return self._handing.begin(message)
        self._handing.end(message)
        return None

    async def tell(self, message: Message) -> None:
        """Send what the engine has not just asked for."""
        await self._send([message])

    async def offer(self, offer: Offer) -> None:
        """Tell a worker of its staging buffer."""
        await self.tell(OfferStaging(*offer))

    async def _notify(self, texts: Sequence[str]) -> None:
        await self._send([Notice(text) for text in texts])

    async def _tell_fetched(self, engine: Engine, ticket: int, found: CacheLookUp) -> None:
        async def report_progress() -> None:
            """Let the engine know that waiting is worthwhile."""
            await self._send([Found(ticket, [], [], [], found.under_way)])

        try:
            await self._server.cache.settle(found, report_progress)
            answer = engine.fetched(ticket, found)
        except BaseException:
            found.release()
            raise
        if answer is not None:
            await self._send([answer])

    async def _tell_changes(self) -> None:
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
        """Say why, then wait for the engine to close: until it does, it may still be copying."""
        logger.warning("refused an engine: %s", reason)
        await self._send([Refused(reason)])
        while True:
            await self._channel.receive()

    async def _send(self, messages: Sequence[Message]) -> None:
        if not messages:
            return
        data = b"".join(map(encode, messages))
        with suppress(ChannelClosed):  # The task that reads sees it too, and ends the connection.
            await self._channel.send(data)


class _Changes:
    """An observer that gathers what came into each tier and what left it."""

    def __init__(self) -> None:
        self._gathered: dict[int, tuple[list[ChunkKey], list[ChunkKey]]] = {}
        self._room = CHANGES_LIMIT

    def observe(self, report: Report) -> None:
        """Transfers are not of interest here."""

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """Remember for the next telling."""
        self._room -= len(stored) + len(removed)
        if self._room >= 0:
            came, went = self._gathered.setdefault(tier, ([], []))
            came += stored
            went += removed

    def take(self) -> list[Changed]:
        """Everything since the last call."""
        gathered, self._gathered, self._room = self._gathered, {}, CHANGES_LIMIT
        return [Changed(tier, join_keys(came), join_keys(went)) for tier, (came, went) in gathered.items()]
