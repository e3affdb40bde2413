"""Whether an engine prefills for others, decodes for others, or both, and how KV is handed over."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kvtier.units import Duration, Size

Role = Literal["both", "prefill", "decode"]
"""What an engine does: everything, or one of the two halves of a request."""


class HandOverSettings(BaseModel):
    """How the KV of a prompt goes from the engine that computes it to the one that decodes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    patience: Duration = Field(
        default=10.0,
        gt=0,
        le=600,
        description=(
            "How long a request waits at the decoder for chunks that are being handed over to it; then the "
            "rest is computed there. A request may ask for less, not for more."
        ),
        examples=["10s"],
    )
    reserve: Duration = Field(
        default=30.0,
        gt=0,
        le=600,
        description=(
            "How long the decoder keeps room for a chunk that a prefiller has announced; then the room goes "
            "back, and the chunk is computed where it is needed."
        ),
        examples=["30s"],
    )
    buffer: Size | None = Field(
        default=None,
        ge=4096,
        description=(
            "The most bytes of the decoder's first tier that prefillers may have reserved at once; what is "
            "beyond is not handed over. Left out: `peer.share` of that tier. With `device: cuda` also the "
            "bytes of the buffer on each GPU, on either side; left out, 1GiB."
        ),
        examples=["4GiB"],
    )
    device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description=(
            "Where chunks lie while they are handed over: `cpu` is the memory of the first tier on both "
            "sides. `cuda` is a buffer in the memory of the engine's GPU, from which NIXL writes into the "
            "other's; it needs `nixl` as `peer.transport`. What cannot go that way goes through the first "
            "tier."
        ),
        examples=["cpu"],
    )
