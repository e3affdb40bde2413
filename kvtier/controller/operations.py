"""What the controller is asked for: look-ups are answered at once, all else is an event with a task."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

from kvtier.controller.errors import TooManyOperations
from kvtier.controller.events import MEANWHILE, Event, EventLog, Position
from kvtier.controller.keeping import Clear, PinChunks, UnpinChunks
from kvtier.controller.member import Member
from kvtier.controller.moves import Move, Prefetch
from kvtier.controller.operation import Operation, Place, find_place
from kvtier.controller.pins import Pins
from kvtier.controller.prompts import Asked, Prompts
from kvtier.controller.registry import Registry
from kvtier.controller.turns import Claim, Turns
from kvtier.errors import ControllerError
from kvtier.tasks import open_tasks

logger = logging.getLogger("kvtier.controller")

STOPPED = "the controller was stopped"


class Found(NamedTuple):
    """Who holds the beginning of a prompt."""

    model: str
    num_tokens: int
    """Of the whole prompt."""
    instances: dict[str, dict[str, int]]
    """By instance and tier: how many leading tokens it holds, where it holds any."""


class Operations:
    """Made with :meth:`open`."""

    def __init__(self, registry: Registry, events: EventLog, pins: Pins, tasks: TaskGroup) -> None:
        self.registry = registry
        self.events = events
        self._pins = pins
        self._tasks = tasks
        self._prompts = Prompts(registry)
        self._turns = Turns()
        self._under_way: set[CancelScope] = set()
        self._stopping = False
        self.look_ups = 0
        self.look_up_seconds = 0.0

    @classmethod
    @asynccontextmanager
    async def open(cls, registry: Registry, events: EventLog, pins: Pins) -> AsyncIterator[Operations]:
        """Take operations on until the block is left; what has not ended by then has failed."""
        async with open_tasks() as tasks:
            operations = cls(registry, events, pins, tasks)
            try:
                yield operations
            finally:
                operations.stop()
                operations._prompts.close()
                tasks.cancel_scope.cancel()
                # Some may not even have begun.
                events.fail_all(f"{STOPPED}; {MEANWHILE}")

    async def finish(self, seconds: float) -> None:
        """Take nothing on any more, and let what is under way end, for so many seconds at most."""
        self._stopping = True
        with anyio.move_on_after(seconds):
            await self.events.all_ended()

    def stop(self) -> None:
        """Take nothing on any more, and end what is under way: it has failed."""
        self._stopping = True
        for scope in self._under_way:
            scope.cancel()

    async def look_up(self, asked: Asked) -> Found:
        """How many leading tokens of a prompt each tier of each instance holds, in whatever layout."""
        began = time.perf_counter()
        prompts = await self._prompts.find(asked)
        most: dict[int, int] = {}
        for chunks in prompts:
            for place, count in self.registry.holders.prefixes(chunks.prompt.keys).items():
                most[place] = max(most.get(place, 0), chunks.prompt.leading_tokens(count))
        self.look_ups += 1
        self.look_up_seconds += time.perf_counter() - began
        instances = {member.id: _by_tier(member, most) for member in self.registry.members.values()}
        return Found(
            prompts[0].model.names[0],
            prompts[0].num_tokens,
            {name: tiers for name, tiers in instances.items() if tiers},
        )

    async def move(self, source: Position, target: Position, asked: Asked, *, copy: bool) -> Event:
        """Begin a move or a copy. Raises what :meth:`Prompts.find` and :class:`Move` raise."""
        old, new = self._place(source), self._place(target)
        prompts = await self._prompts.find(asked, [old.member, new.member])
        return self._begin(
            Move(self.registry, prompts, self._pins, source=old.position, target=new.position, copy=copy)
        )

    async def prefetch(self, target: Position, asked: Asked, *, seconds: float | None) -> Event:
        """Begin to bring chunks into a tier."""
        place = self._place(target)
        prompts = await self._prompts.find(asked, [place.member])
        return self._begin(Prefetch(self.registry, prompts, target=place.position, seconds=seconds))

    async def pin(self, target: Position, asked: Asked, *, seconds: float | None) -> Event:
        """Begin to pin what a tier holds."""
        place = self._place(target)
        prompts = await self._prompts.find(asked, [place.member])
        return self._begin(
            PinChunks(self.registry, prompts, self._pins, target=place.position, seconds=seconds)
        )

    async def unpin(self, target: Position, asked: Asked) -> Event:
        """Begin to unpin."""
        place = self._place(target)
        prompts = await self._prompts.find(asked, [place.member])
        return self._begin(UnpinChunks(self.registry, prompts, self._pins, target=place.position))

    async def clear(self, target: Position, asked: Asked | None) -> Event:
        """Begin to remove a prompt, or everything where that is ``None``, from a tier or from all."""
        instance, tier = target
        member = self.registry.find(instance)
        position = target if tier is None else self._place(target).position
        prompts = [] if asked is None else await self._prompts.find(asked, [member])
        return self._begin(Clear(self.registry, prompts, self._pins, target=position))

    def _place(self, position: Position) -> Place:
        return find_place(self.registry, position)

    def _begin(self, operation: Operation) -> Event:
        """Enter it into the log, and carry it out as soon as it is its turn."""
        if self._stopping:
            raise TooManyOperations("the controller is being stopped: ask again when it is back")
        plan = operation.plan()
        event = self.events.create(
            operation.kind,
            source=operation.source,
            target=operation.target,
            model=plan.model,
            num_tokens=plan.num_tokens,
            chunks=plan.chunks,
        )
        claim = Claim(operation.instances, operation.roots, deletes=operation.deletes)
        if plan.void and self._turns.is_free(claim):
            self.events.finish(event)
        else:
            self._turns.claim(claim)
            self._tasks.start_soon(self._run, operation, event, claim)
        return event

    async def _run(self, operation: Operation, event: Event, claim: Claim) -> None:
        scope = CancelScope()
        self._under_way.add(scope)
        try:
            with scope:
                async with self._turns.turn(claim):
                    await self._carry_out(operation, event)
        except ControllerError as error:
            self.events.fail(event, str(error))
        except Exception:
            # Whatever it was, whoever asked must learn that nothing will come of it.
            logger.exception("%s %s has failed", event.kind, event.id)
            self.events.fail(event, "the controller has made a mistake, which its log describes")
        finally:
            self._under_way.discard(scope)
            self.events.fail(event, f"{STOPPED}; {MEANWHILE}")
            self._log(event)

    async def _carry_out(self, operation: Operation, event: Event) -> None:
        # What it waited for may have changed what there is to do.
        plan = operation.plan()
        event.num_tokens, event.chunks = plan.num_tokens, plan.chunks
        self.events.start(event)
        if not plan.void:
            await operation.carry_out(
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
        outcome = event.error or event.result.reason or "all of it"
        logger.log(
            level,
            "%s %s %s: %d of %d chunks, %d bytes (%s)",
            event.kind,
            event.id,
            event.state,
            event.result.chunks,
            event.chunks,
            event.result.bytes,
            outcome,
        )


def _by_tier(member: Member, most: dict[int, int]) -> dict[str, int]:
    return {
        tier.name: most[place]
        for place, tier in zip(member.places, member.hello.tiers, strict=True)
        if most.get(place)
    }
