"""Settings of a tier of type ``mooncake``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from kvtier.settings import TierSettings
from kvtier.units import Integer, Size

MIN_SEGMENT_BYTES = 16 << 20
"""The smallest segment that the library accepts."""


class MooncakeSettings(TierSettings):
    """Settings of a tier of type ``mooncake``."""

    master: str = Field(
        description="Address of `mooncake_master`, `HOST:PORT`.",
        examples=["mooncake:50051"],
    )
    metadata_server: str = Field(
        default="P2PHANDSHAKE",
        description=(
            "How clients discover each other: `P2PHANDSHAKE`, directly, or the URL of a metadata server. "
            "Must be the same for all clients of the pool."
        ),
        examples=["http://mooncake:8080/metadata"],
    )
    protocol: Literal["tcp", "rdma"] = Field(
        default="tcp",
        description=(
            "Transport of chunks. Must be the same for all clients of the pool. With `rdma` all of them can "
            "access the first tier's memory; Mooncake has no authentication: isolate its network."
        ),
        examples=["rdma"],
    )
    device: str = Field(
        default="",
        description="RDMA devices to use, separated by commas. If omitted, the library chooses.",
        examples=["mlx5_0,mlx5_1"],
    )
    local_hostname: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "Name or address at which other hosts reach this one. If omitted, the local address of the "
            "connection to the master."
        ),
        examples=["10.0.0.7"],
    )
    segment_size: Size = Field(
        default=0,
        ge=0,
        description=(
            "Memory that this host contributes to the pool, at least 16MiB. Chunks in it are lost when the "
            "cache process exits. 0: none; the tier only uses the memory of other hosts."
        ),
        examples=["32GiB"],
    )
    replicas: Integer = Field(
        default=1,
        ge=1,
        le=64,
        description="Number of segments that hold each chunk, if the pool has that many.",
        examples=[2],
    )
    soft_pin: bool = Field(
        default=False,
        description="Ask the pool to evict other clients' chunks before those of this host.",
        examples=[True],
    )
    prefix: str = Field(
        default="kvtier:",
        max_length=256,
        description="Prefix of all keys in the pool.",
        examples=["production:"],
    )

    @field_validator("master")
    @classmethod
    def _validate_address(cls, master: str) -> str:
        host, _, port = master.rpartition(":")
        if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{master!r} is not HOST:PORT: use for example mooncake:50051")
        return master

    @field_validator("segment_size")
    @classmethod
    def _validate_segment_size(cls, segment_size: int) -> int:
        if 0 < segment_size < MIN_SEGMENT_BYTES:
            raise ValueError("a segment must be at least 16MiB, or 0 for none")
        return segment_size
