"""The controller's operations: lookups are answered directly, all others run as events in tasks."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import anyio
import msgspec
from anyio import CancelScope
from anyio.abc import TaskGroup
from starlette.requests import HTTPConnection

from kvtier.concurrency.locks import LockManager, LockRequest
from kvtier.concurrency.tasks import open_background_tasks
from kvtier.errors import ControllerError
from kvtier.fleet.controller.answers import LookupAnswer
from kvtier.fleet.controller.bodies import ClearBody, MoveBody, PromptBody, TierBody
from kvtier.fleet.controller.errors import TooManyOperations
from kvtier.fleet.controller.events import Event, EventLog, Kind, Position
from kvtier.fleet.controller.explanations import Explanations
from kvtier.fleet.controller.member import Member
from kvtier.fleet.controller.moves import Copy, Move, Prefetch
from kvtier.fleet.controller.operation import Operation, StoredOperation
from kvtier.fleet.controller.pin_and_clear import Clear, PinChunks, UnpinChunks
from kvtier.fleet.controller.pins import Pins
from kvtier.fleet.controller.prompts import Prompts
from kvtier.fleet.controller.registry import Registry
from kvtier.observability.traces.spans import NO_TRACER, child, current

logger = logging.getLogger("kvtier.controller")
_decode = msgspec.msgpack.Decoder(StoredOperation).decode
KINDS: dict[Kind, type[Operation]] = {
    kind.kind: kind for kind in (Move, Copy, Prefetch, PinChunks, UnpinChunks, Clear)
}
RECONNECT_SECONDS = 30.0
"""How long an operation that was interrupted waits until its instances have connected and reported."""


class Operations:
    """Entry point for all operations. Created with :meth:`open`."""

    def __init__(self, registry: Registry, events: EventLog, pins: Pins, tasks: TaskGroup) -> None:
        self.registry = registry
        self.tracer = NO_TRACER
        self.events = events
        self.pins = pins
        self._tasks = tasks
        self._prompts = Prompts(registry)
        self.explanations = Explanations(registry, self._prompts)
        self.locks = LockManager()
        self._in_flight: set[CancelScope] = set()
        self._stopping = False
        self.lookups = 0
        self.lookup_seconds = 0.0

    @classmethod
    @asynccontextmanager
    async def open(cls, registry: Registry, events: EventLog, pins: Pins) -> AsyncIterator[Operations]:
        """Accept operations within the block, and continue interrupted ones, as the next block will."""
        async with open_background_tasks() as tasks:
            operations = cls(registry, events, pins, tasks)
            for event_id, stored in events.interrupted.items():
                operations._continue(events.find(event_id), stored)
            try:
                yield operations
            finally:
                operations.stop()

    async def finish(self, seconds: float) -> None:
        """Refuse new operations, and wait for those in flight, for at most ``seconds``."""
        self._stopping = True
        with anyio.move_on_after(seconds):
            await self.events.wait_all()

    def stop(self) -> None:
        """Refuse new operations, and cancel those in flight, which are left to the next controller."""
        self._stopping = True
        self.events.close()
        for scope in self._in_flight:
            scope.cancel()

    async def follow(self, connection: HTTPConnection) -> None:
        """Have what a request starts belong to its trace. A FastAPI dependency."""
        current.set(self.tracer.trace(connection.headers.get("traceparent")))

    async def lookup(self, body: PromptBody) -> LookupAnswer:
        """Return how many leading tokens of a prompt each tier of each instance holds, in any layout."""
        began = time.monotonic()
        prompts = await self._prompts.find(body)
        tokens_by_place: dict[int, int] = {}
        for chunks in prompts:
            for place, count in self.registry.holders.prefixes(chunks.keys).items():
                tokens_by_place[place] = max(tokens_by_place.get(place, 0), chunks.leading_tokens(count))
        self.lookups += 1
        self.lookup_seconds += time.monotonic() - began
        tokens = prompts[0].prompt_tokens
        self.tracer.record("kvtier.controller.lookup", current.get(), began, tokens=tokens)
        instances = {
            member.id: _tokens_by_tier(member, tokens_by_place) for member in self.registry.members.values()
        }
        return LookupAnswer(
            model=prompts[0].model.names[0],
            num_tokens=tokens,
            instances={name: tiers for name, tiers in instances.items() if tiers},
        )

    async def move(self, body: MoveBody) -> Event:
        """Start a move or copy.

        Raises: WrongRequest, and see :meth:`Prompts.find` and :meth:`Registry.find_tier`.
        """
        old, new = map(self.registry.find_tier, (body.old_position, body.new_position))
        prompts = await self._prompts.find(body, [old.member, new.member])
        kind = Copy if body.copy else Move
        return await self._start(
            kind(self.registry, prompts, self.pins, source=old.position, target=new.position)
        )

    async def start(self, kind: type[Operation], body: TierBody) -> Event:
        """Start an operation on a prompt's chunks in one tier. Raises: as :meth:`move`."""
        ref = self.registry.find_tier((body.instance, body.tier))
        prompts = await self._prompts.find(body, [ref.member])
        return await self._start(
            kind(self.registry, prompts, self.pins, target=ref.position, seconds=body.seconds())
        )

    async def clear(self, body: ClearBody) -> Event:
        """Start removing a prompt's chunks, or all chunks, from one tier or all tiers."""
        member = self.registry.find(body.instance)
        target: Position = (member.id, None)
        if body.tier is not None:
            target = self.registry.find_tier((member.id, body.tier)).position
        prompts = await self._prompts.find(body, [member]) if body.has_prompt else []
        return await self._start(Clear(self.registry, prompts, self.pins, target=target))

    async def _start(self, operation: Operation) -> Event:
        """Create the event of an operation, and run it as soon as it gets its locks."""
        if self._stopping:
            raise TooManyOperations("the controller is shutting down: retry when it is back")
        plan = operation.plan()
        event = self.events.create(
            operation.kind,
            source=operation.source,
            target=operation.target,
            model=plan.model,
            num_tokens=plan.num_tokens,
            chunks=plan.chunks,
            operation=operation.stored(),
        )
        lock = operation.lock()
        # An operation that holds the lock may leave something to do for this one.
        if plan.is_empty and self.locks.is_free(lock):
            self.events.finish(event)
            await self.events.saved(event)
            return event
        # In the order of the requests, whichever is saved first.
        self.locks.enqueue(lock)
        try:
            await self.events.saved(event)
        except BaseException:
            self.locks.release(lock)
            raise
        if not self.events.closed:
            self._tasks.start_soon(self._run, operation, event, lock)
        return event

    def _continue(self, event: Event, stored: bytes) -> None:
        """Run an operation that a controller has not ended from its beginning, which does what is left."""
        try:
            kind, source, target, until, prompts = msgspec.structs.astuple(_decode(stored))
        except msgspec.MsgspecError as error:
            self.events.fail(event, f"what is stored of it is damaged: {error}")
            return
        seconds = None if until is None else max(0.0, until - time.time())
        operation = KINDS[kind](
            self.registry, prompts, self.pins, source=source, target=target, seconds=seconds
        )
        lock = operation.lock()
        self.locks.enqueue(lock)
        self._tasks.start_soon(self._run, operation, event, lock, RECONNECT_SECONDS)

    async def _run(
        self, operation: Operation, event: Event, lock: LockRequest, reconnect_seconds: float = 0.0
    ) -> None:
        if self.events.closed:
            return
        scope = CancelScope()
        trace, began = current.get(), time.monotonic()
        current.set(child(trace))  # In this task, for the commands to instances.
        self._in_flight.add(scope)
        try:
            with scope:
                async with self.locks.acquire(lock):
                    with anyio.move_on_after(reconnect_seconds):
                        await self._connected(operation.instances)
                    await self._execute(operation, event)
        except ControllerError as error:
            self.events.fail(event, str(error))
        except Exception:
            # End the event on a bug as well, so that clients do not wait for it.
            logger.exception("%s %s: internal error", event.kind, event.event_id)
            self.events.fail(event, "internal error: see the controller's log")
        finally:
            self._in_flight.discard(scope)
            self._log(event)
            name, done = f"kvtier.controller.{event.kind}", event.result
            reason, within = event.error or done.reason or "", current.get()
            self.tracer.record(name, trace, began, within, reason, chunks=done.chunks, bytes=done.bytes)

    async def _connected(self, instances: Iterable[str]) -> None:
        """Wait until these instances have connected, and have reported all their chunks."""
        members, changes = self.registry.members, self.registry.changes
        seen = changes.count
        while not all(name in members and members[name].up_to_date for name in instances):
            seen = await changes.after(seen)

    async def _execute(self, operation: Operation, event: Event) -> None:
        # Operations that held the locks before may have changed the index.
        plan = operation.plan()
        event.num_tokens, event.chunks = plan.num_tokens, plan.chunks
        self.events.start(event)
        if not plan.is_empty:
            await operation.execute(
                plan, event.result, lambda chunks, done: self.events.progress(event, chunks, done)
            )
        event.chunks = max(event.chunks, event.result.chunks)
        event.num_tokens = max(event.num_tokens, event.result.tokens)
        event.chunks_done, event.bytes_done = event.result.chunks, event.result.bytes
        if plan.chunks and not event.result.chunks and event.result.reason is not None:
            self.events.fail(event, event.result.reason)
        else:
            self.events.finish(event)

    @staticmethod
    def _log(event: Event) -> None:
        level = logging.WARNING if event.state == "failed" else logging.INFO
        outcome = event.error or event.result.reason or ("complete" if event.ended else "to be continued")
        logger.log(
            level,
            "%s %s %s: %d of %d chunks, %d bytes (%s)",
            event.kind,
            event.event_id,
            event.state,
            event.result.chunks,
            event.chunks,
            event.result.bytes,
            outcome,
        )


def _tokens_by_tier(member: Member, tokens_by_place: dict[int, int]) -> dict[str, int]:
    return {
        tier.name: tokens_by_place[place]
        for place, tier in zip(member.places, member.hello.tiers, strict=True)
        if tokens_by_place.get(place)
    }
