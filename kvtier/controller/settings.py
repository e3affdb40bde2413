"""Settings of the controller process."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from kvtier.controller.events import KEEP_SECONDS
from kvtier.controller.registry import HEARTBEAT_SECONDS, IDLE_TIMEOUT_SECONDS
from kvtier.errors import SettingsError
from kvtier.settings.peer import Address, FilePath, split_address
from kvtier.units import Duration

MIN_TOKEN_CHARACTERS = 16
DEFAULT_LISTEN = "127.0.0.1:9000"


def default_state() -> Path:
    """Return the default state file, for events and pins, in the user's XDG state directory."""
    folder = os.environ.get("XDG_STATE_HOME", "")
    # Relative paths must be ignored (XDG Base Directory Specification).
    base = Path(folder) if folder.startswith("/") else Path.home() / ".local" / "state"
    return base / "kvtier" / "controller.sqlite"


class ServiceSettings(BaseModel):
    """Settings of the controller process."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    listen: Address = DEFAULT_LISTEN
    token: SecretStr | None = None
    state: FilePath = Field(default_factory=default_state)
    heartbeat: Annotated[Duration, Field(ge=0.01)] = HEARTBEAT_SECONDS
    instance_timeout: Annotated[Duration, Field(le=3600)] = IDLE_TIMEOUT_SECONDS
    keep_events: Duration = KEEP_SECONDS
    tls_certificate: FilePath | None = None
    tls_key: FilePath | None = None

    @field_validator("token")
    @classmethod
    def _is_long_enough(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and len(token.get_secret_value()) < MIN_TOKEN_CHARACTERS:
            raise ValueError(
                f"it has fewer than {MIN_TOKEN_CHARACTERS} characters: create one with `openssl rand -hex 32`"
            )
        return token

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
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


def service_settings(**values: object) -> ServiceSettings:
    """Return settings with these values. ``None`` stands for the default.

    Raises: SettingsError: one line per invalid value.
    """
    try:
        return ServiceSettings.model_validate(
            {name: value for name, value in values.items() if value is not None}
        )
    except ValidationError as error:
        raise SettingsError(
            "\n".join(_describe_error(issue) for issue in error.errors(include_url=False))
        ) from None


def _describe_error(error: object) -> str:
    assert isinstance(error, dict)
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"--{str(error['loc'][0]).replace('_', '-')}: {message}" if error["loc"] else f"--{message}"
