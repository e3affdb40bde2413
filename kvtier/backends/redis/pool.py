"""The servers of a pool, and batches of commands: by server, distributed over connections, and redirected."""

from __future__ import annotations

import logging
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import anyio

from kvtier.backends.redis.errors import (
    OTHER_NODE_CODES,
    Fault,
    Target,
    describe_control_failure,
    describe_failure,
    describe_refusal,
    redirection_of,
)
from kvtier.backends.redis.protocol import ErrorReply, Exchange, log_in, send_asking
from kvtier.backends.redis.settings import Endpoint
from kvtier.backends.redis.topology import ControlFailed, Placement, Topology, slot_of
from kvtier.concurrency.sockets.connection import Connection, Deadline, TLSConnection
from kvtier.concurrency.sockets.executor import finished
from kvtier.concurrency.sockets.pool import ConnectionPool, Dialer
from kvtier.logs import RateLimitedLog

logger = logging.getLogger("kvtier")

RUN_BYTES = 1 << 20
"""Maximum total value bytes of the commands that are pipelined on a connection at once."""

ItemT = TypeVar("ItemT")
AnswerT = TypeVar("AnswerT")


class Access(NamedTuple):
    """Connection parameters and credentials, the same for every server of a pool."""

    tls: ssl.SSLContext | None
    user: str | None
    password: str | None
    database: int
    connections: int
    """Maximum connections for chunks, per server."""

    def __repr__(self) -> str:
        return "Access(...)"


class Node:
    """One server. Lookups have a connection of their own, so that they never wait for a chunk."""

    def __init__(self, endpoint: Endpoint, access: Access) -> None:
        self.endpoint = endpoint
        self._access = access
        self.dialer = Dialer(endpoint.host, endpoint.port, self._new_connection, self._log_in)
        self.chunks = ConnectionPool(access.connections, self.dialer.connect)
        self.lookups = ConnectionPool(1, self.dialer.connect)

    def close(self) -> None:
        """Close every connection."""
        self.chunks.close()
        self.lookups.close()

    def _new_connection(self, family: int) -> Connection:
        tls = self._access.tls
        return Connection(family) if tls is None else TLSConnection(family, tls, self.endpoint.host)

    def _log_in(self, connection: Connection) -> None:
        log_in(connection, self._access.user, self._access.password, self._access.database)


@dataclass(frozen=True)
class Command(Generic[ItemT, AnswerT]):
    """A kind of command that a pool executes."""

    exchange: Callable[[Sequence[ItemT]], Exchange[AnswerT]]
    """A method of :class:`~kvtier.backends.redis.protocol.Commands`."""
    name_of: Callable[[ItemT], bytes]
    """Returns the Redis key of an item."""
    size_of: Callable[[ItemT], int]
    """Returns the value bytes of an item."""
    pool_of: Callable[[Node], ConnectionPool[Connection]]
    answer_for_error: Callable[[ErrorReply], AnswerT]
    """Converts an error reply to an answer."""
    failed: AnswerT
    """The answer when there is no reply."""
    exchange_one: Callable[[Sequence[ItemT]], Exchange[AnswerT]] | None = None
    """Replaces ``exchange`` after ASKING, which covers one command only, if it sends several per item."""


class Batch(Generic[ItemT, AnswerT]):
    """Items, the server to query for each, and the answers so far."""

    def __init__(self, command: Command[ItemT, AnswerT], items: Sequence[ItemT], seconds: float) -> None:
        self.command = command
        self.items = items
        self.answers = [command.failed] * len(items)
        self.deadline = Deadline(seconds)
        self.targets: dict[Target, list[int]] = {}
        """Indices into ``items`` that are still to be sent, by server."""

    def place(self, placement: Placement) -> None:
        """Assign each item to its server."""
        if placement.by_slot is None:
            self.targets[Target(placement.endpoints[0])] = list(range(len(self.items)))
            return
        for index, item in enumerate(self.items):
            endpoint = placement.by_slot[slot_of(self.command.name_of(item))]
            if endpoint is not None:
                self.send_to(Target(endpoint), index)

    def send_to(self, target: Target, index: int) -> None:
        """Assign one item to ``target``."""
        self.targets.setdefault(target, []).append(index)

    def runs(self, indices: Sequence[int], *, one_by_one: bool) -> list[list[ItemT]]:
        """Split the items, in order, into runs of at most ``RUN_BYTES``, but at least one item."""
        runs: list[list[ItemT]] = []
        room = 0
        for item in (self.items[index] for index in indices):
            room -= self.command.size_of(item)
            if one_by_one or room < 0 or not runs:
                runs.append([])
                room = RUN_BYTES - self.command.size_of(item)
            runs[-1].append(item)
        return runs


class Pool:
    """All servers of a pool. For use from the event loop."""

    def __init__(self, name: str, access: Access, topology: Topology) -> None:
        self.topology = topology
        self._name = name
        self._access = access
        self._nodes: dict[Endpoint, Node] = {}
        self.last_fault = Fault("")
        """The last failure or refusal."""
        # Separate rate limits, so that an unreachable server does not suppress the warning about a full one.
        self._warn_of_failure = RateLimitedLog(logger)
        self._warn_of_refusal = RateLimitedLog(logger)
        self._warn_of_room = RateLimitedLog(logger)

    def close(self) -> None:
        """Close every connection."""
        self._keep(())

    async def execute(self, batch: Batch[ItemT, AnswerT]) -> list[AnswerT]:
        """Return the answer for each item, ``Command.failed`` for those without a reply in time."""
        if not batch.items:
            return []
        try:
            placement = await self.topology.placement(batch.deadline)
        except ControlFailed as failed:
            self._report(self._warn_of_failure, describe_control_failure(failed))
            return batch.answers
        except TimeoutError:
            return batch.answers  # The call that held the topology lock has logged it.
        # Servers that left the pool: their connections would stay open for ever.
        self._keep(placement.endpoints)
        batch.place(placement)
        await self._round(batch)
        if batch.targets:
            # Follow redirections once: a second one means that the slot is moving, and counts as a failure.
            await self._round(batch)
        return batch.answers

    def _node(self, endpoint: Endpoint) -> Node:
        if endpoint not in self._nodes:
            self._nodes[endpoint] = Node(endpoint, self._access)
        return self._nodes[endpoint]

    def _keep(self, endpoints: Iterable[Endpoint]) -> None:
        """Close and forget every server that is not in ``endpoints``."""
        for endpoint in self._nodes.keys() - set(endpoints):
            self._nodes.pop(endpoint).close()

    async def _round(self, batch: Batch[ItemT, AnswerT]) -> None:
        """Send every server its items, concurrently."""
        targets, batch.targets = batch.targets, {}
        if len(targets) == 1:
            ((target, indices),) = targets.items()
            await self._execute_on(batch, target, indices)
            return
        async with anyio.create_task_group() as tasks:
            for target, indices in targets.items():
                tasks.start_soon(self._execute_on, batch, target, indices)

    async def _execute_on(self, batch: Batch[ItemT, AnswerT], target: Target, indices: Sequence[int]) -> None:
        node = self._node(target.endpoint)
        try:
            await node.dialer.find(batch.deadline)
        except OSError as error:
            self._note_failure(node, error)
            return
        runs = batch.runs(indices, one_by_one=target.asking)
        answers: list[list[AnswerT | ErrorReply | None]] = [[] for _ in runs]
        waiting = deque(zip(runs, answers, strict=True))

        async def process_runs() -> None:
            while waiting:
                run, run_answers = waiting.popleft()
                await self._execute_run(batch, node, run, run_answers, asking=target.asking)

        await _run_concurrently(min(batch.command.pool_of(node).size, len(waiting)), process_runs)
        for index, answer in zip(indices, (answer for run in answers for answer in run), strict=True):
            if isinstance(answer, ErrorReply):
                self._handle_error(batch, index, answer, node)
            elif answer is not None:
                batch.answers[index] = answer

    async def _execute_run(
        self,
        batch: Batch[ItemT, AnswerT],
        node: Node,
        run: Sequence[ItemT],
        answers: list[AnswerT | ErrorReply | None],
        *,
        asking: bool,
    ) -> None:
        """Append the answers for one run to ``answers``, ``None`` for each without a reply."""
        command, deadline = batch.command, batch.deadline
        pool = command.pool_of(node)
        exchange = (command.exchange_one if asking else None) or command.exchange
        try:
            # More than once if a reply left the connection out of sync: the rest goes over another one.
            while len(answers) < len(run):
                async with pool.acquire(deadline) as connection:
                    if asking:
                        await _in_thread(pool, connection, partial(send_asking, connection))
                    await _converse(pool, connection, exchange(run[len(answers) :]), answers)
        except OSError as error:
            self._note_failure(node, error)
        answers += [None] * (len(run) - len(answers))

    def _note_failure(self, node: Node, error: OSError) -> None:
        self.topology.invalidate()
        self._report(self._warn_of_failure, describe_failure(error, node.endpoint))

    def _handle_error(self, batch: Batch[ItemT, AnswerT], index: int, reply: ErrorReply, node: Node) -> None:
        if reply.code in OTHER_NODE_CODES:
            self.topology.invalidate()
        redirection = redirection_of(reply, node.endpoint) if self.topology.has_slots else None
        if redirection is not None:
            batch.send_to(redirection, index)
            return
        batch.answers[index] = batch.command.answer_for_error(reply)
        if reply.code == "WRONGTYPE":
            return
        warn = self._warn_of_room if reply.code == "OOM" else self._warn_of_refusal
        self._report(warn, describe_refusal(reply, node.endpoint))

    def _report(self, warn: RateLimitedLog, fault: Fault) -> None:
        self.last_fault = fault
        warn("%s: %s", self._name, fault)


async def _run_concurrently(count: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``count`` copies of ``work``. A single one avoids the event loop iterations of a task group."""
    if count == 1:
        await work()
        return
    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(work)


async def _converse(
    pool: ConnectionPool[Connection],
    connection: Connection,
    exchange: Exchange[AnswerT],
    answers: list[AnswerT | ErrorReply | None],
) -> None:
    """Append the answers as they arrive. Uses a thread if they are not the usual ones and need parsing."""
    progress = await pool.executor.converse(connection, exchange.operations)
    if progress.operations == len(exchange.operations) and (expected := exchange.expected()) is not None:
        answers += expected
        return

    def read() -> None:
        # One by one, so that answers before a failure are kept.
        for answer in exchange.answers(connection, progress):
            answers.append(answer)

    await _in_thread(pool, connection, read)


async def _in_thread(
    pool: ConnectionPool[Connection], connection: Connection, blocks: Callable[[], None]
) -> None:
    await finished(pool.executor.threads(blocks), connection.interrupt)
