"""What the proxy is told when it is started: where it listens, which engines there are, and its limits."""

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
from kvtier.settings_peer import Address, split_address
from kvtier.units import GIB, KIB, MIB, Duration, Size

DEFAULT_LISTEN = "127.0.0.1:9000"
SHORTEST_TOKEN = 16
MOST_ENGINES = 256
LARGEST_BODY = 64 * MIB
"""What is parsed of a body is parsed in the event loop: one of this size takes some tens of milliseconds."""


class EngineAddress(NamedTuple):
    """An engine as it is named on the command line."""

    url: str
    peer: str | None = None

    @classmethod
    def of(cls, text: str) -> EngineAddress:
        """``URL`` or ``URL=HOST:PORT``. Raises ``ValueError``, which says what to write."""
        url, equals, peer = text.partition("=")
        return cls(engine_url(url), peer_address(peer) if equals else None)


def engine_url(text: str) -> str:
    """The URL without a slash at its end. Raises ``ValueError`` for what is none, or holds a password."""
    try:
        url = httpx.URL(text.strip())
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"{text!r} is no URL ({error}): write one like http://10.0.0.1:8100") from None
    if url.scheme not in {"http", "https"} or not url.host or url.query or url.fragment:
        raise ValueError(f"{text!r} is no URL of an engine: write one like http://10.0.0.1:8100")
    if url.userinfo:
        raise ValueError(
            f"the URL of {url.host} holds a name or a password, which would be shown: leave it out; clients' "
            "API keys are passed on, and --engine-key-file names the proxy's own"
        )
    return str(url).rstrip("/").removesuffix("/v1")


def peer_address(text: str) -> str:
    """The same. Raises ``ValueError`` where it is no address that others can connect to."""
    host, port = split_address(text)
    if host in {"0.0.0.0", "::", "*"} or not port:  # noqa: S104 - none is listened on
        raise ValueError(f"{text!r} cannot be connected to: write the address that prefillers reach it by")
    return text


class ProxySettings(BaseModel):
    """How the proxy runs. Sizes are in bytes, durations in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    listen: Address = DEFAULT_LISTEN
    controller: str | None = None
    controller_token: SecretStr | None = None
    engine_key: SecretStr | None = None
    token: SecretStr | None = None
    least_prefill: Annotated[int, Field(ge=0)] = 256
    most_cached: Annotated[float, Field(gt=0, le=1)] = 0.8
    patience: Annotated[Duration, Field(ge=0, le=600)] = 10.0
    prefill_timeout: Annotated[Duration, Field(gt=0)] = 120.0
    silence: Annotated[Duration, Field(gt=0)] = 600.0
    check: Annotated[Duration, Field(ge=0.05, le=3600)] = 2.0
    drain: Duration = 60.0
    most_requests: Annotated[int, Field(ge=1, le=65_536)] = 1024
    most_body: Annotated[Size, Field(ge=KIB, le=LARGEST_BODY)] = 32 * MIB
    most_held: Annotated[Size, Field(ge=KIB)] = GIB
    remember: Annotated[int, Field(ge=0, le=100_000_000)] = 1_000_000

    @field_validator("prefill", "decode")
    @classmethod
    def _are_engines(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if len(values) > MOST_ENGINES:
            raise ValueError(f"these are more than {MOST_ENGINES} engines: start one more proxy")
        urls = [EngineAddress.of(value).url for value in values]
        if twice := next((url for url in urls if urls.count(url) > 1), None):
            raise ValueError(f"{twice} is named twice: name it once")
        return values

    @field_validator("controller")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        return None if url is None else engine_url(url)

    @field_validator("token")
    @classmethod
    def _is_long_enough(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and len(token.get_secret_value()) < SHORTEST_TOKEN:
            raise ValueError(
                f"it has fewer than {SHORTEST_TOKEN} characters: make one with `openssl rand -hex 32`"
            )
        return token

    @model_validator(mode="after")
    def _has_room_for_a_body(self) -> ProxySettings:
        if self.most_held < self.most_body:
            raise ValueError("most_held: it has no room for one body: write at least what most_body is")
        return self

    @property
    def prefillers(self) -> list[EngineAddress]:
        """The engines that prefill, as they were named."""
        return [EngineAddress.of(text) for text in self.prefill]

    @property
    def decoders(self) -> list[EngineAddress]:
        """The engines that decode, as they were named."""
        return [EngineAddress.of(text) for text in self.decode]


def is_loopback(host: str) -> bool:
    """Whether an address is one of this host that no other host has."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def proxy_settings(**values: object) -> ProxySettings:
    """The settings with these values; ``None`` for what is left out.

    Raises :class:`SettingsError`, one sentence for each that is wrong.
    """
    try:
        return ProxySettings.model_validate(
            {name: value for name, value in values.items() if value is not None}
        )
    except ValidationError as error:
        raise SettingsError("\n".join(_sentence(one) for one in error.errors(include_url=False))) from None


def _sentence(error: object) -> str:
    assert isinstance(error, dict)
    said = str(error["msg"]).removeprefix("Value error, ")
    return f"--{str(error['loc'][0]).replace('_', '-')}: {said}" if error["loc"] else f"--{said}"
