"""What the controller answers: the models of its responses, and their values.

The command line imports the models, so what only the controller needs is imported for type checking.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec.structs import asdict
from pydantic import BaseModel, Field

from kvtier.fleet.controller.events import Event
from kvtier.fleet.controller.settings import WINDOW_SECONDS, Span
from kvtier.fleet.member.protocol import TierState
from kvtier.fleet.member.served_models import Described, disagreements, listed
from kvtier.logs import Finding
from kvtier.memory.keys import ChunkKey
from kvtier.observability.whatif.report import Report
from kvtier.observability.whatif.sentences import (
    MIN_SAMPLED,
    NOTHING_REPORTED,
    basis,
    findings,
    sentence,
    worthwhile,
)

if TYPE_CHECKING:
    from kvtier.fleet.controller.member import Member
    from kvtier.fleet.controller.pins import Pins

GONE_SECONDS = 3600.0
"""For how long an instance that has disconnected is listed."""
WORKING = ("connected", "connecting")
"""States of a peer that is not down."""
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
    outages: int = Field(default=0, description="How often its circuit breaker opened.")
    corrupt: int = Field(default=0, description="Corrupt chunks found in it.")
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
    outages: int = Field(default=0, description="Of all tiers, in the last 5 minutes.")
    corrupt: int = Field(default=0, description="Corrupt chunks found in the last 5 minutes.")
    failed: int = Field(default=0, description="Chunks whose transfer has failed in the last 5 minutes.")
    peers: int = Field(default=0, description="Instances from which it fetches chunks.")
    peers_down: int = Field(default=0, description="Of these, those that it cannot reach.")
    pinned: int = Field(default=0, description="Chunks pinned by `POST /pin`, once for each pin.")
    what_if_at: float | None = Field(
        default=None, description="When it last reported what other settings would bring. `null` before that."
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


Counts = dict[str, int]


@dataclass(slots=True)
class HistorySample:
    """What happened within some time. Token and byte counts are of this time, gauges of its end."""

    __pydantic_config__: ClassVar = {"use_attribute_docstrings": True}
    # In the order in which they are stored, the gauges last: see kvtier.fleet.controller.history.
    time: float = 0.0
    """Its end, a Unix timestamp."""
    seconds: float = 0.0
    """How much of it was observed."""
    looked_up_tokens: int = 0
    hit_tokens: Counts = field(default_factory=dict)
    """By tier. `any` for a model and a tenant."""
    missed_tokens: Counts = field(default_factory=dict)
    """By reason, as far as it is reported."""
    saved_seconds: float = 0.0
    """Prefill that hits have saved, as far as engines know their speed."""
    gpu_seconds: float = 0.0
    """The same, multiplied by the ranks of each model."""
    moved_bytes: Counts = field(default_factory=dict)
    """By `source → target`."""
    outages: int = 0
    corrupt: int = 0
    """Corrupt chunks found."""
    failed: int = 0
    """Chunks whose transfer has failed."""
    instances: int = 0
    used_bytes: Counts = field(default_factory=dict)
    """By tier, without shared pools."""
    capacity_bytes: Counts = field(default_factory=dict)


class HistoryAnswer(BaseModel):
    """Samples of one span, by name, oldest first. There is none of a time in which nothing was connected."""

    span: Span
    step: int = Field(description="Seconds between two samples.")
    history: dict[str, list[HistorySample]] = Field(
        description="By model, tenant or instance; of the whole fleet, the name is empty."
    )


class PeerAnswer(BaseModel):
    """A peer from which an instance fetches chunks."""

    instance: str = Field(examples=["instance-1"])
    address: str = Field(examples=["10.0.0.2:8200"])
    peer: str = Field(description="The instance there. Empty if it is not known.")
    state: str = Field(examples=["connected"])
    read_bytes: int = Field(description="Fetched since the instance started.")
    bytes_per_second: float | None = Field(description="Measured by the latest reads.")


class PeersAnswer(BaseModel):
    """Connections between instances: first those that are not connected, then those with the most bytes."""

    peers: list[PeerAnswer]
    total: int = Field(description="Number of connections, of which `limit` are listed.")


class Improvement(BaseModel):
    """What could be changed at one instance."""

    instance: str
    change: str = Field(examples=["+50GiB of ram: +7.0 points, saves 31 GPU minutes a day"])
    gpu_seconds_a_day: float | None


class ImprovementsAnswer(BaseModel):
    """What could be changed, the most useful first."""

    improvements: list[Improvement]
    estimating: int = Field(description="Number of instances that have reported an estimate.")


class WhyAnswer(BaseModel):
    """What became of the last requests of all instances, and where prompts part."""

    requests: list[dict[str, Any]] = Field(
        description="The newest first: what each has loaded, and its `misses` in prefix order."
    )
    breakers: list[dict[str, Any]] = Field(
        description="Where prompts that begin alike part, the most expensive place first."
    )
    unanswered: dict[str, str] = Field(description="Why instances have not answered.")


class WhyPromptAnswer(BaseModel):
    """What is held of a prompt now at each instance that serves its model, the most first."""

    prompts: list[dict[str, Any]] = Field(
        description="`hits`: tier and tokens of each run of its prefix; `misses`: why the rest is not held."
    )
    unanswered: dict[str, str] = Field(description="Why instances have not answered.")


class About(BaseModel):
    """The controller itself."""

    version: str
    grafana: str | None = Field(description="Address of the Grafana dashboard, if it was given.")


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


class GoneAnswer(BaseModel):
    """An instance that has disconnected, and not returned."""

    instance: str
    host: str
    disconnected_at: float
    reason: str = Field(description="Why its connection has ended.")


class InstancesAnswer(BaseModel):
    """All registered instances, sorted by id."""

    instances: list[InstanceAnswer]
    gone: list[GoneAnswer] = Field(
        default=[], description="Instances that have disconnected within an hour, the latest one last."
    )


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
    leads: bool = Field(
        default=True, description="Whether it executes operations, or forwards them to the one that does."
    )


class Problem(BaseModel):
    """An error response."""

    detail: str = Field(description="The reason, in one sentence.")
    known: list[str] = Field(default=[], description="The known names, if an unknown one was given.")


def of_members(members: Iterable[Member], gone: Iterable[GoneAnswer], pins: Pins) -> InstancesAnswer:
    """Return the response model of all instances, sorted by id."""
    ordered = sorted(members, key=lambda member: member.id)
    since = time.time() - GONE_SECONDS
    return InstancesAnswer(
        instances=[of_member(member, pins) for member in ordered],
        gone=[left for left in gone if left.disconnected_at > since],
    )


def findings_of(members: Iterable[Member]) -> list[Finding]:
    """Return how instances differ: in their version, and in the KV of engines that serve the same model."""
    members = list(members)
    versions: dict[str, list[str]] = {}
    for member in members:
        versions.setdefault(member.hello.kvtier, []).append(member.id)
    groups = [f"{version} on {listed(ids)}" for version, ids in versions.items()]
    remedy = "install the same version of kvtier on all hosts, and restart cache processes and engines"
    served = [
        Described(f"engines of {member.id}", model.names, model.namespace, model.layout, model.facts)
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
    counters, nothing = member.counters, [0] * len(states)
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
            TierAnswer(
                **asdict(tier), **asdict(state), hit_rate=hits.share(tokens), outages=outage, corrupt=damaged
            )
            for tier, state, tokens, outage, damaged in zip(
                hello.tiers,
                states,
                hits.by_tier or nothing,
                counters.outages or nothing,
                counters.corrupt or nothing,
                strict=True,
            )
        ],
        looked_up_tokens=hits.looked_up,
        hit_rate=hits.rate,
        **hits.faults._asdict(),
        peers=len(counters.peers),
        peers_down=sum(peer.state not in WORKING for peer in counters.peers),
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
        what_if_at=member.what_if_at, basis=basis(report), findings=findings(report), report=report
    )


def with_history(member: Member, pins: Pins, samples: Sequence[HistorySample]) -> InstanceWithHistory:
    """Return the response model of an instance, with its history: its samples of an hour, oldest first."""
    history, window = [], deque[HistorySample]()
    for sample in samples:
        window.append(sample)
        while window[0].time <= sample.time - WINDOW_SECONDS:
            window.popleft()
        asked = sum(each.looked_up_tokens for each in window)
        found = sum(sum(each.hit_tokens.values()) for each in window)
        used = [TierSample(sample.used_bytes.get(tier.name, 0)) for tier in member.hello.tiers]
        history.append(Sample(sample.time, min(1.0, found / asked) if asked else None, used))
    return InstanceWithHistory.model_validate({**dict(of_member(member, pins)), "history": history})


def of_peers(connected: Iterable[Member], members: Iterable[Member], limit: int) -> PeersAnswer:
    """Return the response model of the connections over which these instances fetch, from any connected."""
    names = {member.hello.peer: member.id for member in connected}
    found = [
        PeerAnswer(
            **{**asdict(peer), "instance": member.id, "peer": names.get(peer.address) or peer.instance}
        )
        for member in members
        for peer in member.counters.peers
    ]
    found.sort(key=lambda peer: (peer.state in WORKING, -peer.read_bytes))
    return PeersAnswer(peers=found[:limit], total=len(found))


def of_improvements(members: Iterable[Member], limit: int) -> ImprovementsAnswer:
    """Return the response model of what could be changed at all instances."""
    estimates = [(member.id, member.what_if) for member in members if member.what_if is not None]
    found = [
        Improvement(
            instance=name, change=sentence(change, report), gpu_seconds_a_day=change.gpu_seconds_a_day
        )
        for name, report in estimates
        if report.sampled >= MIN_SAMPLED
        for change in worthwhile(report)
    ]
    found.sort(key=lambda each: -(each.gpu_seconds_a_day or 0.0))
    return ImprovementsAnswer(improvements=found[:limit], estimating=len(estimates))
