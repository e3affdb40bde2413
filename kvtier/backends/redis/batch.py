"""One batch of commands: grouped by server, spread over connections, sent on where it is redirected."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import anyio

from kvtier.backends.logs import RareWarning
from kvtier.backends.redis.commands import Exchange, ask_again
from kvtier.backends.redis.control import ControlFailed
from kvtier.backends.redis.errors import (
    OTHER_NODE_CODES,
    Target,
    control_failure_in_words,
    failure_in_words,
    redirection_of,
    refusal_in_words,
)
from kvtier.backends.redis.nodes import Node, Nodes
from kvtier.backends.redis.resp import ErrorReply
from kvtier.backends.redis.topology import Placement, Topology, slot_of
from kvtier.sockets.connection import Connection, Deadline
from kvtier.sockets.lanes import Lane
from kvtier.sockets.pump import finished

logger = logging.getLogger("kvtier")

RUN_BYTES = 1 << 20
"""Commands whose values are so many bytes in all are sent over one connection at once."""

ItemT = TypeVar("ItemT")
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class Operation(Generic[ItemT, AnswerT]):
    """One of the things that are asked of a pool."""

    exchange: Callable[[Sequence[ItemT]], Exchange[AnswerT]]
    """One of :class:`~kvtier.backends.redis.commands.Commands`."""
    name_of: Callable[[ItemT], bytes]
    """What the item's chunk is called on the server."""
    size_of: Callable[[ItemT], int]
    """How many bytes of value the item moves."""
    lane_of: Callable[[Node], Lane[Connection]]
    answer_to: Callable[[ErrorReply], AnswerT]
    """What a refusal comes to."""
    failed: AnswerT
    exchange_one: Callable[[Sequence[ItemT]], Exchange[AnswerT]] | None = None
    """Where ``exchange`` takes more than one command an item: ASKING is for one alone."""


class Batch(Generic[ItemT, AnswerT]):
    """Items, who is asked for which of them next, and the answers so far."""

    def __init__(self, operation: Operation[ItemT, AnswerT], items: Sequence[ItemT], seconds: float) -> None:
        self.operation = operation
        self.items = items
        self.answers = [operation.failed] * len(items)
        self.deadline = Deadline(seconds)
        self.targets: dict[Target, list[int]] = {}
        """Places in ``items``, by the server that is to be asked."""

    def place(self, placement: Placement) -> None:
        """Ask each server for what it has."""
        if placement.by_slot is None:
            self.targets[Target(placement.endpoints[0])] = list(range(len(self.items)))
            return
        for index, item in enumerate(self.items):
            endpoint = placement.by_slot[slot_of(self.operation.name_of(item))]
            if endpoint is not None:
                self.send_to(Target(endpoint), index)

    def send_to(self, target: Target, index: int) -> None:
        """Ask ``target`` for one item."""
        self.targets.setdefault(target, []).append(index)

    def runs(self, indices: Sequence[int], *, one_by_one: bool) -> list[list[ItemT]]:
        """The items in their order, as many in a run as are no more than ``RUN_BYTES``, but at least one."""
        runs: list[list[ItemT]] = []
        room = 0
        for item in (self.items[index] for index in indices):
            room -= self.operation.size_of(item)
            if one_by_one or room < 0 or not runs:
                runs.append([])
                room = RUN_BYTES - self.operation.size_of(item)
            runs[-1].append(item)
        return runs


class Pool:
    """All servers of a pool. Used from the event loop."""

    def __init__(self, name: str, nodes: Nodes, topology: Topology) -> None:
        self.topology = topology
        self._name = name
        self._nodes = nodes
        # One each, so that a full server is not left unsaid because another could not be reached.
        self._warn_of_failure = RareWarning(logger)
        self._warn_of_refusal = RareWarning(logger)
        self._warn_of_room = RareWarning(logger)

    def close(self) -> None:
        """Close every connection."""
        self._nodes.close()

    async def ask(self, batch: Batch[ItemT, AnswerT]) -> list[AnswerT]:
        """The answer for each item; that of a failure where there is none in time."""
        if not batch.items:
            return []
        try:
            placement = await self.topology.placement(batch.deadline)
        except ControlFailed as failed:
            self._warn_of_failure("%s: %s", self._name, control_failure_in_words(failed))
            return batch.answers
        except TimeoutError:
            return batch.answers  # Whoever was asking before us has said so.
        self._nodes.keep(placement.endpoints)
        batch.place(placement)
        await self._round(batch)
        if batch.targets:
            # Once more for what was redirected. What is redirected again is being moved about: it failed.
            await self._round(batch)
        return batch.answers

    async def _round(self, batch: Batch[ItemT, AnswerT]) -> None:
        """Ask every server for what is its own, all at once."""
        targets, batch.targets = batch.targets, {}
        if len(targets) == 1:
            ((target, indices),) = targets.items()
            await self._ask_one(batch, target, indices)
            return
        async with anyio.create_task_group() as tasks:
            for target, indices in targets.items():
                tasks.start_soon(self._ask_one, batch, target, indices)

    async def _ask_one(self, batch: Batch[ItemT, AnswerT], target: Target, indices: Sequence[int]) -> None:
        node = self._nodes.at(target.endpoint)
        try:
            await node.find(batch.deadline)
        except OSError as error:
            self._note_failure(node, error)
            return
        runs = batch.runs(indices, one_by_one=target.asking)
        answers: list[list[AnswerT | ErrorReply | None]] = [[] for _ in runs]
        waiting = deque(zip(runs, answers, strict=True))
        del runs

        async def take_turns() -> None:
            while waiting:
                run, told = waiting.popleft()
                await self._work_off(batch, node, run, told, asking=target.asking)

        await _at_once(min(batch.operation.lane_of(node).size, len(waiting)), take_turns)
        for index, answer in zip(indices, (answer for run in answers for answer in run), strict=True):
            if isinstance(answer, ErrorReply):
                self._settle_refusal(batch, index, answer, node)
            elif answer is not None:
                batch.answers[index] = answer

    async def _work_off(
        self,
        batch: Batch[ItemT, AnswerT],
        node: Node,
        run: Sequence[ItemT],
        answers: list[AnswerT | ErrorReply | None],
        *,
        asking: bool,
    ) -> None:
        """Add the answers to one run, ``None`` where there is none."""
        operation, deadline = batch.operation, batch.deadline
        lane = operation.lane_of(node)
        exchange = (operation.exchange_one if asking else None) or operation.exchange
        try:
            while len(answers) < len(run):
                async with lane.taken(deadline) as connection:
                    if asking:
                        await _in_thread(lane, connection, partial(ask_again, connection))
                    await _converse(lane, connection, exchange(run[len(answers) :]), answers)
        except OSError as error:
            self._note_failure(node, error)
        answers += [None] * (len(run) - len(answers))

    def _note_failure(self, node: Node, error: OSError) -> None:
        self.topology.forget()
        self._warn_of_failure("%s: %s", self._name, failure_in_words(error, node.endpoint))

    def _settle_refusal(
        self, batch: Batch[ItemT, AnswerT], index: int, reply: ErrorReply, node: Node
    ) -> None:
        if reply.code in OTHER_NODE_CODES:
            self.topology.forget()
        redirection = redirection_of(reply, node.endpoint) if self.topology.has_slots else None
        if redirection is not None:
            batch.send_to(redirection, index)
            return
        batch.answers[index] = batch.operation.answer_to(reply)
        if reply.code == "WRONGTYPE":
            return
        warn = self._warn_of_room if reply.code == "OOM" else self._warn_of_refusal
        warn("%s: %s", self._name, refusal_in_words(reply, node.endpoint))


async def _at_once(count: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Have so many do it. One alone needs no task group, which takes turns of the loop."""
    if count == 1:
        await work()
        return
    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(work)


async def _converse(
    lane: Lane[Connection],
    connection: Connection,
    exchange: Exchange[AnswerT],
    answers: list[AnswerT | ErrorReply | None],
) -> None:
    """Add the answers as they come. In a thread where they are others than mostly, and have to be parsed."""
    progress = await lane.pump.converse(connection, exchange.operations)
    if progress.operations == len(exchange.operations) and (expected := exchange.expected()) is not None:
        answers += expected
        return

    def read() -> None:
        # One by one: those before a failure count.
        for answer in exchange.answers(connection, progress):
            answers.append(answer)

    await _in_thread(lane, connection, read)


async def _in_thread(lane: Lane[Connection], connection: Connection, blocks: Callable[[], None]) -> None:
    await finished(lane.pump.hop(blocks), connection.interrupt)
