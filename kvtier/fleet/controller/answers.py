"""Conversion of the controller's state into HTTP response models."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import asdict

from kvtier.fleet.controller.api import (
    EventAnswer,
    InstanceAnswer,
    InstancesAnswer,
    InstanceWithHistory,
    PinAnswer,
    PinsAnswer,
    TierAnswer,
    WhatIfAnswer,
    WhatIfReport,
)
from kvtier.fleet.controller.events import Event
from kvtier.fleet.controller.history import Sample
from kvtier.fleet.controller.member import Member
from kvtier.fleet.controller.pins import Pins
from kvtier.fleet.controller.registry import Registry
from kvtier.fleet.member.protocol import TierState
from kvtier.memory.keys import ChunkKey
from kvtier.observability.whatif.sentences import NOTHING_REPORTED, basis, findings

_UNKNOWN = TierState(used=0, chunks=0, available=True, found=0)
"""The state reported before the first heartbeat."""


def of_event(event: Event) -> EventAnswer:
    """Return the response model of an event."""
    return EventAnswer.model_validate({"event_id": event.id, **asdict(event)})


def of_registry(registry: Registry, pins: Pins) -> InstancesAnswer:
    """Return the response model of all instances, sorted by id."""
    members = sorted(registry.members.values(), key=lambda member: member.id)
    return InstancesAnswer(instances=[of_member(member, pins) for member in members])


def of_member(member: Member, pins: Pins) -> InstanceAnswer:
    """Return the response model of an instance."""
    hello, heartbeat = member.hello, member.heartbeat
    # check_heartbeat() guarantees one state per tier.
    states = heartbeat.tiers if heartbeat is not None else [_UNKNOWN] * len(hello.tiers)
    hits = member.hit_window.hits()
    return InstanceAnswer(
        instance=member.id,
        state="connected",
        version=hello.kvtier,
        host=hello.host,
        process=hello.process,
        peer=hello.peer,
        transport=hello.transport,
        registered_at=member.registered_at,
        last_heartbeat=member.last_message_at,
        up_to_date=member.up_to_date,
        models=list(dict.fromkeys(name for model in member.models for name in model.names)),
        engines=list(heartbeat.engines) if heartbeat is not None else [],
        tiers=[
            TierAnswer(**asdict(tier), **asdict(state), hit_rate=hits.share(tokens))
            for tier, state, tokens in zip(
                hello.tiers, states, hits.by_tier or [0] * len(states), strict=True
            )
        ],
        looked_up_tokens=hits.looked_up,
        hit_rate=hits.rate,
        pinned=pins.count(member.id),
        what_if_at=member.what_if_at,
    )


def of_pins(registry: Registry, pins: Pins, instance: str | None, limit: int) -> PinsAnswer:
    """Return the response model of the pins of an instance, or of all."""
    newest = pins.newest(instance)
    listed = [
        PinAnswer(
            instance=owner,
            chunks=len(pin.keys),
            held=_leading_held(registry, owner, pin.keys),
            pinned_at=pin.given_at,
            until=None if math.isinf(pin.until) else pin.until,
        )
        for owner, pin in newest[:limit]
    ]
    return PinsAnswer(pins=listed, total=len(newest))


def _leading_held(registry: Registry, instance: str, keys: Sequence[ChunkKey]) -> int:
    member = registry.members.get(instance)
    if member is None:
        return 0
    return registry.holders.prefixes_of(dict.fromkeys(member.places, instance), keys).get(instance, 0)


def what_if(member: Member) -> WhatIfAnswer:
    """Return the response model of what other settings would bring to an instance."""
    report = member.what_if
    if report is None:
        return WhatIfAnswer(what_if_at=None, basis=[NOTHING_REPORTED], findings=[], report=None)
    return WhatIfAnswer(
        what_if_at=member.what_if_at,
        basis=basis(report),
        findings=findings(report),
        report=WhatIfReport.model_validate(report),
    )


def with_history(member: Member, pins: Pins, samples: Sequence[Sample]) -> InstanceWithHistory:
    """Return the response model of an instance, with its history."""
    return InstanceWithHistory.model_validate({**dict(of_member(member, pins)), "history": samples})
