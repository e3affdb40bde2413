"""What the controller is told when it is started: where it listens, who may ask, where it remembers."""

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
from kvtier.controller.registry import HEARTBEAT_SECONDS, SILENCE_SECONDS
from kvtier.errors import SettingsError
from kvtier.settings_peer import Address, FilePath, split_address
from kvtier.units import Duration

SHORTEST_TOKEN = 16
DEFAULT_LISTEN = "127.0.0.1:9000"


def default_state() -> Path:
    """Where the controller remembers events and pins: in the state directory of its user (XDG)."""
    folder = os.environ.get("XDG_STATE_HOME", "")
    # What is no absolute path is to be ignored, says the XDG specification.
    base = Path(folder) if folder.startswith("/") else Path.home() / ".local" / "state"
    return base / "kvtier" / "controller.sqlite"


class ServiceSettings(BaseModel):
    """How the controller runs."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    listen: Address = DEFAULT_LISTEN
    token: SecretStr | None = None
    state: FilePath = Field(default_factory=default_state)
    heartbeat: Annotated[Duration, Field(ge=0.01)] = HEARTBEAT_SECONDS
    silence: Annotated[Duration, Field(le=3600)] = SILENCE_SECONDS
    keep_events: Duration = KEEP_SECONDS
    tls_certificate: FilePath | None = None
    tls_key: FilePath | None = None

    @field_validator("token")
    @classmethod
    def _is_long_enough(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and len(token.get_secret_value()) < SHORTEST_TOKEN:
            raise ValueError(
                f"it has fewer than {SHORTEST_TOKEN} characters: make one with `openssl rand -hex 32`"
            )
        return token

    @model_validator(mode="after")
    def _make_sense(self) -> ServiceSettings:
        if self.silence < 2 * self.heartbeat:
            raise ValueError(
                "silence: a late heartbeat would be taken for death: write at least twice what heartbeat is"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls: write both --tls-certificate and --tls-key, or neither")
        if self.token is None and not self.is_local:
            raise ValueError(
                f"listen: {self.listen} is reached from other hosts, and whoever reaches the controller may "
                "move and clear everything: write --token-file with the file of a token (`openssl rand -hex "
                "32` makes one), or listen on 127.0.0.1"
            )
        return self

    @property
    def is_local(self) -> bool:
        """Whether only this host reaches it."""
        host, _ = split_address(self.listen)
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


def service_settings(**values: object) -> ServiceSettings:
    """The settings with these values; ``None`` for what is left out.

    Raises :class:`SettingsError`, one sentence for each that is wrong.
    """
    try:
        return ServiceSettings.model_validate(
            {name: value for name, value in values.items() if value is not None}
        )
    except ValidationError as error:
        raise SettingsError("\n".join(_sentence(one) for one in error.errors(include_url=False))) from None


def _sentence(error: object) -> str:
    assert isinstance(error, dict)
    said = str(error["msg"]).removeprefix("Value error, ")
    return f"--{str(error['loc'][0]).replace('_', '-')}: {said}" if error["loc"] else f"--{said}"
