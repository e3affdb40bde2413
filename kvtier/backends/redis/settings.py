"""Settings of a Redis or Valkey pool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from kvtier.backends.redis.url import PoolURL, parse_url, take_credentials
from kvtier.settings import TierSettings
from kvtier.settings_secret import Secret
from kvtier.units import Duration

PemFile = Annotated[Path, AfterValidator(Path.expanduser)]

_URL_FORMS = (
    "Where the pool is: `{0}://HOST:PORT/DATABASE`, `{0}s://` for TLS, `unix:///PATH?db=0`, "
    "`{0}+sentinel://HOST:PORT,HOST:PORT/SERVICE/DATABASE`, `{0}+cluster://HOST:PORT,HOST:PORT`, the last "
    "two with `{0}s+` for TLS. A user and a password may stand before the host; better, they are in `user` "
    "and `password`."
)


def url_description(scheme: str) -> str:
    """What the documentation says of ``url``."""
    return _URL_FORMS.format(scheme)


class RedisSettings(TierSettings):
    """Settings of a tier of type ``redis``. How much the pool holds, and what goes, is its ``maxmemory``."""

    # A URL is not shown where it is wrong: it may hold a password.
    model_config = ConfigDict(hide_input_in_errors=True)

    scheme: ClassVar[str] = "redis"

    url: str = Field(description=url_description("redis"), examples=["redis://cache:6379/0"])
    user: str | None = Field(
        default=None,
        description="The server's user (ACL). Left out: its default user.",
        examples=["kvtier"],
    )
    password: Secret | None = Field(
        default=None,
        description="The password: as text, `{env: NAME}` or `{file: PATH}`.",
        examples=["{env: POOL_PASSWORD}"],
    )
    sentinel_user: str | None = Field(
        default=None,
        description="The user for the sentinels, where they have one.",
        examples=["kvtier"],
    )
    sentinel_password: Secret | None = Field(
        default=None,
        description="The password for the sentinels, where they have one: written like `password`.",
        examples=["{env: SENTINEL_PASSWORD}"],
    )
    ca_file: PemFile | None = Field(
        default=None,
        description=(
            "The certificates (PEM) by which the server's is verified. Left out: those of the system. The "
            "certificate and the host's name in it are always verified."
        ),
        examples=["/etc/kvtier/pool-ca.pem"],
    )
    certificate_file: PemFile | None = Field(
        default=None,
        description="The certificate (PEM) that is shown to a server that asks for one.",
        examples=["/etc/kvtier/client.pem"],
    )
    key_file: PemFile | None = Field(
        default=None,
        description="The private key of `certificate_file`. Left out: it is in the same file.",
        examples=["/etc/kvtier/client-key.pem"],
    )
    ttl: Duration | None = Field(
        default=None,
        ge=0.001,
        description="After which time the server forgets a chunk. Left out: when its `maxmemory` wants room.",
        examples=["24h"],
    )
    connections: int = Field(
        default=4,
        ge=1,
        le=64,
        description=(
            "How many connections to each server carry chunks at once. One more is kept for look-ups, which "
            "so wait for no chunk."
        ),
        examples=[8],
    )
    prefix: str = Field(
        default="kvtier:",
        max_length=256,
        description="What the name of each key on the server begins with.",
        examples=["kvtier:"],
    )

    @model_validator(mode="before")
    @classmethod
    def _take_credentials_from_url(cls, values: Any) -> Any:  # noqa: ANN401 - what pydantic was given
        if not isinstance(values, Mapping) or not isinstance(values.get("url"), str):
            return values
        url, credentials = take_credentials(values["url"])
        given = {name: value for name, value in credentials._asdict().items() if value is not None}
        if any(values.get(name) is not None for name in given):
            return values  # The validator of `url` says so.
        return {**values, **given, "url": url}

    @field_validator("url")
    @classmethod
    def _is_a_place(cls, url: str) -> str:
        parse_url(url, cls.scheme)
        return url

    @field_validator("ca_file", "certificate_file", "key_file")
    @classmethod
    def _is_for_tls(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        url = info.data.get("url")
        if path is not None and url is not None and not parse_url(url, cls.scheme).tls:
            raise ValueError(f"it is for TLS, which `url` does not ask for: write {cls.scheme}s:// there")
        return path

    @field_validator("key_file")
    @classmethod
    def _has_its_certificate(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None and info.data.get("certificate_file") is None:
            raise ValueError("it is the key of a certificate: write `certificate_file`, too")
        return path

    @property
    def place(self) -> PoolURL:
        """What ``url`` says."""
        return parse_url(self.url, self.scheme)
