"""The controller's HTTP responses. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Place = tuple[str, str]
"""Instance id and tier name."""
Token = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt, as token ids or as text that an instance tokenizes."""

    tokens: list[int] | None = None
    prompt: str | None = None
    model: str | None = None
    """``None`` for the only one served."""
    salt: str | None = None


class Found(msgspec.Struct, frozen=True):
    """The tiers that hold a prefix of a prompt."""

    model: str
    num_tokens: int
    """Length of the whole prompt."""
    instances: dict[str, dict[str, int]]
    """Number of leading tokens held, by instance and tier. Tiers without any are omitted."""


class Accepted(msgspec.Struct, frozen=True):
    """An operation accepted by the controller."""

    event_id: str
    num_tokens: int
    """Number of tokens affected; 0 if no chunk is held."""


class Result(msgspec.Struct, frozen=True):
    """The result of an event."""

    tokens: int = 0
    """Tokens of the chunks that were processed."""
    chunks: int = 0
    bytes: int = 0
    """Transferred, or freed by a clear."""
    removed: int = 0
    """Chunks removed from the source of a move, or by a clear."""
    reason: str | None = None
    """Why fewer chunks were processed than requested."""


class Event(msgspec.Struct, frozen=True):
    """An operation and its progress. Times are Unix timestamps in seconds."""

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
        """Whether the event is done or failed."""
        return self.state in ("done", "failed")


class Events(msgspec.Struct, frozen=True):
    """Events, newest first."""

    events: list[Event]


class Tier(msgspec.Struct, frozen=True):
    """One tier of an instance. Sizes are in bytes."""

    name: str
    type: str
    capacity: int | None
    used: int
    chunks: int
    available: bool
    shared: bool
    found: int
    """Chunks that lookups found in it since the instance started."""


class Instance(msgspec.Struct, frozen=True, omit_defaults=True):
    """One registered instance."""

    instance: str
    state: str
    version: str
    host: str
    process: int
    peer: str | None
    transport: str | None
    registered_at: float
    last_heartbeat: float | None
    up_to_date: bool
    """Whether the controller's index of its chunks is up to date."""
    models: list[str]
    engines: list[str]
    tiers: list[Tier]
    looked_up: int
    hit_rate: float | None
    """The fraction of the looked-up chunks that was found."""
    history: list[dict[str, Any]] | None = None
    """Only in the response for a single instance."""


class Instances(msgspec.Struct, frozen=True):
    """All registered instances."""

    instances: list[Instance]


class Refusal(msgspec.Struct, frozen=True):
    """An error response of the controller."""

    detail: Any
    known: list[str] = msgspec.field(default_factory=list)
    """The known names, if an unknown one was given."""


class Tokenized(msgspec.Struct, frozen=True):
    """The response of vLLM's ``/tokenize``."""

    tokens: list[Token]
