"""Settings of what a running cache shows of itself: metrics, recordings, estimates of other settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic_settings import NoDecode

from kvtier.settings.controller import HTTPAddresses
from kvtier.settings.peer import Address
from kvtier.settings.values import LocalPath, Secret, SettingsModel
from kvtier.units import MIB, Duration, Integer, Size

MAX_FILES = 100


class MetricsSettings(SettingsModel):
    """The Prometheus endpoint of this instance. If omitted, metrics are not served."""

    listen: Address | None = Field(
        default=None,
        description=(
            "Address to serve `/metrics` on, `HOST:PORT`. `127.0.0.1` accepts local connections only. If "
            "omitted, metrics are not served."
        ),
        examples=["127.0.0.1:9464"],
    )


class RecordingSettings(SettingsModel):
    """Where the lookups of this host's engines are recorded. By default they are not."""

    path: LocalPath | None = Field(
        default=None,
        description=(
            "File to record the lookups of this host's engines in, without tokens and keys. If omitted, "
            "nothing is recorded. Its folder must exist. Like `kvtier serve --record`."
        ),
        examples=["/var/log/kvtier/traffic.rec"],
    )
    max_bytes: Size = Field(
        default=256 * MIB,
        ge=MIB,
        description=(
            "Maximum size of a file of a recording. When it is reached, the file gets the suffix `.1`, those "
            "before it `.2`, `.3` and so on, and a new one is begun."
        ),
        examples=["256MiB"],
    )
    files: Integer = Field(
        default=4,
        ge=1,
        le=MAX_FILES,
        description="Maximum number of files of a recording. The oldest one is deleted.",
        examples=[4],
    )


class WhySettings(SettingsModel):
    """What a cache process remembers to tell why tokens were not a hit. See [why.md](why.md)."""

    remembered_chunks: Integer = Field(
        default=1_000_000,
        ge=0,
        le=1 << 28,
        description=(
            "Of how many chunks that are in no tier any more to remember why: 16 bytes each, as they are "
            "used, and 4 MiB once older ones are forgotten. With 0, all of them count as `never_stored`."
        ),
        examples=[1_000_000],
    )
    requests: Integer = Field(
        default=1000,
        ge=0,
        le=1_000_000,
        description="How many of the last requests `kvtier why` shows, of about 1 KiB each.",
        examples=[1000],
    )
    show_text: bool = Field(
        default=False,
        description=(
            "Whether the text around the position at which prompts part is kept and shown, to all who may "
            "ask this instance or its controller. Each lookup then has the tokens of its prompt."
        ),
        examples=[True],
    )


class WhatIfSettings(SettingsModel):
    """What a cache process estimates while it serves. See [whatif.md](whatif.md)."""

    enabled: bool = Field(
        default=True,
        description=(
            "Whether to estimate, from a sample of the lookups, what other capacities and eviction policies "
            "would hit. Takes up to 0.5 % of a core, and a few MB. See [whatif.md](whatif.md)."
        ),
        examples=[False],
    )
    sample_chunks: Integer = Field(
        default=8192,
        ge=256,
        le=1 << 20,
        description=(
            "Maximum number of chunks in the sample, of about 300 bytes each. A larger sample is more exact, "
            "as far as the CPU time allows it."
        ),
        examples=[8192],
    )
    half_life: Duration = Field(
        default=6 * 3600.0,
        gt=0,
        description="After this time, a lookup counts for half in the estimate.",
        examples=["6h"],
    )


class CanarySettings(SettingsModel):
    """Whether this instance tests that what is stored is served. See [canary.md](canary.md)."""

    engine: Annotated[HTTPAddresses | None, NoDecode] = Field(
        default=None,
        description=(
            "URL of a vLLM server of this host, not of a router, that stores and loads a synthetic prompt; a "
            "list for several. If omitted, there is no canary. Like `kvtier doctor --engine`. See "
            "[canary.md](canary.md)."
        ),
        examples=["http://127.0.0.1:8000"],
    )
    every: Duration = Field(
        default=60.0,
        ge=10,
        description="Time between the end of a run and the next one; longer after failures.",
        examples=["60s"],
    )
    api_key: Secret | None = Field(
        default=None, description="API key of the engine.", examples=["{env: VLLM_API_KEY}"]
    )
