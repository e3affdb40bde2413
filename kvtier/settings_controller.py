"""What an instance is told of its controller, and of who collects its metrics."""

from __future__ import annotations

import os
import socket
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kvtier.settings_peer import Address
from kvtier.settings_secret import Secret

INSTANCE_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


def _is_a_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.username:
        raise ValueError(
            f"{url!r} is no address of a controller: write http://HOST:PORT or https://HOST:PORT"
        )
    return url.rstrip("/")


ControllerURL = Annotated[str, AfterValidator(_is_a_url)]


class ControllerSettings(BaseModel):
    """Which controller this instance registers with, and as what. Left out: with none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: ControllerURL | None = Field(
        default=None,
        description=(
            "Where the controller is. Left out: this instance registers with none. It serves and fetches "
            "without one, too, and while it cannot reach it."
        ),
        examples=["http://controller:9000"],
    )
    instance_id: str | None = Field(
        default=None,
        pattern=INSTANCE_ID,
        description=(
            "What this instance is called there. No two instances share one. Left out: the host's name and "
            "the number of the process."
        ),
        examples=["decode-1"],
    )
    token: Secret | None = Field(
        default=None,
        description="The token that the controller asks for.",
        examples=["{file: /etc/kvtier/controller-token}"],
    )
    ask: bool = Field(
        default=True,
        description=(
            "Ask the controller which instances hold a prompt that neither this one nor the peers in "
            "`peer.others` have, and fetch it from there. Needs `peer.secret` or `peer.tls`."
        ),
        examples=[True],
    )

    @property
    def instance_name(self) -> str:
        """``instance_id``, or what stands in for it."""
        return self.instance_id or f"{socket.gethostname()}-{os.getpid()}"


class MetricsSettings(BaseModel):
    """Where Prometheus reads this instance's metrics. Left out: nowhere."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listen: Address | None = Field(
        default=None,
        description=(
            "Where `/metrics` is served, `HOST:PORT`. `127.0.0.1` lets in this host alone. Left out: it is "
            "not served."
        ),
        examples=["127.0.0.1:9464"],
    )
