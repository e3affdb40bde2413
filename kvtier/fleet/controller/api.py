"""HTTP request and response models of the controller, and their limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta
from pydantic import BaseModel, ConfigDict, Field

from kvtier.fleet.controller.events import EventState, Kind
from kvtier.units import Duration, parse_duration

MAX_TOKENS = 4_000_000
MAX_PROMPT_BYTES = (4 << 20) - 4096
"""The text is sent to the tokenizing instance in one message, which is limited to 4 MiB."""
MAX_NAME_CHARACTERS = 1024
MAX_WAIT_SECONDS = 60.0
MAX_EVENTS = 1000
"""Per response."""

_TOKENS = [128000, 849, 21435, 279, 26431]

TokenID = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
PositionBody = tuple[Name, Name]
_Duration = float | str | None
_DURATION = Duration.__metadata__[-1].json_schema  # type: ignore[attr-defined]


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all request bodies: decoding stops at the first error, also of unknown fields."""


class PromptBody(_Body, frozen=True, kw_only=True):
    """A prompt, given as token ids or as text."""

    tokens: Annotated[
        Annotated[Sequence[TokenID], Meta(max_length=MAX_TOKENS)] | None,
        Meta(
            description=f"The prompt's token ids, at most {MAX_TOKENS:,}. Required unless `prompt` is set.",
            examples=[_TOKENS],
        ),
    ] = None
    prompt: Annotated[
        str | None,
        Meta(
            description=(
                f"The prompt as text, at most {MAX_PROMPT_BYTES:,} bytes. An instance that serves the model "
                "tokenizes it. Chat templates are not applied."
            ),
            examples=["Explain the significance of KV cache in language models."],
        ),
    ] = None
    model: Annotated[
        Name | None,
        Meta(
            description=(
                "The model's name, as in requests to the engine. Default: the only model that the named "
                "instance serves, or else the only model of all instances."
            ),
            examples=["meta-llama/Llama-3.1-8B-Instruct"],
        ),
    ] = None
    salt: Annotated[
        Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)] | None,
        Meta(
            description="The `cache_salt` of the requests, if any. Chunks of different salts are separate.",
            examples=["tenant-1"],
        ),
    ] = None
    _prompt_optional: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.tokens is None and self.prompt is None and not self._prompt_optional:
            raise ValueError("set `tokens` or `prompt`")
        if self.tokens is not None and self.prompt is not None:
            raise ValueError("set `tokens` or `prompt`, not both")
        if self.prompt is not None and len(self.prompt.encode()) > MAX_PROMPT_BYTES:
            raise ValueError(f"`prompt` is longer than {MAX_PROMPT_BYTES:,} bytes: send `tokens` instead")


class LookupBody(PromptBody, frozen=True, kw_only=True):
    """Find the tiers that hold a prefix of a prompt."""


class MoveBody(PromptBody, frozen=True, kw_only=True):
    """Move a prompt's chunks to another tier, of the same or another instance."""

    old_position: Annotated[
        PositionBody,
        Meta(
            description="The source: an instance and the name or type of one of its tiers.",
            examples=[["instance-1", "cpu"]],
        ),
    ]
    new_position: Annotated[
        PositionBody,
        Meta(
            description="The target: an instance and the name or type of one of its tiers.",
            examples=[["instance-2", "cpu"]],
        ),
    ]
    copy: Annotated[
        bool,
        Meta(
            description=(
                "Keep the chunks at the source. By default, each is removed from the source once the target "
                "has confirmed it."
            )
        ),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.old_position == self.new_position:
            raise ValueError("`old_position` and `new_position` are the same")


class _TierBody(PromptBody, frozen=True, kw_only=True):
    instance: Annotated[
        Name, Meta(description="The instance's `controller.instance_id`.", examples=["instance-1"])
    ]
    tier: Annotated[
        Name,
        Meta(
            description="The name of one of its tiers, or a type that only one of its tiers has.",
            examples=["cpu"],
        ),
    ]


class _TimedBody(_TierBody, frozen=True, kw_only=True):
    _timed: ClassVar[str]
    """The field that is a duration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seconds()

    def seconds(self) -> float | None:
        """Return the duration in seconds. Raises ``ValueError``, while the body is decoded."""
        return _positive(self._timed, getattr(self, self._timed))


class PrefetchBody(_TimedBody, frozen=True, kw_only=True):
    """Prefetch a prompt's chunks into a tier: from other tiers, shared pools or another instance."""

    deadline: Annotated[
        _Duration,
        Meta(
            description="Maximum duration. Chunks that have arrived by then stay. Default: unlimited.",
            examples=["5s"],
            extra_json_schema=_DURATION,
        ),
    ] = None
    _timed: ClassVar[str] = "deadline"


class PinBody(_TimedBody, frozen=True, kw_only=True):
    """Protect a prompt's chunks from eviction."""

    ttl: Annotated[
        _Duration,
        Meta(
            description="Duration of the pin. Default: until it is unpinned.",
            examples=["10m"],
            extra_json_schema=_DURATION,
        ),
    ] = None
    _timed: ClassVar[str] = "ttl"


class UnpinBody(_TierBody, frozen=True, kw_only=True):
    """Allow a prompt's chunks to be evicted again."""


class ClearBody(PromptBody, frozen=True, kw_only=True):
    """Remove a prompt's chunks, or all chunks, from one tier or all tiers of an instance."""

    instance: Annotated[
        Name, Meta(description="The instance's `controller.instance_id`.", examples=["instance-1"])
    ]
    tier: Annotated[
        Name | None,
        Meta(
            description="The name or type of the tier to clear. Default: all tiers of the instance.",
            examples=["cpu"],
        ),
    ] = None
    _prompt_optional: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens is None and self.prompt is None and (self.model or self.salt):
            raise ValueError("`model` and `salt` require a prompt: set `tokens` or `prompt` as well")


def _positive(name: str, value: float | str | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not seconds:
        raise ValueError(f"{name}: it must be greater than 0")
    return seconds


class _Answer(BaseModel):
    model_config = ConfigDict(from_attributes=True)


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


class ResultAnswer(_Answer):
    """The result of an event."""

    tokens: int = Field(description="Tokens of the chunks that were processed.")
    chunks: int = Field(description="Chunks that were moved, copied, fetched, pinned, unpinned or removed.")
    bytes: int = Field(description="Bytes transferred, or freed by a clear.")
    removed: int = Field(description="Chunks removed: from the source of a move, or by a clear.")
    unpinned: int = Field(
        default=0,
        description="Pinned chunks that are not pinned any more: unpinned, moved away or cleared.",
    )
    reason: str | None = Field(description="Why fewer chunks were processed than requested.")


class EventAnswer(BaseModel):
    """One operation. Times are Unix timestamps in seconds."""

    event_id: str = Field(examples=["9f86d081884c7d65"])
    kind: Kind
    state: EventState
    source: tuple[str, str | None] | None = Field(
        description="The source of a move or copy: instance and tier.",
        examples=[["instance-1", "cpu"]],
    )
    target: tuple[str, str | None] | None = Field(
        description="The instance and tier that the operation targets; tier `null` means all tiers.",
        examples=[["instance-2", "cpu"]],
    )
    model: str | None
    num_tokens: int
    chunks: int = Field(description="Number of chunks that the operation applies to.")
    chunks_done: int
    bytes_done: int
    created_at: float
    started_at: float | None = Field(description="`null` while it waits for conflicting operations.")
    ended_at: float | None
    error: str | None = Field(description="Why it failed.")
    result: ResultAnswer


class EventsAnswer(BaseModel):
    """Events, newest first."""

    events: list[EventAnswer]


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


class TierSample(_Answer):
    """A tier at one point in time."""

    used: int


class Sample(_Answer):
    """An instance at one point in time."""

    time: float
    hit_rate: float | None = Field(description="Of the 5 minutes before.")
    tiers: list[TierSample]


class InstanceWithHistory(InstanceAnswer):
    """One instance with its history: one sample every 10 seconds for the last hour.

    There are none of the time in which it was not connected.
    """

    history: list[Sample]


class WhatIfPoint(_Answer):
    """One capacity of a tier."""

    capacity_bytes: int
    hit_rate: float = Field(description="Of the whole cache, if the tier had this capacity.")
    fast_hit_rate: float | None = Field(
        description="Of these, the hits in this tier and faster ones. `null` if it is not estimated."
    )


class WhatIfTier(_Answer):
    """How the hit rate of the whole cache depends on the capacity of one tier."""

    tier: str
    policy: str = Field(description="Its eviction policy.", examples=["lru"])
    capacity_bytes: int
    hit_rate: float = Field(description="Estimated at the capacity of today.")
    useful_bytes: int = Field(
        description="The least capacity with almost as many hits, also in this tier and faster ones."
    )
    points: list[WhatIfPoint] = Field(description="By capacity, the smallest first.")


class WhatIfChange(_Answer):
    """One change of the settings, of a capacity or of a policy."""

    tier: str
    capacity_bytes: int | None
    policy: str | None
    hit_rate: float
    gained: float = Field(description="Hit rate minus that of today, both estimated; may be negative.")
    gpu_seconds_a_day: float | None = Field(
        description="Prefill that the engines would not do. `null` while the speed of prefill is unknown."
    )


class WhatIfReport(_Answer):
    """What an instance estimates. Hit rates are fractions from 0 to 1."""

    seconds: float = Field(description="For how long lookups have been observed.")
    chunks: int = Field(description="Chunks of lookups that were observed.")
    looked_up: int = Field(
        default=0,
        description="Chunks of all lookups since the start, also of those that wait or were dropped.",
    )
    observed: float = Field(default=1.0, description="The part of these that was observed, from 0 to 1.")
    behind_seconds: float = Field(
        default=0.0, description="For how long the oldest lookup that is not observed yet has been waiting."
    )
    sampled: int = Field(description="Of these, those in the sample.")
    sampling: float = Field(description="The part of all keys that the sample has.")
    cpu_share: float = Field(description="What the estimate takes of one core.")
    dropped: int = Field(description="Lookups that were not observed.")
    measured_hit_rate: float | None
    prefill_tokens_per_second: float | None
    tiers: list[WhatIfTier]
    changes: list[WhatIfChange] = Field(description="The most useful ones first.")
    stopped: str = Field(description="Why nothing is observed any more; empty while it is.")


class WhatIfAnswer(BaseModel):
    """What other capacities and policies would bring to an instance."""

    what_if_at: float | None = Field(description="When it has reported this. `null` if it has not.")
    basis: list[str] = Field(description="What the estimate is based on, in sentences.")
    findings: list[str] = Field(
        description="What could be changed, in sentences, the most useful first.",
        examples=[["+50GiB of ram: +7.0 points, saves 31 GPU minutes a day"]],
    )
    report: WhatIfReport | None


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
