"""What the controller can be asked over HTTP, call by call."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query
from starlette.responses import Response

from kvtier.controller import answers
from kvtier.controller.api import (
    LONGEST_WAIT_SECONDS,
    MOST_EVENTS,
    Accepted,
    ClearBody,
    EventAnswer,
    EventsAnswer,
    InstancesAnswer,
    InstanceWithHistory,
    LookUpAnswer,
    LookUpBody,
    MoveBody,
    PinBody,
    PrefetchBody,
    PromptBody,
    UnpinBody,
)
from kvtier.controller.bodies import Bodies, described
from kvtier.controller.events import Event
from kvtier.controller.metrics import ControllerMetrics
from kvtier.controller.operations import Operations
from kvtier.controller.prompts import Asked
from kvtier.controller.stream import Reader, Stream

DO, KNOW, HAPPEN = "Operations", "What is known", "What happens"


def add_operations(router: APIRouter, operations: Operations, bodies: Bodies) -> None:
    """What changes something, and the look-up that mostly comes before."""
    look_up_body, move_body = Depends(bodies.of(LookUpBody)), Depends(bodies.of(MoveBody))
    prefetch_body, clear_body = Depends(bodies.of(PrefetchBody)), Depends(bodies.of(ClearBody))
    pin_body, unpin_body = Depends(bodies.of(PinBody)), Depends(bodies.of(UnpinBody))

    @router.post("/lookup", tags=[DO], openapi_extra=described(LookUpBody))
    async def lookup(body: LookUpBody = look_up_body) -> LookUpAnswer:
        """How many leading tokens of a prompt each tier of each instance holds."""
        found = await operations.look_up(_asked(body))
        return LookUpAnswer(model=found.model, num_tokens=found.num_tokens, instances=found.instances)

    @router.post("/move", tags=[DO], openapi_extra=described(MoveBody))
    async def move(body: MoveBody = move_body) -> Accepted:
        """Move a prompt's chunks from one tier to another, of one instance or of two.

        A chunk is removed from its old position only after the new one has confirmed it. What is at the new
        position already is not moved again, so that the same move may be asked for again at any time.
        """
        return _accepted(
            await operations.move(body.old_position, body.new_position, _asked(body), copy=body.copy_)
        )

    @router.post("/prefetch", tags=[DO], openapi_extra=described(PrefetchBody))
    async def prefetch(body: PrefetchBody = prefetch_body) -> Accepted:
        """Bring a prompt's chunks into a tier before they are asked for.

        From the other tiers of the instance where they are, and else from the instance that holds most.
        """
        place = body.instance, body.tier
        return _accepted(await operations.prefetch(place, _asked(body), seconds=body.deadline))

    @router.post("/pin", tags=[DO], openapi_extra=described(PinBody))
    async def pin(body: PinBody = pin_body) -> Accepted:
        """Keep what a tier holds of a prompt from being evicted, also when the instance is restarted.

        What is moved away or cleared is not pinned any longer.
        """
        place = body.instance, body.tier
        return _accepted(await operations.pin(place, _asked(body), seconds=body.ttl))

    @router.post("/unpin", tags=[DO], openapi_extra=described(UnpinBody))
    async def unpin(body: UnpinBody = unpin_body) -> Accepted:
        """Let a prompt's chunks be evicted again."""
        return _accepted(await operations.unpin((body.instance, body.tier), _asked(body)))

    @router.post("/clear", tags=[DO], openapi_extra=described(ClearBody))
    async def clear(body: ClearBody = clear_body) -> Accepted:
        """Remove a prompt's chunks, or everything, from one tier of an instance or from all.

        The event tells how many chunks and bytes have gone.
        """
        everything = body.tokens is None and body.prompt is None
        asked = None if everything else _asked(body)
        return _accepted(await operations.clear((body.instance, body.tier), asked))


def add_knowledge(router: APIRouter, operations: Operations) -> None:
    """What can be asked without changing anything."""
    registry, log = operations.registry, operations.events
    metrics = ControllerMetrics(operations)

    @router.get("/events", tags=[KNOW])
    async def events(limit: Annotated[int, Query(ge=1, le=MOST_EVENTS)] = 100) -> EventsAnswer:
        """The events that were asked for last, the newest first."""
        return EventsAnswer(events=[answers.of_event(event) for event in log.newest(limit)])

    @router.get("/events/{event_id}", tags=[KNOW])
    async def event(
        event_id: str,
        wait: Annotated[
            float, Query(ge=0, description="Answer when it has ended, or after so many seconds.")
        ] = 0,
    ) -> EventAnswer:
        """One event. Events are kept for a while after their end."""
        found = log.find(event_id)
        if wait:
            await log.wait(found, min(wait, LONGEST_WAIT_SECONDS))
        return answers.of_event(found)

    @router.get("/instances", tags=[KNOW])
    async def instances() -> InstancesAnswer:
        """All instances that are registered, their tiers and their fill."""
        return answers.of_registry(registry)

    @router.get("/instances/{instance}", tags=[KNOW])
    async def one_instance(instance: str) -> InstanceWithHistory:
        """One instance, and how it was over the last hour."""
        member = registry.find(instance)
        return answers.with_history(member, registry.history(member))

    @router.get("/metrics", tags=[KNOW], response_class=Response)
    async def prometheus() -> Response:
        """What Prometheus reads: instances, chunks, events and look-ups."""
        return metrics.answer()


def add_stream(router: APIRouter, stream: Stream) -> None:
    """What is told without being asked for."""

    @router.get("/stream", tags=[HAPPEN], response_class=Response)
    async def changes() -> Response:
        """Server-sent events: `instances`, the list of all, and `event`, an event that has changed."""
        if stream.full:
            raise HTTPException(503, "too many are reading the stream already")
        return Reader(stream)


def _asked(body: PromptBody) -> Asked:
    return Asked(body.tokens, body.prompt, body.model, body.salt or "")


def _accepted(event: Event) -> Accepted:
    return Accepted(event_id=event.id, num_tokens=event.num_tokens)
