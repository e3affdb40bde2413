"""Settings for the estimate of what other capacities and policies would hit."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from kvtier.units import Duration, Integer


class WhatIfSettings(BaseModel):
    """What a cache process estimates while it serves. See [whatif.md](whatif.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
