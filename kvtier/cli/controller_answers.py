"""What a controller answers over HTTP, as types. What they do not name is left out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Place = tuple[str, str]
"""An instance, and one of its tiers."""
Token = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whose chunks are meant: a prompt as token ids, or as text that the instance tokenizes."""

    tokens: list[int] | None = None
    prompt: str | None = None
    model: str | None = None
    """Left out: the only one that is served."""
    salt: str | None = None


class Found(msgspec.Struct, frozen=True):
    """Who holds the beginning of a prompt."""

    model: str
    num_tokens: int
    """Of the whole prompt."""
    instances: dict[str, dict[str, int]]
    """By instance and tier: how many leading tokens it holds. Tiers that hold none are left out."""


class Accepted(msgspec.Struct, frozen=True):
    """An operation that the controller has taken on."""

    event_id: str
    num_tokens: int
    """How many tokens it is about: 0 where nothing is held."""


class Result(msgspec.Struct, frozen=True):
    """What has come of an event."""

    tokens: int = 0
    """Of the chunks that are now as they should be."""
    chunks: int = 0
    bytes: int = 0
    """Transferred, or freed by a clear."""
    removed: int = 0
    """Chunks that were removed: from a move's source, or by a clear."""
    reason: str | None = None
    """Where that is less than was asked for: why."""


class Event(msgspec.Struct, frozen=True):
    """An operation that the controller was asked for, and how far it is. Times are seconds since 1970."""

    event_id: str
    kind: str
    state: Literal["queued", "running", "done", "failed"]
    source: tuple[str, str | None] | None = None
    target: tuple[str, str | None] | None = None
    model: str | None = None
    num_tokens: int = 0
    chunks: int = 0
    chunks_done: int = 0
    bytes_done: int = 0
    created_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    error: str | None = None
    result: Result = Result()

    @property
    def ended(self) -> bool:
        """Whether it will not change any more."""
        return self.state in ("done", "failed")


class Events(msgspec.Struct, frozen=True):
    """Events, the newest first."""

    events: list[Event]


class Tier(msgspec.Struct, frozen=True):
    """One tier of an instance. Sizes are bytes."""

    name: str
    type: str
    capacity: int | None
    used: int
    chunks: int
    available: bool
    shared: bool
    found: int
    """Chunks that look-ups have found in it since the instance began."""


class Instance(msgspec.Struct, frozen=True, omit_defaults=True):
    """One instance that is registered."""

    instance: str
    state: str
    version: str
    host: str
    process: int
    peer: str | None
    transport: str | None
    registered_at: float
    last_heartbeat: float | None
    in_step: bool
    """Whether it has told all that it holds."""
    models: list[str]
    engines: list[str]
    tiers: list[Tier]
    looked_up: int
    hit_rate: float | None
    """The share of the looked-up chunks that were found."""
    history: list[dict[str, Any]] | None = None
    """Of one instance that was asked for by its name."""


class Instances(msgspec.Struct, frozen=True):
    """All instances that are registered."""

    instances: list[Instance]


class Refusal(msgspec.Struct, frozen=True):
    """Why the controller will not do what it was asked for."""

    detail: Any
    known: list[str] = msgspec.field(default_factory=list)
    """The names that exist, where one that does not was given."""


class Tokenized(msgspec.Struct, frozen=True):
    """What vLLM's ``/tokenize`` answers."""

    tokens: list[Token]
