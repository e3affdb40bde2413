"""What the controller is asked over HTTP and what it answers, as types: bodies, answers, and their limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvtier.controller.events import EventState, Kind
from kvtier.units import Duration

MOST_TOKENS = 4_000_000
MOST_PROMPT_BYTES = (4 << 20) - 4096
"""Text travels to the instance that tokenizes it in one message, which is no longer than 4 MiB."""
MOST_NAME = 1024
LONGEST_WAIT_SECONDS = 60.0
MOST_EVENTS = 1000
"""In one answer."""

_TOKENS = [128000, 849, 21435, 279, 26431]

TokenID = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]
Name = Annotated[str, Field(min_length=1, max_length=MOST_NAME)]
PositionBody = tuple[Name, Name]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class PromptBody(_Body):
    """Whose chunks are meant: those of a prompt, given as token ids or as text."""

    # Fails at the first that is wrong: a message for each of four million is no use to anybody.
    tokens: list[TokenID] | None = Field(
        default=None,
        fail_fast=True,
        max_length=MOST_TOKENS,
        description=(f"The prompt's token ids, at most {MOST_TOKENS:,}. Either these or `prompt`."),
        examples=[_TOKENS],
    )
    prompt: str | None = Field(
        default=None,
        description=(
            f"The prompt as text, at most {MOST_PROMPT_BYTES:,} bytes: an instance that serves the model "
            "turns it into token ids. Chat templates are not applied."
        ),
        examples=["Explain the significance of KV cache in language models."],
    )
    model: Name | None = Field(
        default=None,
        description=(
            "The model's name, as clients of the engine call it. Left out: the only one that the named "
            "instance serves, or that all instances do."
        ),
        examples=["meta-llama/Llama-3.1-8B-Instruct"],
    )
    salt: str | None = Field(
        default=None,
        max_length=MOST_NAME,
        description="The tenant's `cache_salt`, where requests carry one: chunks are kept apart by it.",
        examples=["tenant-1"],
    )

    @model_validator(mode="after")
    def _is_one_prompt(self) -> PromptBody:
        if self.tokens is None and self.prompt is None and not self._may_be_without:
            raise ValueError("write either `tokens` or `prompt`")
        if self.tokens is not None and self.prompt is not None:
            raise ValueError("write either `tokens` or `prompt`, not both")
        if self.prompt is not None and len(self.prompt.encode(errors="replace")) > MOST_PROMPT_BYTES:
            raise ValueError(f"`prompt` is longer than {MOST_PROMPT_BYTES:,} bytes: send `tokens` instead")
        return self

    @property
    def _may_be_without(self) -> bool:
        return False


class LookUpBody(PromptBody):
    """Who holds the beginning of a prompt?"""


class MoveBody(PromptBody):
    """Move a prompt's chunks from one tier to another, of one instance or of two."""

    old_position: PositionBody = Field(
        description="Where the chunks are: an instance and the name, or the type, of one of its tiers.",
        examples=[["instance-1", "cpu"]],
    )
    new_position: PositionBody = Field(
        description="Where they go to, likewise.", examples=[["instance-2", "cpu"]]
    )
    copy_: bool = Field(
        default=False,
        alias="copy",
        description=(
            "Keep the chunks at their old position, too. Else each is removed there once the new position "
            "has confirmed it."
        ),
    )

    @model_validator(mode="after")
    def _goes_somewhere(self) -> MoveBody:
        if self.old_position == self.new_position:
            raise ValueError("`old_position` and `new_position` are the same")
        return self


class _TierBody(PromptBody):
    instance: Name = Field(description="The instance's `controller.instance_id`.", examples=["instance-1"])
    tier: Name = Field(
        description="The name of one of its tiers, or its type where only one tier is of it.",
        examples=["cpu"],
    )


class PrefetchBody(_TierBody):
    """Bring a prompt's chunks into a tier before they are asked for, from wherever they are."""

    deadline: Annotated[Duration, Field(gt=0)] | None = Field(
        default=None,
        description="How long that may take; what has arrived by then stays. Left out: as long as it takes.",
        examples=["5s"],
    )


class PinBody(_TierBody):
    """Keep a prompt's chunks from being evicted."""

    ttl: Annotated[Duration, Field(gt=0)] | None = Field(
        default=None, description="For how long. Left out: until they are unpinned.", examples=["10m"]
    )


class UnpinBody(_TierBody):
    """Let a prompt's chunks be evicted again."""


class ClearBody(PromptBody):
    """Remove a prompt's chunks, or everything, from one tier of an instance or from all."""

    instance: Name = Field(description="The instance's `controller.instance_id`.", examples=["instance-1"])
    tier: Name | None = Field(
        default=None,
        description="The name or the type of the tier that is cleared. Left out: all of the instance.",
        examples=["cpu"],
    )

    @model_validator(mode="after")
    def _means_what_it_says(self) -> ClearBody:
        if self.tokens is None and self.prompt is None and (self.model or self.salt):
            raise ValueError("`model` and `salt` say whose prompt: write `tokens` or `prompt`, too")
        return self

    @property
    def _may_be_without(self) -> bool:
        return True


class LookUpAnswer(BaseModel):
    """Who holds the beginning of the prompt."""

    model: str = Field(description="The model's name, as its engine calls it.")
    num_tokens: int = Field(description="Tokens of the whole prompt.", examples=[1200])
    instances: dict[str, dict[str, int]] = Field(
        description="By instance and tier: how many leading tokens it holds. Who holds none is left out.",
        examples=[{"instance-1": {"cpu": 1024, "disk": 768}}],
    )


class Accepted(BaseModel):
    """What was asked for has been taken on. `GET /events/{event_id}` tells what becomes of it."""

    event_id: str = Field(examples=["9f86d081884c7d65"])
    num_tokens: int = Field(
        description=(
            "How many tokens' chunks it is about. 0 where nothing is held, and where everything is cleared: "
            "the event then counts chunks."
        ),
        examples=[1024],
    )


class ResultAnswer(BaseModel):
    """What has come of an event."""

    tokens: int = Field(description="Tokens whose chunks are now as they should be.")
    chunks: int = Field(description="Chunks that are now as they should be.")
    bytes: int = Field(description="Bytes that were transferred; those that were freed by a clear.")
    removed: int = Field(description="Chunks that were removed: from a move's source, or by a clear.")
    reason: str | None = Field(description="Where that is less than was asked for: why.")


class EventAnswer(BaseModel):
    """One operation that the controller was asked for. Times are in seconds since 1970."""

    event_id: str = Field(examples=["9f86d081884c7d65"])
    kind: Kind
    state: EventState
    source: tuple[str, str | None] | None = Field(
        description="Where a move or a copy takes the chunks from: instance and tier.",
        examples=[["instance-1", "cpu"]],
    )
    target: tuple[str, str | None] | None = Field(
        description="Where they go to, or what it is about: instance and tier, `null` for all its tiers.",
        examples=[["instance-2", "cpu"]],
    )
    model: str | None
    num_tokens: int
    chunks: int = Field(description="How many chunks it is about.")
    chunks_done: int
    bytes_done: int
    created_at: float
    started_at: float | None = Field(description="`null` while it waits for others on the same chunks.")
    ended_at: float | None
    error: str | None = Field(description="Why it has failed, in words.")
    result: ResultAnswer


class EventsAnswer(BaseModel):
    """Events, the newest first."""

    events: list[EventAnswer]


class TierAnswer(BaseModel):
    """One tier of an instance. Sizes are in bytes; counts are since the instance began."""

    name: str
    type: str
    capacity: int | None = Field(description="`null` for a shared pool, which knows that itself.")
    used: int
    chunks: int
    available: bool = Field(description="`false` while calls to it fail and it is left alone.")
    shared: bool = Field(description="Whether it is a pool that other instances fill and empty, too.")
    found: int = Field(description="Chunks that look-ups have found in it.")


class InstanceAnswer(BaseModel):
    """One instance that is registered. Times are in seconds since 1970."""

    instance: str = Field(examples=["instance-1"])
    state: str = Field(examples=["connected"])
    version: str = Field(description="Its version of kvtier.")
    host: str
    process: int
    peer: str | None = Field(description="Where other instances reach it.", examples=["10.0.0.2:8200"])
    transport: str | None
    registered_at: float
    last_heartbeat: float | None
    in_step: bool = Field(description="Whether it has told all that it holds.")
    models: list[str] = Field(description="All names of all models that its engines serve.")
    engines: list[str]
    tiers: list[TierAnswer]
    looked_up: int = Field(description="Chunks that engines have asked for since it began.")
    hit_rate: float | None = Field(description="The share of these that was found, from 0 to 1.")


class TierSample(BaseModel):
    """How a tier was at some time."""

    used: int
    found: int


class Sample(BaseModel):
    """How an instance was at some time."""

    time: float
    looked_up: int
    tiers: list[TierSample]


class InstanceWithHistory(InstanceAnswer):
    """One instance, and how it was of late: a sample each ten seconds, for an hour."""

    history: list[Sample]


class InstancesAnswer(BaseModel):
    """All instances that are registered, by their names."""

    instances: list[InstanceAnswer]


class Health(BaseModel):
    """That the controller is there."""

    status: str = Field(examples=["ok"])
    version: str
    instances: int = Field(description="How many are registered.")


class Problem(BaseModel):
    """Why something was not done."""

    detail: str = Field(description="One sentence.")
    known: list[str] = Field(
        default=[], description="The names that exist, where one was named that does not."
    )
