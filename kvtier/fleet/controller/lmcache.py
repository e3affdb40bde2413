"""Requests of LMCache's controller: other names for fields and tiers, and an endpoint of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Depends
from msgspec.structs import replace
from pydantic import Field

from kvtier.fleet.controller.answers import LookupAnswer
from kvtier.fleet.controller.bodies import (
    Bodies,
    ClearBody,
    MoveBody,
    Name,
    PromptBody,
    TierBody,
    request_body_schema,
)
from kvtier.fleet.controller.operations import Operations
from kvtier.fleet.controller.registry import Registry

FIELDS = {"instance_id": "instance", "location": "tier", "should_copy": "copy"}
LOCATIONS = {"LocalCPUBackend": ("cpu", "hugepage"), "LocalDiskBackend": ("disk",)}
"""Types of the tiers that its backends are."""
TAG = "LMCache"
BodyT = TypeVar("BodyT", bound=PromptBody)


class Layout(LookupAnswer):
    """The answer to a lookup, for clients of either controller."""

    event_id: str = Field(default="", description="For clients of LMCache. A lookup is no event.")
    layout_info: dict[str, tuple[str, int]] = Field(
        description="For clients of LMCache: the tier of each instance that holds most, and how many tokens."
    )


class EventBody(PromptBody, frozen=True, kw_only=True):
    """Ask for the state of an event."""

    event_id: Annotated[Name, msgspec.Meta(description="What a response has named.")]
    _prompt_optional = True


def decoder(kind: type[BodyT]) -> Callable[[bytes | bytearray], BodyT]:
    """Return what decodes a body, also one with the names that LMCache has for the fields."""
    own = msgspec.json.Decoder(kind).decode

    def decode(content: bytes | bytearray) -> BodyT:
        try:
            return own(content)
        except msgspec.ValidationError:
            fields = msgspec.json.decode(content)
            if not isinstance(fields, dict) or fields.keys().isdisjoint(FIELDS):
                raise
            return msgspec.convert({FIELDS.get(name, name): value for name, value in fields.items()}, kind)

    return decode


def with_tiers(registry: Registry, body: BodyT) -> BodyT:
    """Return the body with the fastest tiers that LMCache's backends are in place of their names."""

    def named(instance: str, location: str) -> tuple[str, str]:
        tiers = registry.find(instance).hello.tiers
        found = [tier.name for tier in tiers if tier.type in LOCATIONS.get(location, ())]
        return instance, found[0] if found else location

    if isinstance(body, MoveBody):
        return replace(body, old_position=named(*body.old_position), new_position=named(*body.new_position))
    if isinstance(body, TierBody | ClearBody) and body.tier is not None:
        return replace(body, tier=named(body.instance, body.tier)[1])
    return body


def layout_of(registry: Registry, found: LookupAnswer) -> Layout:
    """Return the answer to a lookup with what clients of LMCache read."""
    names = {kind: location for location, kinds in LOCATIONS.items() for kind in kinds}
    layout = {}
    for instance, tokens in found.instances.items():
        tier, count = max(tokens.items(), key=lambda item: item[1])
        kind = next(held.type for held in registry.find(instance).hello.tiers if held.name == tier)
        layout[instance] = (names.get(kind, tier), count)
    return Layout(**found.model_dump(), layout_info=layout)


def add_route(router: APIRouter, operations: Operations, bodies: Bodies) -> None:
    """Add the endpoint that only LMCache's controller has."""
    event_body = Depends(bodies.of(EventBody))

    @router.post("/check_finish", tags=[TAG], openapi_extra=request_body_schema(EventBody))
    async def check_finish(body: EventBody = event_body) -> dict[str, str]:
        """Return the state of an event, as `GET /events/{event_id}` does."""
        return {"status": operations.events.find(body.event_id).state}
