"""Client of the controller: look up which instances cache a prompt.

If the controller does not answer, the proxy falls back to its own
:class:`~kvtier.fleet.proxy.prompt.PrefixMemory`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import anyio
import httpx
import msgspec

from kvtier.fleet.proxy.body import CHAT_PATH, Body
from kvtier.fleet.proxy.connections import read_body
from kvtier.fleet.service import trusted_certificates
from kvtier.settings.peer import reached_from_elsewhere, split_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.fleet.proxy.client import Headers
    from kvtier.fleet.proxy.metrics import Statistics
    from kvtier.fleet.proxy.settings import ProxySettings
    from kvtier.fleet.proxy.upstream import Upstream, Upstreams

logger = logging.getLogger("kvtier.proxy")

LOOKUP_SECONDS = 0.25
"""Deadline of a lookup: a better choice of engine is not worth more latency."""
REFRESH_SECONDS = 5.0
MAX_TOKENS_BYTES = 64 << 20
BACKOFF_SECONDS = 5.0
"""No lookups for this long after a failure."""


class _Instance(msgspec.Struct):
    instance: str
    host: str
    peer: str | None = None


class _Instances(msgspec.Struct):
    instances: list[_Instance]


class _LookupResult(msgspec.Struct):
    num_tokens: int
    instances: dict[str, dict[str, int]]


class _Tokenized(msgspec.Struct):
    tokens: msgspec.Raw


class Held(NamedTuple):
    """Result of a lookup: the prompt's length in tokens, and how many leading tokens each instance caches."""

    tokens: int
    instances: Mapping[str, int]


class Directory:
    """Client of the controller's HTTP API."""

    def __init__(self, settings: ProxySettings, upstreams: Upstreams, statistics: Statistics) -> None:
        headers = {}
        if settings.controller_token is not None:
            headers["authorization"] = f"Bearer {settings.controller_token.get_secret_value()}"
        self._urls = deque(settings.controller)
        uses_tls = any(url.startswith("https://") for url in self._urls)
        self._client = httpx.AsyncClient(
            headers=headers,
            # Without TLS, not httpx' default either: it loads the CA certificates, which is slow.
            trust_env=False,
            verify=uses_tls and trusted_certificates(),
        )
        self._upstreams = upstreams
        self._statistics = statistics
        self._backoff_until = 0.0
        self._failures = 0
        """Since the last answer."""

    async def run(self) -> None:
        """Refresh periodically which engine belongs to which instance. Runs until cancelled."""
        async with self._client:
            while True:
                await self.refresh()
                await anyio.sleep(REFRESH_SECONDS)

    async def look_up(self, body: Body, tokenizer: Upstream | None, headers: Headers) -> Held | None:
        """Return who caches the prompt; ``None`` if that is not known within the deadline.

        The engine ``tokenizer`` tokenizes a chat; that request has the client's ``headers``.
        """
        if time.monotonic() < self._backoff_until:
            return None
        try:
            with anyio.fail_after(LOOKUP_SECONDS):
                request = await self._lookup_request(body, tokenizer, headers)
                if request is None:
                    return None
                answer = await self._client.post(
                    f"{self._urls[0]}/lookup", content=msgspec.json.encode(request)
                )
            if answer.is_server_error:  # Such as 503: no controller leads.
                answer.raise_for_status()
            self._note_answer()
            if answer.status_code != 200:  # For example, no instance serves the model yet.
                self._statistics.lookups["refused"] += 1
                return None
            found = msgspec.json.decode(answer.content, type=_LookupResult)
        except (TimeoutError, httpx.HTTPError, msgspec.DecodeError) as error:
            self._statistics.lookups["failed"] += 1
            self._back_off(str(error) or type(error).__name__)
            return None
        self._statistics.lookups["answered"] += 1
        return Held(found.num_tokens, {name: max(tiers.values()) for name, tiers in found.instances.items()})

    async def _lookup_request(
        self, body: Body, tokenizer: Upstream | None, headers: Headers
    ) -> dict[str, object] | None:
        """Return the body of ``/lookup``; ``None`` if a chat cannot be tokenized."""
        request: dict[str, object] = {"model": body.text("model"), "salt": body.text("cache_salt")}
        if body.path == CHAT_PATH:
            tokens = None if tokenizer is None else await _tokenize(body, tokenizer, headers)
            return None if tokens is None else {**request, "tokens": tokens}
        prompt = body.fields["prompt"]
        return {**request, ("prompt" if bytes(prompt)[:1] == b'"' else "tokens"): prompt}

    async def refresh(self) -> None:
        """Find out which engine belongs to which instance. Without an answer, all stay as they are."""
        try:
            with anyio.fail_after(REFRESH_SECONDS):
                answer = await self._client.get(f"{self._urls[0]}/instances")
                if answer.status_code != 200:
                    self._back_off(f"the controller answered /instances with {answer.status_code}")
                    return
                instances = msgspec.json.decode(answer.content, type=_Instances).instances
                by_name = {instance.instance: await _peer_addresses(instance) for instance in instances}
                for upstream in self._upstreams:
                    addresses = await _resolve(upstream.peer)
                    names = [name for name, known in by_name.items() if addresses & known]
                    upstream.instance = names[0] if len(names) == 1 else None
        except (TimeoutError, httpx.HTTPError, msgspec.DecodeError) as error:
            self._back_off(str(error) or type(error).__name__)
            return
        self._note_answer()

    def _note_answer(self) -> None:
        if self._failures >= len(self._urls):
            logger.info("the controller is available again")
        self._failures = 0

    def _back_off(self, reason: str) -> None:
        """Ask the next controller from now on, and none for some time if all have failed."""
        self._urls.rotate(-1)
        self._failures += 1
        if self._failures < len(self._urls):
            return
        if self._failures == len(self._urls):
            logger.warning("the controller is unavailable (%s): choosing engines by earlier requests", reason)
        self._backoff_until = time.monotonic() + BACKOFF_SECONDS


async def _tokenize(body: Body, upstream: Upstream, headers: Headers) -> msgspec.Raw | None:
    content = body.for_tokenizing()
    request = httpx.Request("POST", upstream.endpoint("/tokenize"), headers=headers, content=content)
    try:
        async with upstream.connections.exchange(request, LOOKUP_SECONDS) as response:
            answer = await read_body(response, MAX_TOKENS_BYTES)
        return msgspec.json.decode(answer or b"", type=_Tokenized).tokens
    except (httpx.TransportError, msgspec.DecodeError):  # An error response fails to decode as well.
        return None


async def _peer_addresses(instance: _Instance) -> set[tuple[str, int]]:
    """Return all resolved addresses at which peers may reach an instance."""
    try:
        peer = None if instance.peer is None else reached_from_elsewhere(instance.peer, instance.host)
    except ValueError:
        return set()
    return await _resolve(peer)


async def _resolve(address: str | None) -> set[tuple[str, int]]:
    if address is None:
        return set()
    try:
        host, port = split_address(address)
        found = await anyio.getaddrinfo(host, port)
    except (ValueError, OSError, UnicodeError):
        return set()
    return {(str(entry[4][0]), port) for entry in found}
