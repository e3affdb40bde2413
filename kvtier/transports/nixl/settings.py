"""Settings of the transport ``nixl``."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import Field

from kvtier.transports.base import TransportSettings

UCX_DEFAULTS = {
    # UCX writes every error to standard error, and each lost peer many times.
    "LOG_LEVEL": "fatal",
    # Abort at once, without a backtrace or debugger, which take seconds.
    "HANDLE_ERRORS": "none",
    # Hooks for all functions that free memory, which take half a second per process. The arena never moves.
    "MEM_EVENTS": "n",
    # Reads over TCP are segmented; UCX's default of 8 KiB makes them three times as slow.
    "TCP_TX_SEG_SIZE": "256k",
    "TCP_RX_SEG_SIZE": "256k",
}
"""UCX variables, without the prefix ``UCX_``."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")]


class NixlSettings(TransportSettings):
    """Settings of the transport ``nixl``."""

    backends: tuple[Name, ...] = Field(
        default=("UCX",),
        min_length=1,
        description="NIXL backends to use. Both hosts need at least one in common.",
        examples=[["UCX"]],
    )
    options: dict[str, str | int] = Field(
        default_factory=dict,
        description="NIXL's parameters for creating each of these backends.",
        examples=[{"num_workers": 2, "ucx_devices": "mlx5_0"}],
    )
    ucx: dict[Name, str | int] = Field(
        default_factory=dict,
        description=(
            "UCX variables, without the prefix `UCX_`. Variables set in the environment take precedence."
        ),
        examples=[{"TLS": "tcp,sm,self"}],
    )

    def environment(self) -> dict[str, str]:
        """Return the environment of a NIXL process: this process's, then these settings, then defaults."""
        values = UCX_DEFAULTS | {name.removeprefix("UCX_"): str(value) for name, value in self.ucx.items()}
        configured = {"NIXL_LOG_LEVEL": "FATAL"} | {f"UCX_{name}": value for name, value in values.items()}
        return configured | os.environ
