"""HTTP endpoints of the controller."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query
from starlette.responses import Response

from kvtier.fleet.controller import answers
from kvtier.fleet.controller.api import (
    MAX_EVENTS,
    MAX_WAIT_SECONDS,
    Accepted,
    ClearBody,
    EventAnswer,
    EventsAnswer,
    InstancesAnswer,
    InstanceWithHistory,
    LookupAnswer,
    LookupBody,
    MoveBody,
    PinBody,
    PinsAnswer,
    PrefetchBody,
    PromptBody,
    UnpinBody,
    WhatIfAnswer,
)
from kvtier.fleet.controller.bodies import Bodies, request_body_schema
from kvtier.fleet.controller.events import Event
from kvtier.fleet.controller.metrics import ControllerMetrics
from kvtier.fleet.controller.operations import Operations
from kvtier.fleet.controller.prompts import PromptQuery
from kvtier.fleet.controller.stream import Reader, Stream

OPERATIONS_TAG, STATE_TAG, STREAM_TAG = "Operations", "State", "Stream"


def add_operations(router: APIRouter, operations: Operations, bodies: Bodies) -> None:
    """Add the endpoints of operations, including lookup."""
    lookup_body, move_body = Depends(bodies.of(LookupBody)), Depends(bodies.of(MoveBody))
    prefetch_body, clear_body = Depends(bodies.of(PrefetchBody)), Depends(bodies.of(ClearBody))
    pin_body, unpin_body = Depends(bodies.of(PinBody)), Depends(bodies.of(UnpinBody))

    @router.post("/lookup", tags=[OPERATIONS_TAG], openapi_extra=request_body_schema(LookupBody))
    async def lookup(body: LookupBody = lookup_body) -> LookupAnswer:
        """Return how many leading tokens of a prompt each tier of each instance holds."""
        return await operations.lookup(_query(body))

    @router.post("/move", tags=[OPERATIONS_TAG], openapi_extra=request_body_schema(MoveBody))
    async def move(body: MoveBody = move_body) -> Accepted:
        """Move a prompt's chunks to another tier, of the same or another instance.

        A chunk is removed from the source only after the target has confirmed it. Chunks that the target
        already holds are not transferred again, so a move can be repeated at any time.
        """
        return _accepted(
            await operations.move(body.old_position, body.new_position, _query(body), copy=body.copy)
        )

    @router.post("/prefetch", tags=[OPERATIONS_TAG], openapi_extra=request_body_schema(PrefetchBody))
    async def prefetch(body: PrefetchBody = prefetch_body) -> Accepted:
        """Prefetch a prompt's chunks into a tier.

        Sources are the instance's other tiers and shared pools, then the instance that holds most.
        """
        target = body.instance, body.tier
        return _accepted(await operations.prefetch(target, _query(body), seconds=body.seconds()))

    @router.post("/pin", tags=[OPERATIONS_TAG], openapi_extra=request_body_schema(PinBody))
    async def pin(body: PinBody = pin_body) -> Accepted:
        """Protect the chunks of a prompt that a tier holds from eviction. Survives restarts of the instance.

        Moving or clearing the last copy that an instance has of a chunk unpins it. `unpinned` in the event's
        result counts these.
        """
        target = body.instance, body.tier
        return _accepted(await operations.pin(target, _query(body), seconds=body.seconds()))

    @router.post("/unpin", tags=[OPERATIONS_TAG], openapi_extra=request_body_schema(UnpinBody))
    async def unpin(body: UnpinBody = unpin_body) -> Accepted:
        """Allow a prompt's chunks to be evicted again."""
        return _accepted(await operations.unpin((body.instance, body.tier), _query(body)))

    @router.post("/clear", tags=[OPERATIONS_TAG], openapi_extra=request_body_schema(ClearBody))
    async def clear(body: ClearBody = clear_body) -> Accepted:
        """Remove a prompt's chunks, or all chunks, from one tier or all tiers of an instance.

        The event's result has the number of chunks and bytes removed.
        """
        everything = body.tokens is None and body.prompt is None
        query = None if everything else _query(body)
        return _accepted(await operations.clear((body.instance, body.tier), query))


def add_queries(router: APIRouter, operations: Operations) -> None:
    """Add the read-only endpoints."""
    registry, log = operations.registry, operations.events
    metrics = ControllerMetrics(operations)

    @router.get("/events", tags=[STATE_TAG])
    async def events(limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = 100) -> EventsAnswer:
        """List the latest events, newest first."""
        return EventsAnswer(events=[answers.of_event(event) for event in log.newest(limit)])

    @router.get("/events/{event_id}", tags=[STATE_TAG])
    async def event(
        event_id: str,
        wait: Annotated[
            float, Query(ge=0, description="Wait until the event has ended, for at most this many seconds.")
        ] = 0,
    ) -> EventAnswer:
        """Return one event. Events are kept for some time after their end."""
        found = log.find(event_id)
        if wait:
            await log.wait(found, min(wait, MAX_WAIT_SECONDS))
        return answers.of_event(found)

    @router.get("/instances", tags=[STATE_TAG])
    async def instances() -> InstancesAnswer:
        """List the registered instances, with the fill of their tiers."""
        return answers.of_registry(registry, operations.pins)

    @router.get("/instances/{instance}", tags=[STATE_TAG])
    async def instance_with_history(instance: str) -> InstanceWithHistory:
        """Return one instance, with its history over the last hour."""
        member = registry.find(instance)
        return answers.with_history(member, operations.pins, registry.history(member))

    @router.get("/pins", tags=[STATE_TAG])
    async def pins(
        instance: str | None = None, limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = 100
    ) -> PinsAnswer:
        """List the pins of an instance, or of all, newest first, also of instances that are disconnected."""
        return answers.of_pins(registry, operations.pins, instance, limit)

    @router.get("/instances/{instance}/whatif", tags=[STATE_TAG])
    async def what_if(instance: str) -> WhatIfAnswer:
        """Return what other capacities and policies of its tiers would bring to an instance.

        It estimates that from its lookups, and reports it every 30 seconds.
        """
        return answers.what_if(registry.find(instance))

    @router.get("/metrics", tags=[STATE_TAG], response_class=Response)
    async def prometheus() -> Response:
        """Return metrics of instances, chunks, events and lookups, in Prometheus' text format."""
        return metrics.answer()


def add_stream(router: APIRouter, stream: Stream) -> None:
    """Add the endpoint that streams changes."""

    @router.get("/stream", tags=[STREAM_TAG], response_class=Response)
    async def changes() -> Response:
        """Stream server-sent events: `instances` with all instances, `event` with a changed event."""
        if stream.full:
            raise HTTPException(503, "too many clients are reading the stream")
        return Reader(stream)


def _query(body: PromptBody) -> PromptQuery:
    return PromptQuery(body.tokens, body.prompt, body.model, body.salt or "")


def _accepted(event: Event) -> Accepted:
    return Accepted(event_id=event.id, num_tokens=event.num_tokens)
