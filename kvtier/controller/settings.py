"""Settings of the controller process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, model_validator

from kvtier.settings.command import CommandSettings, Option, Token
from kvtier.settings.peer import Address, FilePath, is_loopback, split_address
from kvtier.units import Duration

HEARTBEAT_SECONDS = 2.0
IDLE_TIMEOUT_SECONDS = 10.0
KEEP_SECONDS = 3600.0
DEFAULT_LISTEN = "127.0.0.1:9000"


def default_state() -> Path:
    """Return the default state file, for events and pins, in the user's XDG state directory."""
    folder = os.environ.get("XDG_STATE_HOME", "")
    # Relative paths must be ignored (XDG Base Directory Specification).
    base = Path(folder) if folder.startswith("/") else Path.home() / ".local" / "state"
    return base / "kvtier" / "controller.sqlite"


class ServiceSettings(CommandSettings):
    """Settings of the controller process."""

    listen: Annotated[Address, Option("HOST:PORT", "Address to listen on.")] = DEFAULT_LISTEN
    token: Annotated[
        Token | None,
        Option(
            "FILE",
            "File with the token that instances and clients must send. Required unless listening on "
            "loopback. Default: `controller.token` of the settings, if any.",
            kind=SecretStr,
        ),
    ] = None
    instance_timeout: Annotated[
        Duration, Field(le=3600), Option("TIME", "Drop an instance after this time without messages.")
    ] = IDLE_TIMEOUT_SECONDS
    heartbeat: Annotated[Duration, Field(ge=0.01), Option("TIME", "Heartbeat interval of instances.")] = (
        HEARTBEAT_SECONDS
    )
    state: Annotated[
        FilePath,
        Option(
            "FILE",
            "File to store events and pins in.",
            kind=Path,
            shown="$XDG_STATE_HOME/kvtier/controller.sqlite",
        ),
    ] = Field(default_factory=default_state)
    keep_events: Annotated[Duration, Option("TIME", "Time to keep events after their end.")] = KEEP_SECONDS
    tls_certificate: Annotated[
        FilePath | None, Option("FILE", "Serve HTTPS with this PEM certificate.", kind=Path)
    ] = None
    tls_key: Annotated[FilePath | None, Option("FILE", "The certificate's PEM private key.", kind=Path)] = (
        None
    )

    @model_validator(mode="after")
    def _make_sense(self) -> ServiceSettings:
        if self.instance_timeout < 2 * self.heartbeat:
            raise ValueError(
                "instance-timeout: it must be at least twice the heartbeat interval, or one late heartbeat "
                "disconnects an instance"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls: set both --tls-certificate and --tls-key, or neither")
        if self.token is None and not self.is_local:
            raise ValueError(
                f"listen: {self.listen} is reachable from other hosts, whose clients could move and clear "
                "everything: set --token-file to the file of a token (`openssl rand -hex 32` creates one), "
                "or listen on 127.0.0.1"
            )
        return self

    @property
    def is_local(self) -> bool:
        """Whether the controller is reachable from this host only."""
        host, _ = split_address(self.listen)
        return host == "localhost" or is_loopback(host)
