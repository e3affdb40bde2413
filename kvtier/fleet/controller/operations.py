"""The controller's operations: lookups are answered directly, all others run as events in tasks."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup
from starlette.requests import HTTPConnection

from kvtier.concurrency.tasks import open_tasks
from kvtier.errors import ControllerError
from kvtier.fleet.controller.answers import LookupAnswer
from kvtier.fleet.controller.bodies import ClearBody, MoveBody, PromptBody, TierBody
from kvtier.fleet.controller.errors import TooManyOperations
from kvtier.fleet.controller.events import PARTIAL_PROGRESS, Event, EventLog, Position
from kvtier.fleet.controller.explanations import Explanations
from kvtier.fleet.controller.member import Member
from kvtier.fleet.controller.moves import Copy, Move
from kvtier.fleet.controller.operation import LockManager, LockRequest, Operation
from kvtier.fleet.controller.pin_and_clear import Clear
from kvtier.fleet.controller.pins import Pins
from kvtier.fleet.controller.prompts import Prompts
from kvtier.fleet.controller.registry import Registry
from kvtier.observability.traces.spans import NO_TRACER, child, current

logger = logging.getLogger("kvtier.controller")
STOPPED = "the controller was stopped"


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
        """Accept operations within the block. Operations unfinished at its end fail."""
        async with open_tasks() as tasks:
            operations = cls(registry, events, pins, tasks)
            try:
                yield operations
            finally:
                operations.stop()
                tasks.cancel_scope.cancel()
                # Including events whose tasks have not started.
                events.fail_all(f"{STOPPED}; {PARTIAL_PROGRESS}")

    async def finish(self, seconds: float) -> None:
        """Refuse new operations, and wait for those in flight, for at most ``seconds``."""
        self._stopping = True
        with anyio.move_on_after(seconds):
            await self.events.wait_all()

    def stop(self) -> None:
        """Refuse new operations, and cancel those in flight, which fail."""
        self._stopping = True
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
        tokens = prompts[0].num_tokens
        self.tracer.record("kvtier.controller.lookup", current.get(), began, tokens=tokens)
        instances = {
            member.id: _tokens_by_tier(member, tokens_by_place) for member in self.registry.members.values()
        }
        return LookupAnswer(
            model=prompts[0].model.names[0],
            num_tokens=prompts[0].num_tokens,
            instances={name: tiers for name, tiers in instances.items() if tiers},
        )

    async def move(self, body: MoveBody) -> Event:
        """Start a move or copy.

        Raises: WrongRequest, and see :meth:`Prompts.find` and :meth:`Registry.find_tier`.
        """
        old, new = map(self.registry.find_tier, (body.old_position, body.new_position))
        prompts = await self._prompts.find(body, [old.member, new.member])
        kind = Copy if body.copy else Move
        return self._start(kind(self.registry, prompts, self.pins, source=old.position, target=new.position))

    async def start(self, kind: type[Operation], body: TierBody) -> Event:
        """Start an operation on a prompt's chunks in one tier. Raises: as :meth:`move`."""
        ref = self.registry.find_tier((body.instance, body.tier))
        prompts = await self._prompts.find(body, [ref.member])
        return self._start(
            kind(self.registry, prompts, self.pins, target=ref.position, seconds=body.seconds())
        )

    async def clear(self, body: ClearBody) -> Event:
        """Start removing a prompt's chunks, or all chunks, from one tier or all tiers."""
        member = self.registry.find(body.instance)
        target: Position = (member.id, None)
        if body.tier is not None:
            target = self.registry.find_tier((member.id, body.tier)).position
        prompts = await self._prompts.find(body, [member]) if body.has_prompt else []
        return self._start(Clear(self.registry, prompts, self.pins, target=target))

    def _start(self, operation: Operation) -> Event:
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
        )
        lock = LockRequest(operation.instances, operation.roots, exclusive=operation.exclusive)
        # An operation that holds the lock may leave something to do for this one.
        if plan.is_empty and self.locks.is_free(lock):
            self.events.finish(event)
        else:
            self.locks.enqueue(lock)
            self._tasks.start_soon(self._run, operation, event, lock)
        return event

    async def _run(self, operation: Operation, event: Event, lock: LockRequest) -> None:
        scope = CancelScope()
        trace, began = current.get(), time.monotonic()
        current.set(child(trace))  # In this task, for the commands to instances.
        self._in_flight.add(scope)
        try:
            with scope:
                async with self.locks.acquire(lock):
                    await self._execute(operation, event)
        except ControllerError as error:
            self.events.fail(event, str(error))
        except Exception:
            # End the event on a bug as well, so that clients do not wait for it.
            logger.exception("%s %s: internal error", event.kind, event.event_id)
            self.events.fail(event, "internal error: see the controller's log")
        finally:
            self._in_flight.discard(scope)
            # No effect unless it was cancelled: the event has ended otherwise.
            self.events.fail(event, f"{STOPPED}; {PARTIAL_PROGRESS}")
            self._log(event)
            name, done = f"kvtier.controller.{event.kind}", event.result
            reason, within = event.error or done.reason or "", current.get()
            self.tracer.record(name, trace, began, within, reason, chunks=done.chunks, bytes=done.bytes)

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
        level = logging.INFO if event.state == "done" else logging.WARNING
        outcome = event.error or event.result.reason or "complete"
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
