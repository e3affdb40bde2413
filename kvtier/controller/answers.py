"""Conversion of the controller's state into HTTP response models."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import asdict

from kvtier.agent.protocol import TierState
from kvtier.controller.api import (
    EventAnswer,
    InstanceAnswer,
    InstancesAnswer,
    InstanceWithHistory,
    TierAnswer,
    WhatIfAnswer,
    WhatIfReport,
)
from kvtier.controller.events import Event
from kvtier.controller.history import Sample
from kvtier.controller.member import Member
from kvtier.controller.registry import Registry
from kvtier.whatif.sentences import NOTHING_REPORTED, basis, findings

_UNKNOWN = TierState(used=0, chunks=0, available=True, found=0)
"""The state reported before the first heartbeat."""


def of_event(event: Event) -> EventAnswer:
    """Return the response model of an event."""
    return EventAnswer.model_validate({"event_id": event.id, **asdict(event)})


def of_registry(registry: Registry) -> InstancesAnswer:
    """Return the response model of all instances, sorted by id."""
    members = sorted(registry.members.values(), key=lambda member: member.id)
    return InstancesAnswer(instances=[of_member(member) for member in members])


def of_member(member: Member) -> InstanceAnswer:
    """Return the response model of an instance."""
    hello, heartbeat = member.hello, member.heartbeat
    # check_heartbeat() guarantees one state per tier.
    states = heartbeat.tiers if heartbeat is not None else [_UNKNOWN] * len(hello.tiers)
    looked_up = heartbeat.looked_up if heartbeat is not None else 0
    found = sum(state.found for state in states)
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
            TierAnswer(**asdict(tier), **asdict(state))
            for tier, state in zip(hello.tiers, states, strict=True)
        ],
        looked_up=looked_up,
        hit_rate=min(1.0, found / looked_up) if looked_up else None,
        what_if_at=member.what_if_at,
    )


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


def with_history(member: Member, samples: Sequence[Sample]) -> InstanceWithHistory:
    """Return the response model of an instance, with its history."""
    return InstanceWithHistory.model_validate({**dict(of_member(member)), "history": samples})
