"""One connection to a controller, from the greeting to its end."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from kvtier.agent.commands import Commands, Work
from kvtier.agent.holdings import Holdings
from kvtier.agent.protocol import (
    MAX_KEYS,
    VERSION,
    Cancel,
    Command,
    Done,
    Failed,
    FromController,
    Heartbeat,
    HeldBy,
    Hello,
    Refused,
    Serves,
    TierState,
    Welcome,
    WhoHolds,
    decode_from_controller,
)
from kvtier.agent.served import Served
from kvtier.cache import TieredCache
from kvtier.concurrency.tasks import open_tasks
from kvtier.errors import ChannelClosed, ChannelError, KVTierError, ProtocolError
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.sockets.frames import Message, encode_body
from kvtier.tiers.router import FIRST

logger = logging.getLogger("kvtier")

GREETING_SECONDS = 10.0
MAX_IDLE_TIMEOUT_SECONDS = 3600.0
PROGRESS_SECONDS = 0.2
"""Between two reports on one command."""
MAX_COMMANDS = 1024
MAX_REASON_CHARACTERS = 1000
MAX_QUESTIONS = 256
"""Under way at once. A further one is not asked."""


class RefusedByController(ChannelError):
    """The controller will not have this instance; says why."""


class Session:
    """A greeted connection. The socket belongs to the caller, who closes it afterwards."""

    def __init__(
        self, socket: ClientConnection, cache: TieredCache, served: Served, commands: Commands
    ) -> None:
        self._socket = socket
        self._cache = cache
        self._served = served
        self._commands = commands
        self.holdings = Holdings(cache)
        self._running: dict[int, CancelScope] = {}
        self._tickets = itertools.count(1)
        self._questions: dict[int, _Question] = {}
        self._failure: ChannelError | None = None
        self._tasks: TaskGroup

    @property
    def commands_running(self) -> int:
        """How many commands it is busy with."""
        return len(self._running)

    async def greet(self, hello: Hello) -> Welcome:
        """Introduce this instance. Raises :class:`RefusedByController` and other :class:`ChannelError`."""
        await self._send(hello)
        with anyio.move_on_after(GREETING_SECONDS) as scope:
            answer = await self._receive()
        if scope.cancelled_caught:
            raise ChannelClosed(f"it has not answered a greeting within {GREETING_SECONDS:g} s")
        if isinstance(answer, Refused):
            raise RefusedByController(answer.reason)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"it answers a greeting with {type(answer).__name__}")
        if answer.version != VERSION:
            raise ProtocolError(
                f"it speaks version {answer.version} of the protocol and this instance {VERSION}: "
                "install the same kvtier on both"
            )
        if not 0 < answer.heartbeat < answer.idle_timeout <= MAX_IDLE_TIMEOUT_SECONDS:
            raise ProtocolError(
                f"its heartbeat of {answer.heartbeat} s does not fit its timeout of {answer.idle_timeout} s"
            )
        return answer

    async def run(self, welcome: Welcome) -> None:
        """Tell what is held, and do what is asked for, until the connection ends: raises why, always."""
        async with anyio.create_task_group() as self._tasks:
            for part in (
                self._listen,
                self._tell_models,
                partial(self.holdings.report, self._send),
                partial(self._beat, welcome.heartbeat),
                partial(self._watch, welcome),
            ):
                self._tasks.start_soon(self._do, part)
        raise self._failure or ChannelClosed("it has closed the connection")

    async def who_holds(self, keys: Sequence[ChunkKey]) -> list[tuple[str, int]]:
        """Ask who holds leading ones of ``keys``, where few enough others ask; waits for the answer."""
        if len(self._questions) >= MAX_QUESTIONS:
            return []
        ticket = next(self._tickets)
        question = self._questions[ticket] = _Question()
        try:
            await self._send(WhoHolds(ticket, join_keys(keys[:MAX_KEYS])))
            await question.answered.wait()
        finally:
            del self._questions[ticket]
        return question.holders

    # Parts: each runs as long as the connection lasts.

    async def _do(self, part: Callable[[], Awaitable[None]]) -> None:
        """Whatever ends one part ends the connection."""
        try:
            await part()
        except ChannelError as error:
            self._failure = self._failure or error
            self._tasks.cancel_scope.cancel()

    async def _listen(self) -> None:
        # Nothing here may wait for the controller to read, or its pongs would not be heard.
        while True:
            message = await self._receive()
            match message:
                case HeldBy():
                    self._note_holders(message)
                case Cancel():
                    if message.ticket in self._running:
                        self._running[message.ticket].cancel()
                case Refused():
                    raise RefusedByController(message.reason)
                case Welcome():
                    raise ProtocolError("it says Welcome twice")
                case _:
                    self._begin(message)

    async def _tell_models(self) -> None:
        while True:
            version = self._served.version
            await self._send(Serves(self._served.models))
            await self._served.changed(version)

    async def _beat(self, seconds: float) -> None:
        while True:
            await self._send(self._heartbeat())
            await anyio.sleep(seconds)

    async def _watch(self, welcome: Welcome) -> None:
        """Notice a controller that does not answer any more."""
        while True:
            with anyio.move_on_after(welcome.idle_timeout) as scope:
                await self._ping()
            if scope.cancelled_caught:
                raise ChannelClosed(f"it has been silent for {welcome.idle_timeout:g} s")
            await anyio.sleep(welcome.heartbeat)

    def _heartbeat(self) -> Heartbeat:
        cache = self._cache
        hierarchy = cache.hierarchy
        tiers = [
            TierState(
                tier.used_bytes,
                hierarchy.catalog.count(tier.index),
                tier.available,
                hierarchy.counts[f"found_{tier.name}"],
            )
            for tier in hierarchy.tiers
        ]
        # Each chunk in memory has a lease of its own; the others are those of engines, peers and transfers.
        leases = max(0, cache.arena.leases - hierarchy.catalog.count(FIRST))
        return Heartbeat(
            tiers, hierarchy.counts["looked_up"], self._served.engines, leases, cache.pending_bytes
        )

    def _note_holders(self, answer: HeldBy) -> None:
        if len(answer.peers) != len(answer.chunks):
            raise ProtocolError(f"{len(answer.peers)} peers hold {len(answer.chunks)} numbers of chunks")
        question = self._questions.get(answer.ticket)
        if question is not None:  # Else whoever asked waits no longer.
            question.holders = list(zip(answer.peers, answer.chunks, strict=True))
            question.answered.set()

    # Commands.

    def _begin(self, command: Command) -> None:
        if command.ticket in self._running:
            raise ProtocolError(f"it gives ticket {command.ticket} to two commands at once")
        if len(self._running) >= MAX_COMMANDS:
            busy = Failed(command.ticket, f"this instance is busy with {MAX_COMMANDS} commands already")
            self._tasks.start_soon(self._do, partial(self._send, busy))
            return
        scope = self._running[command.ticket] = CancelScope()
        self._tasks.start_soon(self._execute, command, scope)

    async def _execute(self, command: Command, scope: CancelScope) -> None:
        try:
            answer = await self._answer(self._commands.begin(command), scope)
        except KVTierError as error:
            answer = Failed(command.ticket, str(error)[:MAX_REASON_CHARACTERS])
        except Exception as error:  # Whatever is wrong with one command must not end the others.
            logger.exception("a command of the controller failed")
            answer = Failed(command.ticket, f"an error of this instance, which has logged it: {error!r:.200}")
        finally:
            del self._running[command.ticket]
        await self._do(partial(self._send, answer))

    async def _answer(self, work: Work, scope: CancelScope) -> Done | Failed:
        async with open_tasks() as tasks:
            tasks.start_soon(self._do, partial(self._report, work))
            with scope:
                await work.run()
            tasks.cancel_scope.cancel()
        if work.changes:
            await self.holdings.flush()
        answer = work.answer("it was cancelled" if scope.cancelled_caught else None)
        encode_body(answer)  # Raises where it is too long to be sent.
        return answer

    async def _report(self, work: Work) -> None:
        """Say how far a command is, as long as it takes."""
        told = 0
        while True:
            await anyio.sleep(PROGRESS_SECONDS)
            progress = work.progress()
            if progress is not None and progress.chunks != told:
                told = progress.chunks
                await self._send(progress)

    # The socket.

    async def _send(self, message: Message) -> None:
        body = encode_body(message)
        try:
            await self._socket.send(body)
        except (ConnectionClosed, OSError) as error:
            raise ChannelClosed(f"the connection has ended: {error}") from error

    async def _ping(self) -> None:
        try:
            await (await self._socket.ping())
        except (ConnectionClosed, OSError) as error:
            raise ChannelClosed(f"the connection has ended: {error}") from error

    async def _receive(self) -> FromController:
        try:
            body = await self._socket.recv()
        except (ConnectionClosed, OSError) as error:
            raise ChannelClosed(f"the connection has ended: {error}") from error
        if isinstance(body, str):
            raise ProtocolError("it sends text")
        return decode_from_controller(body)


class _Question:
    """Something that the controller was asked for."""

    __slots__ = ("answered", "holders")

    def __init__(self) -> None:
        self.answered = anyio.Event()
        self.holders: list[tuple[str, int]] = []
