"""What a transport of type ``nixl`` can be told."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import Field

from kvtier.transports.base import TransportSettings

UCX_DEFAULTS = {
    # UCX writes to standard error whatever goes wrong, and each lost peer many times.
    "LOG_LEVEL": "fatal",
    # An abort is an abort: no backtrace, no debugger, no seconds spent on them.
    "HANDLE_ERRORS": "none",
    # Hooks into every way to give memory back, at half a second a process; the arena stays where it is.
    "MEM_EVENTS": "n",
    # A reading over TCP is done piece by piece, and the 8 KiB that UCX takes make it three times as slow.
    "TCP_TX_SEG_SIZE": "256k",
    "TCP_RX_SEG_SIZE": "256k",
}
"""Without their ``UCX_``."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")]


class NixlSettings(TransportSettings):
    """Settings of a transport of type ``nixl``."""

    backends: tuple[Name, ...] = Field(
        default=("UCX",),
        min_length=1,
        description="Which of NIXL's backends move the bytes. Both hosts need at least one in common.",
        examples=[["UCX"]],
    )
    options: dict[str, str | int] = Field(
        default_factory=dict,
        description="What each of these backends is told when it is made, in NIXL's own words.",
        examples=[{"num_workers": 2, "ucx_devices": "mlx5_0"}],
    )
    ucx: dict[Name, str | int] = Field(
        default_factory=dict,
        description=(
            "UCX's variables, without their `UCX_`. What the environment says already is left as it is."
        ),
        examples=[{"TLS": "tcp,sm,self"}],
    )

    def environment(self) -> dict[str, str]:
        """The variables of a process that uses NIXL: this process's own, these settings, the defaults."""
        values = UCX_DEFAULTS | {name.removeprefix("UCX_"): str(value) for name, value in self.ucx.items()}
        wanted = {"NIXL_LOG_LEVEL": "FATAL"} | {f"UCX_{name}": value for name, value in values.items()}
        return wanted | os.environ
