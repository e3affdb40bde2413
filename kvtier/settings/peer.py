"""Settings for peers: addresses, authentication, transport, limits, and the KV transfer to them."""

from __future__ import annotations

import ipaddress
import math
import string
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from kvtier.settings.values import Choice, LocalPath, Secret, SettingsModel
from kvtier.units import Duration, Fraction, Size

MIN_SECRET_CHARACTERS = 16
"""Minimum length of a secret. A shorter one can be brute-forced from one captured handshake."""
SECRET_BITS = 256
COMMAND = "openssl rand -hex 32"
GUESSABLE = "it has less than 32 random bytes, so a server that gets a proof of it may guess it"
GUESSABLE_REMEDY = f"set the output of `{COMMAND}` on all instances"
WILDCARDS = frozenset(("0.0.0.0", "::", "*"))  # noqa: S104 - compared, not bound
_ALPHABETS = (
    string.digits,
    string.hexdigits[:16],
    string.digits + string.hexdigits[16:],
    string.ascii_lowercase,
    string.ascii_letters + string.digits,
)


Role = Literal["both", "prefill", "decode"]
"""Which part of a request an engine computes: prefill, decode, or both."""


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[HOST]:PORT``. Raises ``ValueError`` with the remedy."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r} is ambiguous: put an IPv6 address in brackets, as in [::1]:8200")
    if not host or not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not an address: use HOST:PORT, as in 10.0.0.2:8200")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return ``HOST:PORT``, or ``[HOST]:PORT`` for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reached_from_elsewhere(listen: str, host: str) -> str:
    """Return a listen address as other hosts reach it: ``host`` takes the place of a wildcard.

    Raises ``ValueError`` if it is not an address.
    """
    bound, port = split_address(listen)
    return join_address(host if bound in WILDCARDS else bound, port)


def is_loopback(host: str) -> bool:
    """Return whether an IP address is a loopback address, IPv4-mapped IPv6 included."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _validate_address(address: str) -> str:
    split_address(address)
    return address


Address = Annotated[str, AfterValidator(_validate_address)]


class TLSSettings(SettingsModel):
    """Certificates for mutual authentication and encryption between instances."""

    certificate: LocalPath = Field(
        description="Certificate file of this instance (PEM).", examples=["/etc/kvtier/peer.pem"]
    )
    key: LocalPath = Field(
        description="Private key file of the certificate (PEM).", examples=["/etc/kvtier/peer.key"]
    )
    authority: LocalPath = Field(
        description="File of the CA that must have signed every peer's certificate (PEM).",
        examples=["/etc/kvtier/authority.pem"],
    )


class PeerSettings(SettingsModel):
    """How this instance and its peers serve their tiers to each other. If omitted, it has no peers."""

    listen: Address | None = Field(
        default=None,
        description=(
            "Address to serve peers on, `HOST:PORT`. `127.0.0.1` accepts local peers only, `0.0.0.0` every "
            "peer that authenticates. If omitted, this instance does not serve peers."
        ),
        examples=["0.0.0.0:8200"],
    )
    others: list[Address] = Field(
        default_factory=list,
        max_length=256,
        description="Peers to fetch from, each as `HOST:PORT` reachable from this host.",
        examples=['["10.0.0.2:8200"]'],
    )
    secret: Secret | None = Field(
        default=None,
        description=(
            "Secret shared by all instances. Both sides of a connection prove that they know it before "
            f"anything else is read; it is never sent. At least {MIN_SECRET_CHARACTERS} characters. Without "
            "`tls`, traffic is neither encrypted nor signed: use it on a trusted network only."
        ),
        examples=["{file: /etc/kvtier/secret}"],
    )
    tls: TLSSettings | None = Field(
        default=None,
        description="Mutual TLS: certificates instead of, or besides, the secret. Encrypts all traffic.",
        examples=["{certificate: peer.pem, key: peer.key, authority: authority.pem}"],
    )
    transport: Annotated[Choice, NoDecode] = Field(
        default={"type": "tcp"},
        description=(
            "Transport for chunks: `tcp`, `nixl`, or one provided by a plugin; or a mapping of its settings "
            "with its name as `type`. Must be the same on all peers."
        ),
        examples=["nixl"],
    )
    lease: Duration = Field(
        default=10.0,
        gt=0,
        le=600,
        description=(
            "How long chunks granted to a peer are protected from eviction until the peer fetches them."
        ),
        examples=["10s"],
    )
    share: Fraction = Field(
        default=0.5,
        description="Maximum fraction of the first tier's capacity that may be leased to peers at once.",
        examples=[0.5],
    )
    timeout: Duration = Field(
        default=0.1,
        gt=0,
        description=(
            "How long a lookup waits for the peers' answers. A peer that has not answered by then counts as "
            "a miss."
        ),
        examples=["100ms"],
    )

    codec: Annotated[Choice, NoDecode] = Field(
        default={"type": "identity"},
        description=(
            "Codec of the chunks that peers fetch: `identity` sends them as they are, `lossless` in fewer "
            "bytes (bfloat16: 1.4 times), `auto` does that for each peer while it pays, as measured; plugins "
            "provide others. Or a mapping of its settings with its name as `type`. Without loss only. Both "
            "sides need it: others, and `nixl`, send chunks as they are."
        ),
        examples=["auto"],
    )

    @field_validator("secret")
    @classmethod
    def _check_secret_length(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and len(secret.get_secret_value()) < MIN_SECRET_CHARACTERS:
            raise ValueError(
                f"it has fewer than {MIN_SECRET_CHARACTERS} characters: generate one with `{COMMAND}`"
            )
        return secret

    @model_validator(mode="after")
    def _check_credentials(self) -> PeerSettings:
        if self.used and not self.has_credentials:
            raise ValueError(
                "peers must authenticate: set peer.secret, such as {file: /etc/kvtier/secret}, or peer.tls"
            )
        return self

    @property
    def guessable(self) -> bool:
        """Whether the secret may be guessed from a proof of it: it cannot be 32 random bytes."""
        if self.secret is None or self.tls is not None:  # With TLS, only a certified server gets a proof.
            return False
        return max_bits(self.secret.get_secret_value()) < SECRET_BITS

    @property
    def has_credentials(self) -> bool:
        """Whether this instance can authenticate to peers."""
        return self.secret is not None or self.tls is not None

    @property
    def used(self) -> bool:
        """Whether this instance serves peers or fetches from them."""
        return self.listen is not None or bool(self.others)


def max_bits(secret: str) -> float:
    """Return how many bits of randomness a secret can have at most, by its length and its characters."""
    text = secret.rstrip("=")  # The padding of Base64.
    sizes = [len(alphabet) for alphabet in _ALPHABETS if set(text) <= set(alphabet)]
    return len(text) * math.log2(min(sizes, default=len(string.printable.strip())))


class KVTransferSettings(SettingsModel):
    """Transfer of a prompt's KV from the prefill instance to the decode instance."""

    timeout: Duration = Field(
        default=10.0,
        gt=0,
        le=600,
        description=(
            "How long a request on the decode instance waits for chunks in transfer. After that the decode "
            "instance computes the rest. A request may set a shorter timeout, not a longer one."
        ),
        examples=["10s"],
    )
    reserve: Duration = Field(
        default=30.0,
        gt=0,
        le=600,
        description=(
            "How long the decode instance reserves memory for an announced chunk. After that the memory is "
            "released, and the decode instance computes the chunk."
        ),
        examples=["30s"],
    )
    buffer: Size | None = Field(
        default=None,
        ge=4096,
        description=(
            "Maximum bytes of the decode instance's first tier that prefill instances may reserve at once. "
            "Chunks beyond this are not transferred. If omitted, `peer.share` of that tier. With `device: "
            "cuda` also the size of the staging buffer on each GPU, on both sides; if omitted, 1GiB."
        ),
        examples=["4GiB"],
    )
    targets: list[Address] = Field(
        default_factory=list,
        max_length=4096,
        description=(
            "Decode instances that requests may name, each as the `HOST:PORT` that the proxy names, which it "
            "logs for each engine. A request has KV transferred only to these, to `peer.others`, and to "
            "instances that are registered with the controller."
        ),
        examples=['["10.0.0.3:8201"]'],
    )
    device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description=(
            "Memory that chunks are transferred through. `cpu`: the first tier on both sides. `cuda`: a "
            "staging buffer in GPU memory on both sides, written by NIXL; requires `nixl` as "
            "`peer.transport`. Chunks that cannot use the staging buffer go through the first tier."
        ),
        examples=["cpu"],
    )
