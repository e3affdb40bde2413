"""Settings of the connection to the controller."""

from __future__ import annotations

import os
import socket
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

from kvtier.settings.values import Secret, SettingsModel, parse_json

INSTANCE_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


def _validate_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.username:
        raise ValueError(f"{url!r} is not a valid URL: use http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/")


def _parse_list(value: object) -> object:
    """Parse the JSON of a variable that has a list; a single URL needs none."""
    return parse_json(value) if isinstance(value, str) and value.lstrip().startswith("[") else value


HTTPAddress = Annotated[str, AfterValidator(_validate_url)]
HTTPAddresses = Annotated[HTTPAddress | list[HTTPAddress], BeforeValidator(_parse_list)]
"""One URL, or a list. A field of this type is marked with ``NoDecode``."""


class ControllerSettings(SettingsModel):
    """The controller that this instance registers with. If omitted, the instance runs without one."""

    url: Annotated[HTTPAddresses | None, NoDecode] = Field(
        default=None,
        description=(
            "URL of the controller, or of each of several that share a `--state`. If omitted, the instance "
            "does not register. Serving and fetching work without a controller, and while it is unreachable."
        ),
        examples=["http://controller:9000"],
    )
    instance_id: str | None = Field(
        default=None,
        pattern=INSTANCE_ID,
        description=(
            "Name of this instance at the controller. Must be unique. If omitted, the host name and the "
            "process ID."
        ),
        examples=["decode-1"],
    )
    token: Secret | None = Field(
        default=None,
        description="Bearer token of the controller.",
        examples=["{file: /etc/kvtier/controller-token}"],
    )
    ask: bool = Field(
        default=True,
        description=(
            "On a miss here and on the peers in `peer.others`, ask the controller which instances hold the "
            "prompt, and fetch it from there. Requires `peer.secret` or `peer.tls`."
        ),
        examples=[True],
    )

    @property
    def urls(self) -> list[str]:
        """``url`` as a list; empty if it is omitted."""
        return [self.url] if isinstance(self.url, str) else self.url or []

    @property
    def instance_name(self) -> str:
        """``instance_id``, or its default."""
        return self.instance_id or f"{socket.gethostname()}-{os.getpid()}"
