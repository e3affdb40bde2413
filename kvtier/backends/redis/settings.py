"""Settings of a Redis or Valkey pool, and its URL: of a single server, sentinels or a cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self
from urllib.parse import parse_qsl, unquote

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from kvtier.settings import LocalPath, TierSettings
from kvtier.settings.values import Secret
from kvtier.units import Duration, Integer

DEFAULT_PORT, DEFAULT_SENTINEL_PORT = 6379, 26379
MAX_DATABASES = 1 << 16

_ENDPOINT = re.compile(r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<host>[^\[\]:]+))(?::(?P<port>[0-9]{1,5}))?")
URL_FORMS = (
    "URL of the pool: `{0}://HOST:PORT/DATABASE`, `{0}s://` for TLS, `unix:///PATH?db=0`, "
    "`{0}+sentinel://HOST:PORT,HOST:PORT/SERVICE/DATABASE`, `{0}+cluster://HOST:PORT,HOST:PORT`, the last "
    "two with `{0}s+` for TLS. May contain a user and a password before the host; prefer `user` and "
    "`password`."
)


class Endpoint(NamedTuple):
    """The address of a server: host and port, or the path of a Unix socket and no port."""

    host: str
    port: int | None

    def __str__(self) -> str:
        if self.port is None:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PoolURL(NamedTuple):
    """A parsed URL, without credentials."""

    kind: Literal["single", "sentinel", "cluster"]
    tls: bool
    endpoints: tuple[Endpoint, ...]
    """The server, the sentinels, or the seed nodes of the cluster."""
    service: str = ""
    """The service name at the sentinels."""
    database: int = 0


class Credentials(NamedTuple):
    """User and password of a URL; ``None`` if absent."""

    user: str | None
    password: str | None


def take_credentials(url: str) -> tuple[str, Credentials]:
    """Split a URL into the URL without credentials, and the credentials."""
    scheme, separator, rest = url.partition("://")
    slash = rest.find("/")
    authority, path = (rest, "") if slash < 0 else (rest[:slash], rest[slash:])
    userinfo, at, hosts = authority.rpartition("@")
    if not separator or not at:
        return url, Credentials(None, None)
    user, colon, password = userinfo.partition(":")
    credentials = Credentials(unquote(user) or None, unquote(password) if colon else None)
    return f"{scheme}://{hosts}{path}", credentials


def parse_url(url: str, scheme: str) -> PoolURL:
    """Parse a URL whose scheme is ``scheme``, ``scheme`` with an ``s`` for TLS, or ``unix``.

    Raises ``ValueError``. The message quotes no part of the URL, which may contain a secret by mistake.
    """
    full_scheme, separator, rest = url.partition("://")
    address, _, query = rest.partition("?")
    authority, slash, path = address.partition("/")
    if "@" in authority:
        raise ValueError("it contains a user or password that is also set in `user` or `password`: use one")
    if separator and full_scheme == "unix":
        return _unix(authority, slash + path, query)
    transport, _, kind = full_scheme.partition("+")
    if not separator or transport not in (scheme, scheme + "s") or kind not in ("", "sentinel", "cluster"):
        raise ValueError(
            f"use {scheme}://HOST:PORT, or one of the other forms: {scheme}s:// for TLS, unix:///PATH?db=0, "
            f"{scheme}+sentinel://HOST:PORT,HOST:PORT/SERVICE/0, {scheme}+cluster://HOST:PORT,HOST:PORT"
        )
    if query:
        raise ValueError("only a unix:// URL may contain `?`: every other option is a setting")
    tls = transport == scheme + "s"
    if kind == "sentinel":
        service, _, database = path.partition("/")
        if not service:
            raise ValueError("add the service name, such as /mymaster, after the addresses of the sentinels")
        endpoints = _endpoints(authority, DEFAULT_SENTINEL_PORT)
        return PoolURL("sentinel", tls, endpoints, unquote(service), _database(database))
    endpoints = _endpoints(authority, DEFAULT_PORT)
    if kind == "cluster":
        if path.strip("/") not in ("", "0"):
            raise ValueError("a cluster has only database 0: omit the path")
        return PoolURL("cluster", tls, endpoints)
    if len(endpoints) > 1:
        raise ValueError(f"it lists several servers: use {scheme}+sentinel:// or {scheme}+cluster://")
    return PoolURL("single", tls, endpoints, database=_database(path))


def _unix(authority: str, path: str, query: str) -> PoolURL:
    options = dict(parse_qsl(query, keep_blank_values=True))
    database = options.pop("db", "")
    if authority or len(path) < 2:
        raise ValueError("a unix:// URL requires the absolute path of a socket: use unix:///run/redis.sock")
    if options:
        raise ValueError("the only option of a unix:// URL is `?db=0`")
    return PoolURL("single", False, (Endpoint(unquote(path), None),), database=_database(database))


def _database(text: str) -> int:
    if not text.rstrip("/"):
        return 0
    if not (text.isascii() and text.isdecimal()) or len(text) > 5 or int(text) >= MAX_DATABASES:
        raise ValueError("its database is not a valid number: use /0, or omit it")
    return int(text)


def _endpoints(authority: str, default_port: int) -> tuple[Endpoint, ...]:
    return tuple(_endpoint(part, default_port) for part in authority.split(","))


def _endpoint(text: str, default_port: int) -> Endpoint:
    match = _ENDPOINT.fullmatch(text)
    port = int(match["port"] or default_port) if match else 0
    if match is None or not 0 < port < 1 << 16:
        raise ValueError("an address in it is not HOST:PORT")
    return Endpoint(match["bracketed"] or match["host"], port)


class RedisSettings(TierSettings):
    """Settings of a tier of type ``redis``. The server's ``maxmemory`` controls capacity and eviction."""

    # Error messages must not show an invalid URL: it may contain a password.
    model_config = ConfigDict(hide_input_in_errors=True)

    scheme: ClassVar[str] = "redis"

    url: str = Field(description=URL_FORMS.format("redis"), examples=["redis://cache:6379/0"])
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

    # Before the fields are validated, so that their messages never contain a password.
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
