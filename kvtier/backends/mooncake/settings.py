"""What a tier of type ``mooncake`` can be told."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from kvtier.settings import TierSettings
from kvtier.units import Size

SMALLEST_SEGMENT_BYTES = 16 << 20
"""The library takes no smaller segment."""


class MooncakeSettings(TierSettings):
    """Settings of a tier of type ``mooncake``."""

    master: str = Field(
        description="Host and port at which `mooncake_master` is reached.",
        examples=["mooncake:50051"],
    )
    metadata_server: str = Field(
        default="P2PHANDSHAKE",
        description=(
            "Where clients learn how to reach each other: `P2PHANDSHAKE`, from each other, or the URL of a "
            "metadata server. The same for all clients of the pool."
        ),
        examples=["http://mooncake:8080/metadata"],
    )
    protocol: Literal["tcp", "rdma"] = Field(
        default="tcp",
        description=(
            "How chunks travel. The same for all clients of the pool. Over `rdma` the first tier's memory is "
            "open to all of them; Mooncake knows no passwords: keep its network to yourself."
        ),
        examples=["rdma"],
    )
    device: str = Field(
        default="",
        description="The RDMA devices to use, with commas between. Left out: the library chooses.",
        examples=["mlx5_0,mlx5_1"],
    )
    local_hostname: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "The name or address under which other hosts reach this one. Left out: the address from which "
            "this host reaches the master."
        ),
        examples=["10.0.0.7"],
    )
    segment_size: Size = Field(
        default=0,
        ge=0,
        description=(
            "How much memory of this host to give to the pool, from 16MiB on; what it holds is lost when the "
            "cache process ends. 0: none, the tier only uses what others give."
        ),
        examples=["32GiB"],
    )
    replicas: int = Field(
        default=1,
        ge=1,
        le=64,
        description="How many segments shall hold each chunk; fewer do where there are fewer.",
        examples=[2],
    )
    soft_pin: bool = Field(
        default=False,
        description="Ask the pool to evict other clients' chunks before those that come from here.",
        examples=[True],
    )
    prefix: str = Field(
        default="kvtier:",
        max_length=256,
        description="What the name of each chunk in the pool begins with.",
        examples=["production:"],
    )

    @field_validator("master")
    @classmethod
    def _is_an_address(cls, master: str) -> str:
        host, _, port = master.rpartition(":")
        if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{master!r} is no host and port: write such as mooncake:50051")
        return master

    @field_validator("segment_size")
    @classmethod
    def _is_none_or_large_enough(cls, segment_size: int) -> int:
        if 0 < segment_size < SMALLEST_SEGMENT_BYTES:
            raise ValueError("a segment has at least 16MiB: write more, or 0 for none")
        return segment_size
