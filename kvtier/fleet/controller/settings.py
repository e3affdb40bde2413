"""Settings of the controller process."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, SecretStr, TypeAdapter, model_validator

from kvtier.settings.command import CommandSettings, Token, option
from kvtier.settings.peer import Address, is_loopback, join_address, reached_from_elsewhere, split_address
from kvtier.settings.values import LocalPath
from kvtier.units import Duration

HEARTBEAT_SECONDS = 2.0
IDLE_TIMEOUT_SECONDS = 10.0
KEEP_SECONDS = 3600.0
WINDOW_SECONDS = 300.0
"""Of a hit rate."""
Span = Literal["hour", "day", "week"]
"""Of the history."""
DEFAULT_LISTEN = "127.0.0.1:9000"
SERVERS = ("redis://", "rediss://", "valkey://", "valkeys://", "unix://")


def default_state() -> Path:
    """Return the default state file, for events, pins and the history, in the user's XDG state directory."""
    folder = os.environ.get("XDG_STATE_HOME", "")
    # Relative paths must be ignored (XDG Base Directory Specification).
    base = Path(folder) if folder.startswith("/") else Path.home() / ".local" / "state"
    return base / "kvtier" / "controller.sqlite"


def _check_address(address: str) -> str:
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"{address!r} does not begin with http:// or https://")
    return address


HttpAddress = Annotated[str, AfterValidator(_check_address)]


def _check_state(state: str) -> str:
    """Return the path of a file, or the URL of a server."""
    if not state.startswith(SERVERS):
        return str(TypeAdapter(LocalPath).validate_python(state))
    address = urlsplit(state)
    if address.password is not None:
        raise ValueError("the password would be seen in the list of processes: use --state-password-file")
    # An invalid port is a ValueError of its own.
    if address.scheme != "unix" and not (address.hostname and address.port != 0):
        raise ValueError(f"{state!r} is not a URL of Redis: use redis://HOST:PORT/DATABASE")
    return state


class ServiceSettings(CommandSettings):
    """Settings of the controller process."""

    listen: Address = option(DEFAULT_LISTEN, "HOST:PORT", "Address to listen on.")
    token: Token | None = option(
        None,
        "FILE",
        "File with the token that instances and clients must send. Required unless listening on loopback. "
        "Default: `controller.token` of the settings, if any.",
    )
    instance_timeout: Duration = option(
        IDLE_TIMEOUT_SECONDS, "TIME", "Drop an instance after this time without messages.", le=3600
    )
    heartbeat: Duration = option(HEARTBEAT_SECONDS, "TIME", "Heartbeat interval of instances.", ge=0.01)
    state: Annotated[str, BeforeValidator(str), AfterValidator(_check_state)] = option(
        lambda: str(default_state()),
        "FILE|URL",
        "Where operations, pins and the history are stored: a file or, for several controllers of which one "
        "leads, the Redis or Valkey that they share, as in `redis://10.0.0.9:6379/1`.",
        shown="$XDG_STATE_HOME/kvtier/controller.sqlite",
    )
    state_password: SecretStr | None = option(
        None, "FILE", "File with the password of the server that `--state` names."
    )
    advertise: HttpAddress | None = option(
        None,
        "URL",
        "Where the other controllers reach this one. Default: the address that it listens on, with the name "
        "of this host in place of 0.0.0.0.",
    )
    keep_events: Duration = option(KEEP_SECONDS, "TIME", "Time to keep events after their end.")
    grafana: HttpAddress | None = option(None, "URL", "Address of the Grafana dashboard, to link to.")
    tls_certificate: LocalPath | None = option(None, "FILE", "Serve HTTPS with this PEM certificate.")
    tls_key: LocalPath | None = option(None, "FILE", "The certificate's PEM private key.")

    traces: bool = option(
        False, "", "Export OpenTelemetry spans of operations, as set by its `OTEL_*` variables."
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> ServiceSettings:
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
    def is_shared(self) -> bool:
        """Whether other controllers have the same state."""
        return self.state.startswith(SERVERS)

    def reached_at(self, port: int) -> str:
        """Return where other controllers reach this one, which listens on this port."""
        host, _ = split_address(self.listen)
        here = reached_from_elsewhere(join_address(host, port), socket.gethostname())
        return (self.advertise or f"http{'s' * (self.tls_certificate is not None)}://{here}").rstrip("/")

    @property
    def is_local(self) -> bool:
        """Whether the controller is reachable from this host only."""
        host, _ = split_address(self.listen)
        return host == "localhost" or is_loopback(host)
