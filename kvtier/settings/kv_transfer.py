"""Settings for disaggregated serving: the role of an instance and the KV transfer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kvtier.settings.peer import Address
from kvtier.units import Duration, Size

Role = Literal["both", "prefill", "decode"]
"""Which part of a request an engine computes: prefill, decode, or both."""


class KVTransferSettings(BaseModel):
    """Transfer of a prompt's KV from the prefill instance to the decode instance."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout: Duration = Field(
        default=10.0,
        gt=0,
        le=600,
        description=(
            "How long a request on the decode instance waits for chunks in transfer. After that the decode "
            "instance computes the rest. A request may set a shorter timeout, not a longer one."
        ),
        examples=["10s"],
    )
    reserve: Duration = Field(
        default=30.0,
        gt=0,
        le=600,
        description=(
            "How long the decode instance reserves memory for an announced chunk. After that the memory is "
            "released, and the decode instance computes the chunk."
        ),
        examples=["30s"],
    )
    buffer: Size | None = Field(
        default=None,
        ge=4096,
        description=(
            "Maximum bytes of the decode instance's first tier that prefill instances may reserve at once. "
            "Chunks beyond this are not transferred. If omitted, `peer.share` of that tier. With `device: "
            "cuda` also the size of the staging buffer on each GPU, on both sides; if omitted, 1GiB."
        ),
        examples=["4GiB"],
    )
    targets: list[Address] = Field(
        default_factory=list,
        max_length=4096,
        description=(
            "Decode instances that requests may name, each as the `HOST:PORT` that the proxy names, which it "
            "logs for each engine. A request has KV transferred only to these, to `peer.others`, and to "
            "instances that are registered with the controller."
        ),
        examples=['["10.0.0.3:8201"]'],
    )
    device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description=(
            "Memory that chunks are transferred through. `cpu`: the first tier on both sides. `cuda`: a "
            "staging buffer in GPU memory on both sides, written by NIXL; requires `nixl` as "
            "`peer.transport`. Chunks that cannot use the staging buffer go through the first tier."
        ),
        examples=["cpu"],
    )
