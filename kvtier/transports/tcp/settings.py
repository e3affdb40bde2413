"""Settings of the transport ``tcp``."""

from __future__ import annotations

from pydantic import Field

from kvtier.transports.base import TransportSettings
from kvtier.units import Integer


class TcpSettings(TransportSettings):
    """Settings of the transport ``tcp``, which connects to the port of the peers' control connections."""

    connections: Integer = Field(
        default=4,
        ge=1,
        le=64,
        description=(
            "Maximum number of parallel connections to each peer. A connection needs a thread while it "
            "transfers bytes."
        ),
        examples=[8],
    )
    threads: Integer = Field(
        default=16,
        ge=1,
        le=256,
        description=(
            "Number of threads that send to peers, shared by all connections; further connections wait. A "
            "connection that is idle, or whose peer does not read, needs no thread."
        ),
        examples=[32],
    )
