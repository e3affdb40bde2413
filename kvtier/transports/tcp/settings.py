"""What an operator may say about the transport ``tcp``."""

from __future__ import annotations

from pydantic import Field

from kvtier.transports.base import TransportSettings


class TcpSettings(TransportSettings):
    """Bytes go over TCP connections to the port on which peers reach each other; no other port is opened."""

    connections: int = Field(
        default=4,
        ge=1,
        le=64,
        description=(
            "How many connections to each peer bytes are fetched over at once; each takes a thread while "
            "bytes come."
        ),
        examples=[8],
    )
    threads: int = Field(
        default=16,
        ge=1,
        le=256,
        description=(
            "How many threads send to peers at once, all together. Connections beyond that wait for one "
            "another; those that idle, or whose peer does not read, need none."
        ),
        examples=[32],
    )
