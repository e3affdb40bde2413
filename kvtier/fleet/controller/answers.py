"""What the controller answers: the models of its responses, and their values.

The command line imports the models, so what only the controller needs is imported for type checking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec.structs import asdict
from pydantic import BaseModel, Field

from kvtier.fleet.controller.events import Event
from kvtier.fleet.member.protocol import TierState
from kvtier.fleet.member.served_models import Described, disagreements, listed
from kvtier.logs import Finding
from kvtier.memory.keys import ChunkKey
from kvtier.observability.whatif.report import Report
from kvtier.observability.whatif.sentences import NOTHING_REPORTED, basis, findings

if TYPE_CHECKING:
    from kvtier.fleet.controller.member import Member
    from kvtier.fleet.controller.pins import Pins

_UNKNOWN = TierState(used=0, chunks=0, available=True, found=0)
"""The state reported before the first heartbeat."""


class LookupAnswer(BaseModel):
    """The tiers that hold a prefix of the prompt."""

    model: str = Field(description="The model's name, as served by its engine.")
    num_tokens: int = Field(description="Length of the whole prompt in tokens.", examples=[1200])
    instances: dict[str, dict[str, int]] = Field(
        description="Number of leading tokens held, by instance and tier. Tiers without any are omitted.",
        examples=[{"instance-1": {"cpu": 1024, "disk": 768}}],
    )


class Accepted(BaseModel):
    """The operation was accepted. `GET /events/{event_id}` returns its progress and result."""

    event_id: str = Field(examples=["9f86d081884c7d65"])
    num_tokens: int = Field(
        description=(
            "Number of tokens whose chunks are affected. 0 if no chunk is held, and for a clear without a "
            "prompt, which counts chunks only."
        ),
        examples=[1024],
    )


class EventsAnswer(BaseModel):
    """Events, newest first."""

    events: list[Event]


class TierAnswer(BaseModel):
    """One tier of an instance. Sizes are in bytes; `found` starts at zero with the instance."""

    name: str
    type: str
    capacity: int | None = Field(description="`null` for a shared pool, whose capacity is not known here.")
    used: int
    chunks: int
    available: bool = Field(description="`false` while its circuit breaker is open.")
    shared: bool = Field(description="Whether it is a pool that other instances write to as well.")
    found: int = Field(description="Chunks that lookups found in it.")
    hit_rate: float | None = Field(
        default=None,
        description="Its part of the hit rate of the instance: tokens hit in it, of the same lookups.",
    )


class InstanceAnswer(BaseModel):
    """One registered instance. Times are Unix timestamps in seconds."""

    instance: str = Field(examples=["instance-1"])
    state: str = Field(examples=["connected"])
    version: str = Field(description="Its kvtier version.")
    host: str
    process: int
    peer: str | None = Field(
        description="The address at which other instances reach it.", examples=["10.0.0.2:8200"]
    )
    transport: str | None
    registered_at: float
    last_heartbeat: float | None
    up_to_date: bool = Field(description="Whether the controller's index of its chunks is up to date.")
    models: list[str] = Field(description="All names of the models that its engines serve.")
    engines: list[str]
    tiers: list[TierAnswer]
    looked_up_tokens: int = Field(
        default=0, description="Tokens that its engines have looked up in the last 5 minutes."
    )
    hit_rate: float | None = Field(
        description="The fraction of these that was found, from 0 to 1. `null` without a lookup."
    )
    pinned: int = Field(default=0, description="Chunks pinned by `POST /pin`, once for each pin.")
    what_if_at: float | None = Field(
        default=None,
        description="When it last reported what other settings would bring. `null` before that.",
    )


@dataclass(frozen=True, slots=True)
class TierSample:
    """A tier at one point in time."""

    used: int


@dataclass(frozen=True, slots=True)
class Sample:
    """An instance at one point in time."""

    time: float
    hit_rate: Annotated[float | None, Field(description="Of the 5 minutes before.")]
    tiers: Sequence[TierSample]


class InstanceWithHistory(InstanceAnswer):
    """One instance with its history: one sample every 10 seconds for the last hour.

    There are none of the time in which it was not connected.
    """

    history: list[Sample]


class WhatIfAnswer(BaseModel):
    """What other capacities and policies would bring to an instance."""

    what_if_at: float | None = Field(description="When it has reported this. `null` if it has not.")
    basis: list[str] = Field(description="What the estimate is based on, in sentences.")
    findings: list[str] = Field(
        description="What could be changed, in sentences, the most useful first.",
        examples=[["+50GiB of ram: +7.0 points, saves 31 GPU minutes a day"]],
    )
    report: Report | None


class FindingsAnswer(BaseModel):
    """What keeps instances from sharing chunks, and what to do."""

    findings: list[Finding]


class InstancesAnswer(BaseModel):
    """All registered instances, sorted by id."""

    instances: list[InstanceAnswer]


class PinAnswer(BaseModel):
    """Chunks that were pinned by one operation. Times are Unix timestamps in seconds."""

    instance: str = Field(examples=["instance-1"])
    chunks: int
    held: int = Field(description="Of these, the leading chunks that the instance holds now.")
    pinned_at: float
    until: float | None = Field(description="Its end. `null` for a pin until it is unpinned.")


class PinsAnswer(BaseModel):
    """Pins, newest first."""

    pins: list[PinAnswer]
    total: int = Field(description="Number of pins, of which `limit` are listed.")


class Health(BaseModel):
    """Liveness of the controller."""

    status: str = Field(examples=["ok"])
    version: str
    instances: int = Field(description="Number of registered instances.")


class Problem(BaseModel):
    """An error response."""

    detail: str = Field(description="The reason, in one sentence.")
    known: list[str] = Field(default=[], description="The known names, if an unknown one was given.")


def of_members(members: Iterable[Member], pins: Pins) -> InstancesAnswer:
    """Return the response model of all instances, sorted by id."""
    ordered = sorted(members, key=lambda member: member.id)
    return InstancesAnswer(instances=[of_member(member, pins) for member in ordered])


def findings_of(members: Iterable[Member]) -> list[Finding]:
    """Return how instances differ: in their version, and in the KV of engines that serve the same model."""
    members = list(members)
    versions: dict[str, list[str]] = {}
    for member in members:
        versions.setdefault(member.hello.kvtier, []).append(member.id)
    groups = [f"{version} on {listed(ids)}" for version, ids in versions.items()]
    remedy = "install the same version of kvtier on all hosts, and restart cache processes and engines"
    served = [
        Described(f"instance {member.id}", model.names, model.namespace, model.layout, model.facts)
        for member in members
        for model in member.models
    ]
    different = [Finding(f"kvtier {', '.join(groups)}", remedy)] if len(groups) > 1 else []
    return [*different, *disagreements(served)]


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


def of_pins(
    pins: Pins, instance: str | None, limit: int, held: Callable[[str, Sequence[ChunkKey]], int]
) -> PinsAnswer:
    """Return the response model of the pins of an instance, or of all.

    ``held`` returns how many leading chunks an instance holds.
    """
    newest = pins.newest(instance)
    listed = [
        PinAnswer(
            instance=owner,
            chunks=len(pin.keys),
            held=held(owner, pin.keys),
            pinned_at=pin.given_at,
            until=None if math.isinf(pin.until) else pin.until,
        )
        for owner, pin in newest[:limit]
    ]
    return PinsAnswer(pins=listed, total=len(newest))


def what_if(member: Member) -> WhatIfAnswer:
    """Return the response model of what other settings would bring to an instance."""
    report = member.what_if
    if report is None:
        return WhatIfAnswer(what_if_at=None, basis=[NOTHING_REPORTED], findings=[], report=None)
    return WhatIfAnswer(
        what_if_at=member.what_if_at,
        basis=basis(report),
        findings=findings(report),
        report=report,
    )


def with_history(member: Member, pins: Pins, samples: Sequence[Sample]) -> InstanceWithHistory:
    """Return the response model of an instance, with its history."""
    return InstanceWithHistory.model_validate({**dict(of_member(member, pins)), "history": samples})
