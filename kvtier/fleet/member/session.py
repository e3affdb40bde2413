"""One connection to a controller, from the greeting to its end."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import anyio
import anyio.lowlevel
from anyio import CancelScope
from anyio.abc import TaskGroup
from websockets.asyncio.client import ClientConnection

from kvtier.cache import TieredCache
from kvtier.concurrency.tasks import open_background_tasks
from kvtier.errors import ChannelClosed, ChannelError, KVTierError, ProtocolError, Rejected
from kvtier.fleet.member.commands import Commands, Work
from kvtier.fleet.member.inventory_report import InventoryReport
from kvtier.fleet.member.protocol import (
    MAX_ADDRESSES,
    MAX_KEYS,
    VERSION,
    Cancel,
    Changing,
    Command,
    Counters,
    Done,
    Failed,
    Heartbeat,
    HeldBy,
    Hello,
    ServedAt,
    Serves,
    TierState,
    Welcome,
    WhatIf,
    WhoHolds,
    WhoServes,
    decode_from_controller,
)
from kvtier.fleet.member.served_models import ServedModels
from kvtier.logs import printable
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.observability.traces.spans import following
from kvtier.observability.whatif.report import Report as WhatIfReport
from kvtier.rpc.endpoint import Endpoint
from kvtier.rpc.frames import Message, encode_body
from kvtier.rpc.keep_alive import KeepAlive, Timeouts
from kvtier.rpc.websocket import ClientWire

logger = logging.getLogger("kvtier")

GREETING_SECONDS = 10.0
MAX_IDLE_TIMEOUT_SECONDS = 3600.0
WHAT_IF_SECONDS = 30.0
"""Interval of reports of what other settings would bring."""
MAX_STOPPED_CHARACTERS = 256
"""Of the reason why these have stopped."""
PROGRESS_SECONDS = 0.2
"""Interval of progress reports on a command."""
MAX_COMMANDS = 1024
MAX_REASON_CHARACTERS = 1000
MAX_QUESTIONS = 256
"""Maximum number of concurrent ``WhoHolds`` and ``WhoServes``. Further ones are not sent."""

NO_LEASE = "another controller leads now: this one has lost its lease"
NO_SHARED_STATE = (
    "controllers with a shared state have led this instance, and this one does not share it: set its "
    "--state, or restart the instance"
)

ReplyT = TypeVar("ReplyT", HeldBy, ServedAt)
AnswerT = TypeVar("AnswerT")


class Term:
    """The highest term of a controller's lease that this instance has seen, over all its connections."""

    def __init__(self) -> None:
        self.number = 0
        self._running: set[tuple[int, CancelScope]] = set()

    @contextmanager
    def executing(self, command: Command, scope: CancelScope) -> Iterator[None]:
        """Execute a command in a scope within the block. One with a term cancels those of earlier terms.

        Raises :class:`kvtier.errors.Rejected` if it is of an earlier term itself.
        """
        if not isinstance(command, Changing):
            yield
            return
        number = command.term
        if number < self.number:
            raise Rejected(NO_LEASE if number else NO_SHARED_STATE)
        self.number = number
        for earlier, running in self._running:
            if earlier < number:
                running.cancel()
        entry = number, scope
        self._running.add(entry)
        try:
            yield
        finally:
            self._running.discard(entry)


class Session:
    """A connection to a controller. It belongs to the caller, who closes it afterwards."""

    def __init__(
        self,
        connection: ClientConnection,
        cache: TieredCache,
        served: ServedModels,
        commands: Commands,
        what_if: Callable[[], WhatIfReport | None],
        counters: Callable[[], Counters],
        term: Term,
    ) -> None:
        """``what_if`` returns the latest estimate, ``counters`` those for display. Neither may block.

        ``term`` is that of the instance, which its sessions share.
        """
        self._endpoint = Endpoint(ClientWire(connection), decode_from_controller)
        self._cache = cache
        self._served = served
        self._commands = commands
        self._what_if = what_if
        self._counters = counters
        self._term = term
        self.inventory = InventoryReport(cache)
        self.commands_running: dict[int, CancelScope] = {}
        self._questions = 0
        self._tasks: TaskGroup

    async def greet(self, hello: Hello) -> Welcome:
        """Register this instance. Raises :class:`kvtier.errors.Rejected` and other :class:`ChannelError`."""
        welcome = await self._endpoint.greet(hello, Welcome, VERSION, GREETING_SECONDS)
        if not 0 < welcome.heartbeat < welcome.idle_timeout <= MAX_IDLE_TIMEOUT_SECONDS:
            raise ProtocolError(
                f"the controller's heartbeat of {welcome.heartbeat} s does not fit its timeout of "
                f"{welcome.idle_timeout} s"
            )
        return welcome

    async def run(self, welcome: Welcome) -> None:
        """Report what is held, and execute commands, until the connection ends. Always raises the reason."""
        async with anyio.create_task_group() as self._tasks:
            for part in (
                self._report_models,
                partial(self.inventory.report, self._send),
                partial(self._beat, welcome.heartbeat),
                self._report_what_if,
                partial(self._keep_alive, welcome),
            ):
                self._tasks.start_soon(self._do, part)
            # Reading must never wait for the controller to read, or both might wait for each other.
            error = await self._endpoint.run(self._handle, drains=False)
            self._tasks.cancel_scope.cancel()
        raise error

    async def who_serves(self, addresses: Sequence[str]) -> list[str] | None:
        """Return those of ``addresses`` at which an instance serves peers; ``None`` if too many callers wait.

        Raises ``ChannelError``.
        """
        asked = list(addresses[:MAX_ADDRESSES])
        served = await self._ask(
            lambda ticket: WhoServes(ticket, asked), ServedAt, lambda answer: answer.peers
        )
        return None if served is None else [address for address in served if address in asked]

    async def who_holds(self, keys: Sequence[ChunkKey]) -> list[tuple[str, int]]:
        """Return the holders of leading ``keys``; none if too many callers wait. Raises ``ChannelError``."""
        joined = join_keys(keys[:MAX_KEYS])
        return await self._ask(lambda ticket: WhoHolds(ticket, joined), HeldBy, _holders) or []

    async def _ask(
        self,
        question: Callable[[int], WhoHolds | WhoServes],
        kind: type[ReplyT],
        settle: Callable[[ReplyT], AnswerT],
    ) -> AnswerT | None:
        """Ask the controller. Return ``None`` if too many questions are open. Raises ``ChannelError``."""
        if self._questions >= MAX_QUESTIONS:
            return None
        self._questions += 1
        try:
            return await self._endpoint.call(question, kind, settle).reply()
        finally:
            self._questions -= 1

    # Parts: each runs until the connection ends.

    async def _do(self, part: Callable[[], Awaitable[None]]) -> None:
        """Run a part. Its failure ends the connection."""
        try:
            await part()
        except ChannelError as error:
            self._endpoint.end(error)

    async def _report_models(self) -> None:
        while True:
            seen = self._served.changes.count
            await self._send(Serves(self._served.models))
            await self._served.changes.after(seen)

    async def _beat(self, seconds: float) -> None:
        while True:
            await self._send(self._heartbeat())
            await anyio.sleep(seconds)

    async def _report_what_if(self) -> None:
        reported: WhatIfReport | None = None
        while True:
            report = self._what_if()
            if report is not None and report != reported:
                stopped = printable(report.stopped)[:MAX_STOPPED_CHARACTERS]
                await self._send(WhatIf(replace(report, stopped=stopped)))
                reported = report
            await anyio.sleep(WHAT_IF_SECONDS)

    async def _keep_alive(self, welcome: Welcome) -> None:
        timeouts = Timeouts(welcome.heartbeat, welcome.idle_timeout, welcome.idle_timeout)
        await KeepAlive(self._endpoint, timeouts).run()
        raise ChannelClosed(f"the controller has not answered for {welcome.idle_timeout:g} s")

    def _heartbeat(self) -> Heartbeat:
        cache = self._cache
        tiers = [
            TierState(
                tier.used_bytes,
                cache.catalog.count(tier.index),
                tier.available,
                cache.counts[f"found_{tier.name}"],
                cache.counts[f"hit_tokens_{tier.name}"],
            )
            for tier in cache.tiers
        ]
        # Each chunk in memory has a lease of its own; the others are those of engines, peers and transfers.
        leases = max(0, cache.arena.leases - cache.memory.count)
        return Heartbeat(
            tiers,
            cache.counts["looked_up"],
            self._served.engines,
            leases,
            cache.pending_bytes,
            cache.counts["lookup_tokens"],
            self._counters(),
        )

    async def _send(self, message: Message) -> None:
        """Send, once the controller has read most of what was sent before. Always yields."""
        await anyio.lowlevel.checkpoint()
        await self._endpoint.drain()
        self._endpoint.send(message)

    # Commands.

    async def _handle(self, message: Command | Cancel | Welcome) -> None:
        match message:
            case Cancel():
                if message.ticket in self.commands_running:
                    self.commands_running[message.ticket].cancel()
            case Welcome():
                raise ProtocolError("unexpected Welcome")
            case _:
                self._begin(message)

    def _begin(self, command: Command) -> None:
        if command.ticket in self.commands_running:
            raise ProtocolError(f"the controller gives ticket {command.ticket} to two commands at once")
        if len(self.commands_running) >= MAX_COMMANDS:
            reason = f"this instance is busy with {MAX_COMMANDS} commands already"
            self._endpoint.send(Failed(command.ticket, reason))
            return
        # Not in the handler, so that a Cancel is read while the command runs.
        scope = self.commands_running[command.ticket] = CancelScope()
        self._tasks.start_soon(self._execute, command, scope)

    async def _execute(self, command: Command, scope: CancelScope) -> None:
        try:
            with self._term.executing(command, scope), following(command.trace):
                answer = await self._answer(self._commands.begin(command), scope)
        except KVTierError as error:
            answer = Failed(command.ticket, str(error)[:MAX_REASON_CHARACTERS])
        except Exception as error:  # A bug in one command must not end the others.
            logger.exception("a command of the controller failed")
            answer = Failed(command.ticket, f"an error of this instance, which has logged it: {error!r:.200}")
        finally:
            del self.commands_running[command.ticket]
        await self._do(partial(self._send, answer))

    async def _answer(self, work: Work, scope: CancelScope) -> Done | Failed:
        async with open_background_tasks() as tasks:
            tasks.start_soon(self._do, partial(self._report_progress, work))
            with scope:
                await work.run()
        if work.changes:
            # The controller deletes elsewhere, and answers lookups, by what was reported before the answer.
            await self.inventory.flush()
        answer = work.answer("it was cancelled" if scope.cancelled_caught else None)
        encode_body(answer)  # Raises if it is too long.
        return answer

    async def _report_progress(self, work: Work) -> None:
        reported = 0
        while True:
            await anyio.sleep(PROGRESS_SECONDS)
            progress = work.progress()
            if progress is not None and progress.chunks != reported:
                reported = progress.chunks
                await self._send(progress)


def _holders(answer: HeldBy) -> list[tuple[str, int]]:
    if len(answer.peers) != len(answer.chunks):
        raise ProtocolError(f"HeldBy has {len(answer.peers)} peers, but {len(answer.chunks)} chunk counts")
    return list(zip(answer.peers, answer.chunks, strict=True))
