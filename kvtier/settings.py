"""Every setting of kvtier, what it means, and where its value comes from.

Values given in code (or in vLLM's ``kv_connector_extra_config``) win over ``KVTIER_*`` variables, those
over the YAML file that ``KVTIER_CONFIG_FILE`` names, and that over the defaults. :func:`load_settings`
reads all of them; ``Settings(...)`` alone takes what it is given and reads nothing.

A tier's own settings depend on its type, which a plugin may bring: :class:`Settings` holds tiers as they
were written, and :meth:`kvtier.plugins.Plugins.tier_settings` turns them into :class:`TierSettings`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvtier.errors import SettingsError
from kvtier.settings_controller import ControllerSettings, MetricsSettings
from kvtier.settings_errors import explain
from kvtier.settings_hand_over import HandOverSettings, Role
from kvtier.settings_peer import PeerSettings
from kvtier.settings_sources import (
    configured_file,
    given_names,
    merged,
    read_environment,
    read_file,
    variable_name,
)
from kvtier.units import Duration, Size

PAGE_BYTES = 4096
"""The smallest capacity: one page, the unit in which every tier counts."""

SOCKET_PATH_BYTES = 107
"""The longest path of a Unix socket (``sockaddr_un``, less its closing zero)."""


class Origin(NamedTuple):
    """Where a value came from."""

    kind: Literal["default", "file", "environment", "override"]
    where: str = ""
    """The file's path, the variable's name, or nothing."""


def _not_empty(value: object) -> object:
    """An empty path would be the current folder: what a variable that is not set leaves behind."""
    if value == "":
        raise ValueError("it is empty: write a path")
    return value


def _shorter_than_a_socket_path(path: Path) -> Path:
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise ValueError(
            f"{str(path)!r} is too long for a Unix socket: write at most {SOCKET_PATH_BYTES} bytes"
        )
    return path


LocalPath = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(Path.expanduser)]
SocketPath = Annotated[LocalPath, AfterValidator(_shorter_than_a_socket_path)]
LogLevel = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR"],
    BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
]


class TierSettings(BaseModel):
    """What every tier has, and all that a shared pool needs: how much that holds is its own business.

    A backend that has more subclasses this, or :class:`LocalTierSettings`, and names it as its
    ``settings_type``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        description="What the tier is called in messages, metrics and commands. No two tiers share a name.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        examples=["ram"],
    )
    type: str = Field(description="Which backend holds the tier's chunks.", examples=["cpu"])
    write: Literal["through", "on_evict", "never"] = Field(
        default="through",
        description=(
            "When chunks come here from the tier above: as soon as they are stored (`through`), when they "
            "are evicted there and are nowhere lower (`on_evict`), or only by an explicit move (`never`). "
            "The first tier gets every chunk, whatever this says."
        ),
        examples=["through"],
    )
    deadline: Duration = Field(
        default=5.0,
        gt=0,
        description=(
            "How long a batch of reads or writes of up to 16 MiB may take before it counts as failed; a "
            "larger one may take longer in proportion."
        ),
        examples=["5s"],
    )
    queue: Size | None = Field(
        default=None,
        ge=PAGE_BYTES,
        description=(
            "The most bytes that may wait to be written here; what comes on top is not written, and counted. "
            "Left out: a quarter of the first tier's capacity."
        ),
        examples=["1GiB"],
    )
    concurrency: int = Field(
        default=4, ge=1, le=256, description="How many batches may be under way here at once.", examples=[4]
    )


class LocalTierSettings(TierSettings):
    """What a tier has whose medium is this host's alone: kvtier knows all that is in it, and bounds it."""

    capacity: Size = Field(
        description="The most bytes that the tier may take. It is never exceeded.", examples=["5GiB"]
    )
    eviction: str = Field(
        default="lru", description="Which chunk goes first when room is needed.", examples=["lru"]
    )
    high_watermark: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description="The filled share of the capacity at which eviction starts.",
        examples=[0.95],
    )
    low_watermark: float = Field(
        default=0.9,
        validate_default=True,
        gt=0,
        le=1,
        description="The filled share of the capacity at which eviction stops.",
        examples=[0.9],
    )

    @field_validator("capacity")
    @classmethod
    def _holds_a_page(cls, capacity: int) -> int:
        if capacity < PAGE_BYTES:
            raise ValueError(
                f"{capacity} bytes are less than one page of {PAGE_BYTES}: "
                "write a size that holds many chunks, such as 5GiB"
            )
        return capacity

    @field_validator("low_watermark")
    @classmethod
    def _is_at_most_the_high_one(cls, low: float, info: ValidationInfo) -> float:
        high = info.data.get("high_watermark", 1.0)
        if low > high:
            raise ValueError(f"{low} is above high_watermark, which is {high}: write at most {high}")
        return low


class PrefetchSettings(BaseModel):
    """How long a request waits for chunks that are only in a lower tier or at a peer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Literal["best_effort", "wait", "timeout"] = Field(
        default="timeout",
        description=(
            "`best_effort`: a request takes what is in memory already and waits for nothing. `wait`: it "
            "waits until all that is held has been brought up. `timeout`: it waits as long as chunks "
            "arrive; once none has for `prefetch.deadline`, it takes the leading ones that have."
        ),
        examples=["timeout"],
    )
    deadline: Duration = Field(
        default=2.0,
        gt=0,
        description="How long a request waits for the next chunk to arrive under the policy `timeout`.",
        examples=["2s"],
    )


def _default_tiers() -> list[dict[str, Any]]:
    return [{"name": "ram", "type": "cpu", "capacity": "5GiB"}]


class Settings(BaseSettings):
    """All settings of one host's cache process and of the engines on it. Unknown names are errors."""

    model_config = SettingsConfigDict(
        env_prefix="KVTIER_",
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
    )

    chunk_tokens: int = Field(
        default=256,
        ge=1,
        description=(
            "How many tokens make a chunk, the unit that is stored, moved and evicted. A multiple of the "
            "engine's block size. Fewer: more of a prompt's end is found again; more: less overhead for each "
            "token."
        ),
        examples=[256],
    )
    partial_chunks: bool = Field(
        default=False,
        description="Store the last chunk of a prompt, too, where it has fewer than `chunk_tokens` tokens.",
        examples=[True],
    )
    save_decode: bool = Field(
        default=True,
        description="Store the chunks of generated tokens, too, so that the next turn of a chat finds them.",
        examples=[False],
    )
    tiers: list[dict[str, Any]] = Field(
        default_factory=_default_tiers,
        min_length=1,
        max_length=8,
        description="Where chunks are kept, fastest first. The first tier is memory: `cpu` or `hugepage`.",
        examples=['[{"name": "ram", "type": "cpu", "capacity": "5GiB"}]'],
    )
    socket: SocketPath | None = Field(
        default=None,
        description=(
            "The Unix socket of a running `kvtier serve`. Left out: each engine's connector starts a cache "
            "process of its own."
        ),
        examples=["/run/kvtier.sock"],
    )
    linger: Duration = Field(
        default=10.0,
        description="How long a cache process that a connector started stays after its last engine has left.",
        examples=["10s"],
    )
    drain_timeout: Duration = Field(
        default=30.0,
        description="How long a cache process that is told to stop goes on writing what still waits.",
        examples=["30s"],
    )
    checksum: bool = Field(
        default=True,
        description=(
            "Checksum each chunk's payload when it is written below the first tier, and check it when it is "
            "read. Headers are checked always."
        ),
        examples=[True],
    )
    plugins: list[str] | None = Field(
        default=None,
        description=(
            "Which installed plugins to load, by the name of their distribution or entry point. Left out: "
            "all of them; `[]`: none, only what is built in."
        ),
        examples=['["kvtier-example"]'],
    )
    prefetch: PrefetchSettings = Field(
        default=PrefetchSettings(),
        description="Bringing chunks up from lower tiers before a request needs them.",
    )
    peer: PeerSettings = Field(
        default=PeerSettings(),
        description="Serving this instance's tiers to others, and fetching from theirs.",
    )
    role: Role = Field(
        default="both",
        description=(
            "What the engines of this instance do: `prefill` computes prompts and hands their KV over to "
            "decoders, `decode` takes over what prefillers have computed, `both` does either. Left out: what "
            "vLLM's `kv_role` says of each engine."
        ),
        examples=["prefill"],
    )
    hand_over: HandOverSettings = Field(
        default=HandOverSettings(),
        description="Handing the KV of a prompt over from the engine that computes it to one that decodes.",
    )
    controller: ControllerSettings = Field(
        default=ControllerSettings(),
        description="The controller that knows what this instance holds, and may move it.",
    )
    metrics: MetricsSettings = Field(
        default=MetricsSettings(), description="What Prometheus is told of this instance."
    )
    log_level: LogLevel = Field(
        default="INFO",
        description="The least severe messages that the cache process logs.",
        examples=["INFO"],
    )

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)

    def origin(self, key: str) -> Origin:
        """Where the value of ``key``, a dotted name, came from; for ``tiers[1].path``: where ``tiers``."""
        return _origin(self._origins, key)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Values given to the constructor only: :func:`load_settings` reads the rest, with its origin."""
        return (init_settings,)


def load_settings(overrides: Mapping[str, Any] | None = None, *, file: Path | None = None) -> Settings:
    """Read the settings: ``overrides`` over the environment over the YAML file over the defaults.

    ``file`` is read instead of the one that ``KVTIER_CONFIG_FILE`` names. Nested settings are merged, lists
    replaced. Reads one file; blocks as long as that takes. Raises :class:`SettingsError` with one message
    that names each wrong key, where it stands and what to write instead.
    """
    path = file or configured_file()
    layers: list[tuple[Mapping[str, Any], Callable[[str], Origin]]] = [
        (read_file(path) if path else {}, lambda _: Origin("file", str(path))),
        (read_environment(Settings), lambda key: Origin("environment", _variable_of(key))),
        (overrides or {}, lambda _: Origin("override")),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for layer, origin_of in layers:
        values = merged(values, layer)
        origins.update((key, origin_of(key)) for key in given_names(Settings, layer))
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise SettingsError(explain(error, Settings, lambda key: describe(_origin(origins, key)))) from error
    settings._origins.update(origins)
    return settings


def describe(origin: Origin) -> str:
    """Where a value was written, as a phrase to follow its name in a message."""
    if origin.kind == "override":
        return " (given on the command line, in code or in kv_connector_extra_config)"
    return f" (in {origin.where})" if origin.where else ""


def _origin(origins: Mapping[str, Origin], key: str) -> Origin:
    name = key.partition("[")[0]
    while name not in origins and "." in name:
        name = name.rpartition(".")[0]
    return origins.get(name, Origin("default"))


def _variable_of(key: str) -> str:
    """The variable that is set: that of the key itself or, as JSON, of what it is nested in."""
    while variable_name(key) not in os.environ and "." in key:
        key = key.rpartition(".")[0]
    return variable_name(key)
