"""Settings of a Redis or Valkey pool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from kvtier.backends.redis.url import PoolURL, parse_url, take_credentials
from kvtier.settings import LocalPath, TierSettings
from kvtier.settings.secret import Secret
from kvtier.units import Duration, Integer

_URL_FORMS = (
    "URL of the pool: `{0}://HOST:PORT/DATABASE`, `{0}s://` for TLS, `unix:///PATH?db=0`, "
    "`{0}+sentinel://HOST:PORT,HOST:PORT/SERVICE/DATABASE`, `{0}+cluster://HOST:PORT,HOST:PORT`, the last "
    "two with `{0}s+` for TLS. May contain a user and a password before the host; prefer `user` and "
    "`password`."
)


def url_description(scheme: str) -> str:
    """Return the description of the setting ``url``."""
    return _URL_FORMS.format(scheme)


class RedisSettings(TierSettings):
    """Settings of a tier of type ``redis``. The server's ``maxmemory`` controls capacity and eviction."""

    # Error messages must not show an invalid URL: it may contain a password.
    model_config = ConfigDict(hide_input_in_errors=True)

    scheme: ClassVar[str] = "redis"

    url: str = Field(description=url_description("redis"), examples=["redis://cache:6379/0"])
    user: str | None = Field(
        default=None,
        description="ACL user on the server. If omitted, its default user.",
        examples=["kvtier"],
    )
    password: Secret | None = Field(
        default=None,
        description="Password: as text, `{env: NAME}` or `{file: PATH}`.",
        examples=["{env: POOL_PASSWORD}"],
    )
    sentinel_user: str | None = Field(
        default=None,
        description="User for the sentinels, if they require one.",
        examples=["kvtier"],
    )
    sentinel_password: Secret | None = Field(
        default=None,
        description="Password for the sentinels, if they require one, in the form of `password`.",
        examples=["{env: SENTINEL_PASSWORD}"],
    )
    ca_file: LocalPath | None = Field(
        default=None,
        description=(
            "CA certificates (PEM) to verify the server with. If omitted, those of the system. The "
            "certificate and its host name are always verified."
        ),
        examples=["/etc/kvtier/pool-ca.pem"],
    )
    certificate_file: LocalPath | None = Field(
        default=None,
        description="Client certificate (PEM), if the server requires one.",
        examples=["/etc/kvtier/client.pem"],
    )
    key_file: LocalPath | None = Field(
        default=None,
        description="Private key of `certificate_file`. If omitted, it is read from that file.",
        examples=["/etc/kvtier/client-key.pem"],
    )
    ttl: Duration | None = Field(
        default=None,
        ge=0.001,
        description="Time until the server expires a chunk. If omitted, only `maxmemory` evicts chunks.",
        examples=["24h"],
    )
    connections: Integer = Field(
        default=4,
        ge=1,
        le=64,
        description=(
            "Maximum connections to each server for chunks. One more is reserved for lookups, so that they "
            "do not wait for chunks."
        ),
        examples=[8],
    )
    prefix: str = Field(
        default="kvtier:",
        max_length=256,
        description="Prefix of all keys on the server.",
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
            return values  # The validator of `url` reports it.
        return {**values, **given, "url": url}

    @field_validator("url")
    @classmethod
    def _validate_url(cls, url: str) -> str:
        parse_url(url, cls.scheme)
        return url

    @field_validator("ca_file", "certificate_file", "key_file")
    @classmethod
    def _require_tls(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        url = info.data.get("url")
        if path is not None and url is not None and not parse_url(url, cls.scheme).tls:
            raise ValueError(f"it requires TLS, but `url` does not use TLS: use {cls.scheme}s:// there")
        return path

    @field_validator("key_file")
    @classmethod
    def _require_certificate(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None and info.data.get("certificate_file") is None:
            raise ValueError("it requires `certificate_file`: set that, too")
        return path

    @model_validator(mode="after")
    def _require_password(self) -> Self:
        for user, password in (("user", "password"), ("sentinel_user", "sentinel_password")):
            if getattr(self, user) is not None and getattr(self, password) is None:
                raise ValueError(f"`{user}` requires `{password}`: set that, too, or omit `{user}`")
        return self

    @property
    def pool_url(self) -> PoolURL:
        """The parsed ``url``."""
        return parse_url(self.url, self.scheme)
