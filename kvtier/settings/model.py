"""The settings model.

Precedence, highest first: values from code or vLLM's ``kv_connector_extra_config``, ``KVTIER_*`` environment
variables, the YAML file named by ``KVTIER_CONFIG_FILE``, the defaults. :func:`load_settings` reads all of
them; ``Settings(...)`` uses its arguments only.

The settings of a tier depend on its type, which a plugin may provide. :class:`Settings` holds tiers as raw
mappings; :meth:`kvtier.plugins.Plugins.tier_settings` validates them as :class:`TierSettings`.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvtier.errors import SettingsError
from kvtier.settings.controller import ControllerSettings
from kvtier.settings.errors import explain
from kvtier.settings.observability import (
    CanarySettings,
    MetricsSettings,
    RecordingSettings,
    WhatIfSettings,
    WhySettings,
)
from kvtier.settings.peer import KVTransferSettings, PeerSettings, Role
from kvtier.settings.sources import (
    Origin,
    Origins,
    configured_file,
    given_names,
    merged,
    read_environment,
    read_file,
    variable_name,
)
from kvtier.settings.tenants import Tenants, TierTenantSettings
from kvtier.settings.values import MAX_DIGITS, Choice, LocalPath, SettingsModel
from kvtier.settings.yaml_file import SettingsFile
from kvtier.units import Duration, Fraction, Integer, Number, Size, check_number

PAGE_BYTES = 4096
"""Minimum capacity: one page, the accounting unit of every tier."""

MAX_CHUNK_TOKENS = 1 << 20

SOCKET_PATH_BYTES = 107
"""Maximum length of a Unix socket path (``sockaddr_un`` without the terminating NUL)."""

DEFAULT_EVICTION = "adaptive"
"""Hits most on agents, and elsewhere hardly less than the best: see ``benchmarks/README.md``."""


def _check_socket_path_length(path: Path) -> Path:
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise ValueError(
            f"{str(path)!r} is too long for a Unix socket: use at most {SOCKET_PATH_BYTES} bytes"
        )
    return path


SocketPath = Annotated[LocalPath, AfterValidator(_check_socket_path_length)]
LogLevel = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR"],
    BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
]


class EncryptSettings(SettingsModel):
    """Settings of the encryption of a tier."""

    key_file: LocalPath = Field(
        description=(
            "File with a key on each line: its number and 64 hexadecimal digits, as `openssl rand -hex 32` "
            "prints. The first encrypts, the others are for what was stored before. Others must not "
            "be able to read it."
        ),
        examples=["/etc/kvtier/keys"],
    )


class TierSettings(SettingsModel):
    """Settings common to all tiers. A shared pool needs no more, because it manages its own capacity.

    A backend with further settings subclasses this class or :class:`LocalTierSettings` and declares the
    subclass as its ``settings_type``.
    """

    name: str = Field(
        description="Name of the tier in messages, metrics and commands. Must be unique.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        examples=["ram"],
    )
    type: str = Field(description="Backend that stores the tier's chunks.", examples=["cpu"])
    write: Literal["through", "on_evict", "never"] = Field(
        default="through",
        description=(
            "When to write chunks here from the tier above: as soon as they are stored (`through`), when "
            "they are evicted there and no lower tier holds them (`on_evict`), or only on an explicit move "
            "(`never`). Ignored for the first tier, which gets every chunk."
        ),
        examples=["through"],
    )
    admit: Literal["first_use", "second_use", "expected"] = Field(
        default="first_use",
        description=(
            "Which chunks `write` applies to: each one (`first_use`); those that are used again while memory "
            "holds them, or stored again after they have left it (`second_use`); or also those whose use is "
            "expected, by a pin, the hints of the request, or the first tier's eviction policy (`expected`). "
            "Others are dropped with their memory, also at shutdown. Ignored for the first tier. See "
            "[operating.md](operating.md#which-chunks-are-written-to-disk)."
        ),
        examples=["second_use"],
    )
    deadline: Duration = Field(
        default=5.0,
        gt=0,
        description=(
            "How long a batch of reads or writes of up to 16 MiB may take before it counts as failed. "
            "Scales with the size of larger batches."
        ),
        examples=["5s"],
    )
    queue: Size | None = Field(
        default=None,
        ge=PAGE_BYTES,
        description=(
            "Maximum bytes queued for writing to this tier; they stay in memory until written. Chunks beyond "
            "this are deferred, and written later if memory still holds them. If omitted, a quarter of the "
            "first tier's capacity."
        ),
        examples=["1GiB"],
    )
    concurrency: Integer = Field(
        default=4,
        ge=1,
        le=256,
        description="Maximum number of batches in flight. Reads that a request waits for go first.",
        examples=[4],
    )
    codec: Choice = Field(
        default={"type": "identity"},
        description=(
            "Codec that encodes chunks in this tier: `identity` stores them as they are, `lossless` in "
            "fewer bytes (bfloat16: 1.4 times), `auto` does that while it pays, as measured; `dense` needs "
            "5 % less and is slow; `fp8`, `int8` and `int4` need half or a quarter of them, for engines with "
            "`accept_lossy`; plugins provide others. Or a mapping of its settings with its name as `type`. "
            "Not for the first tier. In a shared pool, all hosts need a codec: to those without, encoded "
            "chunks are misses."
        ),
        examples=["lossless"],
    )
    encrypt: EncryptSettings | None = Field(
        default=None,
        description=(
            "Encrypt what this tier stores, with AES-256-GCM. Not for the first tier. In a shared pool, all "
            "hosts need the same keys."
        ),
        examples=["{key_file: /etc/kvtier/keys}"],
    )


class LocalTierSettings(TierSettings):
    """Settings of a tier whose medium belongs to this host only: kvtier tracks and bounds its content."""

    capacity: Size = Field(
        description="Maximum size of the tier in bytes. Never exceeded.", examples=["5GiB"]
    )
    eviction: Choice = Field(
        default={"type": DEFAULT_EVICTION},
        description=(
            "Eviction policy: `adaptive`, `lru`, `lfu`, `arc`, `s3fifo`, `sieve`, `tinylfu`, `gdsf`, "
            "`resume`, or one provided by a plugin; or a mapping of its settings with its name as `type`. "
            "`adaptive` evicts in the order of `lru`, `arc` or `resume`, whichever has the highest recent "
            "hit rate."
        ),
        examples=["lru"],
    )
    high_watermark: Fraction = Field(
        default=0.95,
        description=(
            "Fraction of the capacity in use at which eviction starts. A single tier whose policy may "
            "decline chunks is filled: in free space, worse ones would replace better ones."
        ),
        examples=[0.95],
    )
    low_watermark: Fraction = Field(
        default=0.9,
        validate_default=True,  # A high watermark may be below it.
        description="Fraction of the capacity in use at which eviction stops.",
        examples=[0.9],
    )

    tenants: dict[str, TierTenantSettings] = Field(
        default={},
        description=(
            "What differs from the setting `tenants` in this tier: `share`, `max` and `weight` by the name "
            "of the tenant."
        ),
        examples=["{team-a: {share: 0.5}}"],
    )

    @field_validator("capacity")
    @classmethod
    def _check_capacity(cls, capacity: int) -> int:
        if capacity < PAGE_BYTES:
            raise ValueError(
                f"{capacity} bytes is less than one page of {PAGE_BYTES}: "
                "use a size that holds many chunks, such as 5GiB"
            )
        return capacity

    @field_validator("low_watermark")
    @classmethod
    def _check_low_watermark(cls, low: float, info: ValidationInfo) -> float:
        high = info.data.get("high_watermark", 1.0)
        if low > high:
            raise ValueError(f"{low} is above high_watermark ({high}): use at most {high}")
        return low


class PrefetchSettings(SettingsModel):
    """How long a request waits for chunks that only a lower tier or a peer holds."""

    policy: Literal["best_effort", "wait", "timeout"] = Field(
        default="timeout",
        description=(
            "`best_effort`: a request uses the chunks already in memory and does not wait. `wait`: it "
            "waits until every chunk found is in memory or has failed; an engine ends the wait if no chunk "
            "arrives for 120 s. `timeout`: it waits while chunks arrive; if none arrives for "
            "`prefetch.deadline`, it uses the leading ones that are in memory."
        ),
        examples=["timeout"],
    )
    deadline: Duration = Field(
        default=2.0,
        gt=0,
        description="With the policy `timeout`: how long a request waits for the next chunk.",
        examples=["2s"],
    )
    adaptive: bool = Field(
        default=True,
        description=(
            "With the policy `timeout`: whether a request computes the chunks that, by recent measurements "
            "or the pace of its first chunks, would arrive later than it computes them."
        ),
        examples=[True],
    )
    ahead: bool = Field(
        default=True,
        description=(
            "Whether prompts are read from lower tiers shortly before they are expected back, such as from "
            "the call of a tool, if the eviction policy of memory (`resume` or `adaptive`) prefers them to "
            "what it holds."
        ),
        examples=[True],
    )


def _default_tiers() -> list[dict[str, Any]]:
    return [{"name": "ram", "type": "cpu", "capacity": "5GiB"}]


def _chunk_tokens(value: object) -> int | str:
    text = value.strip() if isinstance(value, str) else value
    if text == "auto":
        return "auto"
    if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < MAX_DIGITS:
        text = int(text)
    if not isinstance(text, int) or not 1 <= text <= MAX_CHUNK_TOKENS:
        raise ValueError(f"{reprlib.repr(value)}: use a whole number from 1 to {MAX_CHUNK_TOKENS}, or auto")
    return text


ChunkTokens = Annotated[int | Literal["auto"], BeforeValidator(_chunk_tokens), BeforeValidator(check_number)]


class Settings(BaseSettings):
    """All settings of a host's cache process and of its engines. Unknown names are errors."""

    model_config = SettingsConfigDict(
        env_prefix="KVTIER_",
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
    )

    chunk_tokens: ChunkTokens = Field(
        default="auto",
        description=(
            "Tokens per chunk, the unit of storage, transfer and eviction: a multiple of all block sizes of "
            "the engine. `auto` is the multiple nearest to 256, and for models with states (Mamba, linear "
            "attention) the distance between the states that vLLM keeps. Smaller chunks match more of a "
            "prompt's end; larger chunks have less overhead per token."
        ),
        examples=[256, "auto"],
    )
    partial_chunks: bool = Field(
        default=True,
        description=(
            "Also store the end of a prompt and of its answer, which is shorter than a chunk. A longer one "
            "that begins like it replaces it."
        ),
        examples=[False],
    )
    save_decode: bool = Field(
        default=True,
        description="Also store chunks of generated tokens, so that the next turn of a chat hits them.",
        examples=[False],
    )
    weights_id: str = Field(
        default="",
        description=(
            "Identifies the model's weights at startup, for example by a training step, instead of the "
            "content of their files. Set it where kvtier cannot read these, which it logs, and where hosts "
            "have copies with other modification times. "
            "Chunks computed with other weights are misses. Later weights are identified by vLLM's "
            "`weight_version`."
        ),
        examples=["step-1200"],
    )
    accept_lossy: bool = Field(
        default=False,
        description=(
            "Whether engines accept KV that a tier has stored with loss: with the codecs `fp8`, `int8` and "
            "`int4`. They share no chunk with engines that do not. See [codecs.md](codecs.md#with-loss)."
        ),
        examples=[True],
    )
    tiers: list[dict[str, Any]] = Field(
        default_factory=_default_tiers,
        min_length=1,
        max_length=8,
        description="Storage tiers, fastest first. The first tier must be memory: `cpu` or `hugepage`.",
        examples=['[{"name": "ram", "type": "cpu", "capacity": "5GiB"}]'],
    )
    socket: SocketPath | None = Field(
        default=None,
        description=(
            "Unix socket of a running `kvtier serve`. If omitted, each engine's connector starts its own "
            "cache process."
        ),
        examples=["/run/kvtier.sock"],
    )
    linger: Duration = Field(
        default=10.0,
        description=(
            "How long a cache process started by a connector keeps running after its last engine disconnects."
        ),
        examples=["10s"],
    )
    reserve_share: Fraction = Field(
        default=0.5,
        description=(
            "Maximum fraction of the first tier's capacity that one engine may have reserved for chunks that "
            "it has not stored yet. Further chunks are not stored. So an engine that is stopped does not "
            "keep the others from storing."
        ),
        examples=[0.5],
    )
    drain_timeout: Duration = Field(
        default=30.0,
        description="How long a cache process continues to write queued chunks when it is stopped.",
        examples=["30s"],
    )
    checksum: bool = Field(
        default=True,
        description=(
            "Checksum each chunk's payload when it is written below the first tier, and verify it when it is "
            "read. Headers are always verified."
        ),
        examples=[True],
    )
    verify: Number = Field(
        default=0.0,
        ge=0,
        le=1,
        description=(
            "Fraction of loads instead of which an idle engine computes the prompt, to compare it with what "
            "is stored. What differs is in quarantine. 0 disables it. See [verify.md](verify.md)."
        ),
        examples=[0.001],
    )
    plugins: list[str] | None = Field(
        default=None,
        description=(
            "Installed plugins to load, by distribution or entry point name. If omitted, all of them; `[]`: "
            "only the built-in ones."
        ),
        examples=['["kvtier-example"]'],
    )
    prefetch: PrefetchSettings = Field(
        default=PrefetchSettings(),
        description="Prefetching chunks from lower tiers before a request needs them.",
    )
    peer: PeerSettings = Field(
        default=PeerSettings(),
        description="Serving this instance's tiers to peers, and fetching from theirs.",
    )
    role: Role = Field(
        default="both",
        description=(
            "Role of this instance's engines. `prefill`: compute prompts and transfer their KV to decode "
            "instances. `decode`: receive KV from prefill instances. `both`: either. If omitted, vLLM's "
            "`kv_role` of each engine."
        ),
        examples=["prefill"],
    )
    kv_transfer: KVTransferSettings = Field(
        default=KVTransferSettings(),
        description="KV transfer from prefill instances to decode instances.",
    )
    controller: ControllerSettings = Field(
        default=ControllerSettings(),
        description="The controller, which tracks the chunks of this instance and may move them.",
    )
    tenants: Tenants = Field(
        default={},
        description=(
            "How tenants share each local tier, by name: `share` (never taken from it for others, default "
            "0), `max` (holds no more, default 1), both as fractions of `capacity` times `low_watermark`; "
            "`weight` (its part of the room beyond all shares, default 1); and `salt`, the `cache_salt` of "
            "its requests. `other` stands for everyone else. See [tenants.md](tenants.md)."
        ),
        examples=['{"team-a": {"share": 0.3, "max": 0.5, "weight": 2}}'],
    )
    metrics: MetricsSettings = Field(
        default=MetricsSettings(), description="The Prometheus metrics of this instance."
    )
    recording: RecordingSettings = Field(
        default=RecordingSettings(),
        description="Recording the lookups of this host's engines, without their tokens.",
    )
    traces: bool = Field(
        default=False,
        description=(
            "Whether the cache process exports OpenTelemetry spans of its engines and its own, as set by "
            "OpenTelemetry's `OTEL_*` variables. Needs `pip install 'kvtier[otel]'`. See "
            "[traces.md](traces.md)."
        ),
        examples=[True],
    )
    whatif: WhatIfSettings = Field(
        default=WhatIfSettings(),
        description="Estimating what other capacities and eviction policies would hit.",
    )
    why: WhySettings = Field(
        default=WhySettings(), description="What is remembered to tell why tokens were not a hit."
    )
    canary: CanarySettings = Field(
        default=CanarySettings(),
        description="Testing in production that what is stored is served, with a synthetic prompt.",
        examples=["{engine: http://127.0.0.1:8000, every: 60s}"],
    )
    log_level: LogLevel = Field(
        default="INFO",
        description="Minimum severity of the cache process's log messages.",
        examples=["INFO"],
    )

    _origins: Origins = PrivateAttr(default_factory=Origins)

    def origin(self, key: str) -> Origin:
        """Return the source of the dotted ``key``; for ``tiers[1].path`` that of ``tiers``."""
        return self._origins.of(key)

    def at(self, key: str) -> str:
        """Return the dotted ``key`` and where it was set, for a message."""
        return self._origins.at(key)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use the constructor arguments only: :func:`load_settings` reads the other sources."""
        return (init_settings,)


def load_settings(overrides: Mapping[str, Any] | None = None, *, file: Path | None = None) -> Settings:
    """Read the settings. Precedence: ``overrides``, environment, YAML file, defaults.

    ``file`` replaces the path in ``KVTIER_CONFIG_FILE``. Nested settings are merged, lists are replaced.
    Blocks while it reads the file. Raises :class:`SettingsError` with one line per invalid key: its source
    and what to use instead.
    """
    settings, problems = load_valid(overrides, file=file)
    if problems:
        raise SettingsError("\n".join(problems))
    return settings


def load_valid(
    overrides: Mapping[str, Any] | None = None, *, file: Path | None = None
) -> tuple[Settings, list[str]]:
    """Read the settings like :func:`load_settings`, with defaults for what is invalid, and why it is."""
    path = file or configured_file()
    read, problems = SettingsFile({}, {}), list[str]()
    try:
        read = read_file(path) if path else read
    except SettingsError as error:
        problems.append(str(error))
    variables, unusable = read_environment(Settings)
    problems += unusable
    layers: list[tuple[Mapping[str, Any], Callable[[str], Origin]]] = [
        (read.values, lambda _: Origin("file", str(path))),
        (variables, lambda key: Origin("environment", _variable_of(key))),
        (overrides or {}, lambda _: Origin("override")),
    ]
    values: dict[str, Any] = {}
    origins = Origins(lines=read.lines)
    for layer, origin_of in layers:
        values = merged(values, layer)
        origins.given.update((key, origin_of(key)) for key in given_names(Settings, layer))
    try:
        settings = Settings(**values)
    except ValidationError as error:
        problems.append(explain(error, Settings, origins.at))
        wrong = {details["loc"][0] for details in error.errors(include_url=False)}
        settings = Settings(**{name: value for name, value in values.items() if name not in wrong})
        if "tenants" in wrong:  # The tiers' own part of them cannot be checked.
            for tier in settings.tiers:
                tier.pop("tenants", None)
    settings._origins = origins
    return settings, problems


def _variable_of(key: str) -> str:
    """Return the variable that sets ``key``: its own, or that of an enclosing setting (as JSON)."""
    while variable_name(key) not in os.environ and "." in key:
        key = key.rpartition(".")[0]
    return variable_name(key)
