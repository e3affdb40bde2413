"""What an instance is told of the others: where it listens, who they are, and how each proves who it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_settings import NoDecode

from kvtier.settings_secret import Secret
from kvtier.units import Duration

SHORTEST_SECRET = 16
"""Characters. A shorter one can be guessed from one handshake that somebody has listened to."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[HOST]:PORT``. Raises ``ValueError``, which says what to write."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r} is ambiguous: write an IPv6 address in brackets, like [::1]:8200")
    if not host or not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is no address: write HOST:PORT, like 10.0.0.2:8200")
    return host, int(port)


def _is_an_address(address: str) -> str:
    split_address(address)
    return address


Address = Annotated[str, AfterValidator(_is_an_address)]
FilePath = Annotated[Path, AfterValidator(Path.expanduser)]


_NAME_OR_SETTINGS = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]},
    ]
}


class TLSSettings(BaseModel):
    """Certificates by which instances prove to each other who they are, and encrypt what they say."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    certificate: FilePath = Field(
        description="The file with this instance's certificate, in PEM.", examples=["/etc/kvtier/peer.pem"]
    )
    key: FilePath = Field(
        description="The file with the certificate's private key, in PEM.", examples=["/etc/kvtier/peer.key"]
    )
    authority: FilePath = Field(
        description="The file with the authority that must have signed every peer's certificate, in PEM.",
        examples=["/etc/kvtier/authority.pem"],
    )


class PeerSettings(BaseModel):
    """How this instance and its peers serve their tiers to each other. Left out: it has no peers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listen: Address | None = Field(
        default=None,
        description=(
            "Where peers reach this instance, `HOST:PORT`. `127.0.0.1` lets in this host alone, `0.0.0.0` "
            "any that proves the secret or the certificate. Left out: it serves nobody."
        ),
        examples=["0.0.0.0:8200"],
    )
    others: list[Address] = Field(
        default_factory=list,
        max_length=256,
        description="The peers whose tiers to fetch from, as they are reached from here, `HOST:PORT` each.",
        examples=['["10.0.0.2:8200"]'],
    )
    secret: Secret | None = Field(
        default=None,
        description=(
            "What all instances know and nobody else: each side of a connection proves that it does before "
            f"anything else is read. At least {SHORTEST_SECRET} characters; it never travels. Without `tls`, "
            "what follows is neither encrypted nor signed: use it within a network that you trust."
        ),
        examples=["{file: /etc/kvtier/secret}"],
    )
    tls: TLSSettings | None = Field(
        default=None,
        description="Mutual TLS: certificates in place of the secret, or beside it; everything is encrypted.",
        examples=["{certificate: peer.pem, key: peer.key, authority: authority.pem}"],
    )
    transport: Annotated[dict[str, Any], NoDecode, WithJsonSchema(_NAME_OR_SETTINGS)] = Field(
        default={"type": "tcp"},
        description=(
            "How chunks travel: `tcp`, `nixl`, or what a plugin provides; or its settings, with its name as "
            "`type`. All peers use the same."
        ),
        examples=["nixl"],
    )
    lease: Duration = Field(
        default=10.0,
        gt=0,
        le=600,
        description=(
            "How long what a peer was told that it may fetch is kept from being evicted while it has not "
            "fetched it."
        ),
        examples=["10s"],
    )
    share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="The share of the first tier's capacity that may be kept for peers in this way at once.",
        examples=[0.5],
    )
    patience: Duration = Field(
        default=0.1,
        gt=0,
        description=(
            "How long a look-up waits for the peers' answers. Those that have not answered by then count as "
            "not having the chunks."
        ),
        examples=["100ms"],
    )

    @field_validator("transport", mode="before")
    @classmethod
    def _by_its_name(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return json.loads(value) if value.lstrip().startswith("{") else {"type": value}

    @field_validator("transport")
    @classmethod
    def _has_a_name(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(value.get("type"), str):
            return value
        raise ValueError("it names no transport: write tcp, or {type: tcp, ...}")

    @field_validator("secret")
    @classmethod
    def _is_long_enough(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and len(secret.get_secret_value()) < SHORTEST_SECRET:
            raise ValueError(
                f"it has fewer than {SHORTEST_SECRET} characters: make one with `openssl rand -hex 32`"
            )
        return secret

    @model_validator(mode="after")
    def _proves_itself(self) -> PeerSettings:
        if self.used and not self.can_prove:
            raise ValueError(
                "peers must prove who they are: write peer.secret, such as {file: /etc/kvtier/secret}, or "
                "peer.tls"
            )
        return self

    @property
    def can_prove(self) -> bool:
        """Whether this instance has what peers prove to each other who they are by."""
        return self.secret is not None or self.tls is not None

    @property
    def used(self) -> bool:
        """Whether this instance serves peers or fetches from them."""
        return self.listen is not None or bool(self.others)
