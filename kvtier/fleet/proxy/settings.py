"""Settings of the proxy: its listen address, its engines, and its limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, SecretStr, field_validator, model_validator

from kvtier.settings.command import CommandSettings, Token, option
from kvtier.settings.peer import WILDCARDS, Address, split_address
from kvtier.units import GIB, KIB, MIB, Duration, Size

DEFAULT_LISTEN = "127.0.0.1:9000"
MAX_ENGINES = 256
MAX_BODY_BYTES = 64 * MIB
"""Upper limit of ``max_body``. Bodies are parsed on the event loop, which takes tens of ms at this size."""


def split_engine(text: str) -> tuple[str, str | None]:
    """Return the parts of ``URL`` or ``URL=HOST:PORT``. Raises ``ValueError`` with the expected form."""
    url, equals, peer = text.partition("=")
    return engine_url(url), peer_address(peer) if equals else None


def engine_url(text: str) -> str:
    """Return the URL without a trailing slash or ``/v1``.

    Raises ``ValueError`` if it is not an HTTP URL, or contains credentials.
    """
    import httpx  # Slow, and the command line imports this module.

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


URL = Annotated[str, AfterValidator(engine_url)]


def peer_address(text: str) -> str:
    """Return ``text``. Raises ``ValueError`` if it is not an address that a peer can connect to."""
    host, port = split_address(text)
    if host in WILDCARDS or not port:
        raise ValueError(f"{text!r} cannot be connected to: write the address at which prefillers reach it")
    return text


ENGINES, ROUTING, LIMITS = "Engines", "Routing", "Limits"


class ProxySettings(CommandSettings):
    """Settings of the proxy. Sizes are in bytes, durations in seconds."""

    prefill: tuple[str, ...] = option((), "URL", "A prefill instance. Repeatable.", ENGINES)
    decode: tuple[str, ...] = option(
        (),
        "URL[=HOST:PORT]",
        "A decode instance. Repeatable. HOST:PORT is the address where prefill instances reach its "
        "`peer.listen`. Default: ask the engine.",
        ENGINES,
    )
    engine_key: SecretStr | None = option(
        None,
        "FILE",
        "File with the engines' API key, for the proxy's own requests. Clients' keys are forwarded.",
        ENGINES,
    )
    check: Duration = option(2.0, "TIME", "Interval of health checks of engines.", ENGINES, ge=0.05, le=3600)
    listen: Address = option(DEFAULT_LISTEN, "HOST:PORT", "Address to listen on.")
    token: Token | None = option(
        None,
        "FILE",
        "File with the token for `/engines`. Default: only this host can add and remove engines.",
    )
    controller: tuple[URL, ...] = option(
        (),
        "URL",
        "URL of the controller, to look up which engine holds a prompt. Repeatable, for several that share "
        "a `--state`. Default: track prompts.",
        ROUTING,
    )
    controller_token: SecretStr | None = option(None, "FILE", "File with the controller's token.", ROUTING)
    min_prefill: int = option(
        256,
        "TOKENS",
        "Prompts with fewer tokens to compute are prefilled by the decode instance.",
        ROUTING,
        ge=0,
    )
    max_cached: float = option(
        0.8,
        "SHARE",
        "Prompts of which the decode instance holds this share are prefilled by it.",
        ROUTING,
        gt=0,
        le=1,
    )
    remember: int = option(
        1_000_000,
        "TOKENS",
        "Tokens that each engine is assumed to keep of the prompts sent to it.",
        ROUTING,
        ge=0,
        le=100_000_000,
    )
    timeout: Duration = option(
        10.0, "TIME", "Time that a decode instance waits for the KV transfer.", ROUTING, ge=0, le=600
    )
    prefill_timeout: Duration = option(
        120.0,
        "TIME",
        "Maximum time of a prefill. Beyond this, the decode instance computes the prompt.",
        LIMITS,
        gt=0,
    )
    idle_timeout: Duration = option(
        600.0,
        "TIME",
        "Maximum time between data from a decode instance. Without streaming, its total time.",
        LIMITS,
        gt=0,
    )
    max_requests: int = option(
        1024, "N", "Concurrent requests; further ones get 429.", LIMITS, ge=1, le=65_536
    )
    max_body: Size = option(
        32 * MIB, "SIZE", "Size of a request body; longer ones get 413.", LIMITS, ge=KIB, le=MAX_BODY_BYTES
    )
    max_held: Size = option(
        GIB, "SIZE", "Total size of request bodies in flight; beyond this, requests get 429.", LIMITS, ge=KIB
    )
    drain: Duration = option(60.0, "TIME", "Grace period for requests after SIGTERM.", LIMITS, shown="60s")

    @field_validator("prefill", "decode")
    @classmethod
    def _check_engines(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if len(values) > MAX_ENGINES:
            raise ValueError(f"more than {MAX_ENGINES} engines: start another proxy")
        urls = [split_engine(value)[0] for value in values]
        if duplicate := next((url for url in urls if urls.count(url) > 1), None):
            raise ValueError(f"{duplicate} is listed twice: list it once")
        return values

    @model_validator(mode="after")
    def _check_max_held(self) -> ProxySettings:
        if self.max_held < self.max_body:
            raise ValueError("max_held: it must be at least max_body")
        return self
