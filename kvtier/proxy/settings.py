"""Settings of the proxy: its listen address, its engines, and its limits."""

from __future__ import annotations

import ipaddress
from typing import Annotated, NamedTuple

import httpx
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from kvtier.errors import SettingsError
from kvtier.settings.peer import Address, split_address
from kvtier.units import GIB, KIB, MIB, Duration, Size

DEFAULT_LISTEN = "127.0.0.1:9000"
MIN_TOKEN_LENGTH = 16
MAX_ENGINES = 256
MAX_BODY_BYTES = 64 * MIB
"""Upper limit of ``max_body``. Bodies are parsed on the event loop, which takes tens of ms at this size."""


class EngineAddress(NamedTuple):
    """An engine as written on the command line."""

    url: str
    peer: str | None = None

    @classmethod
    def of(cls, text: str) -> EngineAddress:
        """Parse ``URL`` or ``URL=HOST:PORT``. Raises ``ValueError`` with the expected form."""
        url, equals, peer = text.partition("=")
        return cls(engine_url(url), peer_address(peer) if equals else None)


def engine_url(text: str) -> str:
    """Return the URL without a trailing slash or ``/v1``.

    Raises ``ValueError`` if it is not an HTTP URL, or contains credentials.
    """
    try:
        url = httpx.URL(text.strip())
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"{text!r} is not a URL ({error}): write one like http://10.0.0.1:8100") from None
    if url.scheme not in {"http", "https"} or not url.host or url.query or url.fragment:
        raise ValueError(f"{text!r} is not an engine URL: write one like http://10.0.0.1:8100")
    if url.userinfo:
        raise ValueError(
            f"the URL of {url.host} contains a user name or password, which logs would show: leave it out; "
            "clients' API keys are forwarded, and --engine-key-file holds the proxy's own key"
        )
    return str(url).rstrip("/").removesuffix("/v1")


def peer_address(text: str) -> str:
    """Return ``text``. Raises ``ValueError`` if it is not an address that a peer can connect to."""
    host, port = split_address(text)
    if host in {"0.0.0.0", "::", "*"} or not port:  # noqa: S104 - compared, not bound
        raise ValueError(f"{text!r} cannot be connected to: write the address at which prefillers reach it")
    return text


class ProxySettings(BaseModel):
    """Settings of the proxy. Sizes are in bytes, durations in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    listen: Address = DEFAULT_LISTEN
    controller: str | None = None
    controller_token: SecretStr | None = None
    engine_key: SecretStr | None = None
    token: SecretStr | None = None
    min_prefill: Annotated[int, Field(ge=0)] = 256
    max_cached: Annotated[float, Field(gt=0, le=1)] = 0.8
    timeout: Annotated[Duration, Field(ge=0, le=600)] = 10.0
    prefill_timeout: Annotated[Duration, Field(gt=0)] = 120.0
    idle_timeout: Annotated[Duration, Field(gt=0)] = 600.0
    check: Annotated[Duration, Field(ge=0.05, le=3600)] = 2.0
    drain: Duration = 60.0
    max_requests: Annotated[int, Field(ge=1, le=65_536)] = 1024
    max_body: Annotated[Size, Field(ge=KIB, le=MAX_BODY_BYTES)] = 32 * MIB
    max_held: Annotated[Size, Field(ge=KIB)] = GIB
    remember: Annotated[int, Field(ge=0, le=100_000_000)] = 1_000_000

    @field_validator("prefill", "decode")
    @classmethod
    def _check_engines(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if len(values) > MAX_ENGINES:
            raise ValueError(f"more than {MAX_ENGINES} engines: start another proxy")
        urls = [EngineAddress.of(value).url for value in values]
        if duplicate := next((url for url in urls if urls.count(url) > 1), None):
            raise ValueError(f"{duplicate} is listed twice: list it once")
        return values

    @field_validator("controller")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        return None if url is None else engine_url(url)

    @field_validator("token")
    @classmethod
    def _check_token_length(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and len(token.get_secret_value()) < MIN_TOKEN_LENGTH:
            raise ValueError(
                f"it has fewer than {MIN_TOKEN_LENGTH} characters: make one with `openssl rand -hex 32`"
            )
        return token

    @model_validator(mode="after")
    def _check_max_held(self) -> ProxySettings:
        if self.max_held < self.max_body:
            raise ValueError("max_held: it must be at least max_body")
        return self

    @property
    def prefillers(self) -> list[EngineAddress]:
        """The prefill engines, parsed."""
        return [EngineAddress.of(text) for text in self.prefill]

    @property
    def decoders(self) -> list[EngineAddress]:
        """The decode engines, parsed."""
        return [EngineAddress.of(text) for text in self.decode]


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address, IPv4-mapped IPv6 included."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def proxy_settings(**values: object) -> ProxySettings:
    """Return settings with these values; ``None`` stands for the default.

    Raises :class:`SettingsError` with one line per invalid value.
    """
    try:
        return ProxySettings.model_validate(
            {name: value for name, value in values.items() if value is not None}
        )
    except ValidationError as error:
        raise SettingsError("\n".join(_message(entry) for entry in error.errors(include_url=False))) from None


def _message(error: object) -> str:
    assert isinstance(error, dict)
    text = str(error["msg"]).removeprefix("Value error, ")
    return f"--{str(error['loc'][0]).replace('_', '-')}: {text}" if error["loc"] else f"--{text}"
