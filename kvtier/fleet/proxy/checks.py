"""Check the health of engines, and discover the peer address of their instances."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import anyio
import httpx
import msgspec

from kvtier.fleet.proxy.body import response_params
from kvtier.fleet.proxy.client import Refused
from kvtier.fleet.proxy.connections import read_body
from kvtier.fleet.proxy.upstream import UNREACHABLE, Role, State, Upstream, describe_transport_error
from kvtier.settings.peer import reached_from_elsewhere

if TYPE_CHECKING:
    from kvtier.fleet.proxy.settings import ProxySettings
    from kvtier.fleet.proxy.upstream import Upstreams

logger = logging.getLogger("kvtier.proxy")

MAX_FAILED = 3
"""Consecutive failed checks before an engine is marked down: it may be too busy to answer once or twice."""
PROBE_SECONDS = 30.0
PROBE_AGAIN_SECONDS = 30.0
PROBE = "What is the address of this engine?"
"""Several tokens: a first request of one token ends vLLM 0.32 in bfloat16 on CPUs with AMX."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Checks:
    """Health checks. :meth:`watch` runs in one task per engine."""

    def __init__(self, upstreams: Upstreams, settings: ProxySettings) -> None:
        self._upstreams = upstreams
        self._interval = settings.check
        self._limit = settings.check * 2.5
        self._roles = tuple(Role) if settings.controller else (Role.DECODE,)
        """Roles whose peer address is needed: that of prefill engines only to match them to the controller's
        instances."""
        self._headers = {"accept-encoding": "identity"}
        if settings.engine_key is not None:
            self._headers["authorization"] = f"Bearer {settings.engine_key.get_secret_value()}"

    async def watch(self, upstream: Upstream) -> None:
        """Check an engine periodically until it is removed; then wait for its requests in flight."""
        failed, probed = 0, 0.0
        while not upstream.removed:
            began = time.monotonic()
            try:
                reason = await self._check_health(upstream)
            except Refused:  # No descriptor was free, which is no fault of the engine.
                await upstream.sleep(self._interval)
                continue
            if upstream.last_response_at > began:
                reason = None  # It is slow, but sends responses.
            failed = failed + 1 if reason else 0
            if reason and (upstream.state != State.UP or failed >= MAX_FAILED or reason == UNREACHABLE):
                if upstream.state != State.DOWN and not upstream.removed:
                    logger.warning("%s engine %s %s", upstream.role, upstream.url, reason)
                upstream.mark_down(reason)
            elif not reason:
                due = upstream.state != State.UP or time.monotonic() > probed + PROBE_AGAIN_SECONDS
                if upstream.peer is None and due and upstream.role in self._roles:
                    probed = time.monotonic()
                    await self._discover_peer(upstream)
                if upstream.state != State.UP and not upstream.removed:
                    logger.info(
                        "%s engine %s is up, peer address %s", upstream.role, upstream.url, upstream.peer
                    )
                    upstream.mark_up()
            await upstream.sleep(self._interval)
        await upstream.wait_idle()
        await upstream.connections.aclose()
        self._upstreams.draining.discard(upstream)

    async def _check_health(self, upstream: Upstream) -> str | None:
        """Return why the engine is unhealthy, as a predicate that follows its name; ``None`` if healthy."""
        request = httpx.Request("GET", upstream.endpoint("/health"), headers=self._headers)
        try:
            with anyio.fail_after(self._limit):
                async with upstream.connections.exchange(request, self._limit) as response:
                    await read_body(response)
        except TimeoutError:
            return f"did not answer /health within {self._limit:g} s"
        except httpx.TransportError as error:
            return describe_transport_error(error)
        if response.status_code >= 500:
            return f"answered /health with {response.status_code}"
        return None

    async def _discover_peer(self, upstream: Upstream) -> None:
        """Learn the instance's peer address from a one-token completion; log a warning on failure."""
        try:
            with anyio.fail_after(PROBE_SECONDS):
                reason = await self._probe(upstream)
        except (TimeoutError, httpx.TransportError, Refused, msgspec.DecodeError, ValueError) as error:
            reason = str(error) or type(error).__name__
        if reason and upstream.role == Role.DECODE and upstream.state != State.UP:
            logger.warning(
                "decode engine %s reports no peer address (%s), so no KV can be transferred to it: set its "
                "peer.listen, or write --decode %s=HOST:PORT",
                upstream.url,
                reason,
                upstream.url,
            )

    async def _probe(self, upstream: Upstream) -> str | None:
        """Set ``engine.peer`` from a completion. Return what was wrong; ``None`` on success."""
        content = await self._request(upstream, "GET", "/v1/models")
        models = msgspec.json.decode(content, type=_Models).data
        if not models:
            return "it serves no model"
        probe = {
            "model": models[0].id,
            "prompt": PROBE,
            "max_tokens": 1,
            "kv_transfer_params": {"kvtier": {}},
        }
        content = await self._request(upstream, "POST", "/v1/completions", msgspec.json.encode(probe))
        upstream.peer = reachable_address(response_params(content).peer, upstream)
        return None if upstream.peer else "its response contains none"

    async def _request(
        self, upstream: Upstream, method: str, path: str, content: bytes | None = None
    ) -> bytes:
        """Return the body of the response. Raises ``ValueError`` if its status is not 200."""
        headers = self._headers if content is None else {**self._headers, "content-type": "application/json"}
        request = httpx.Request(method, upstream.endpoint(path), headers=headers, content=content)
        async with upstream.connections.exchange(request, PROBE_SECONDS) as response:
            content = await read_body(response) or b""
        if (status := response.status_code) != 200:
            raise ValueError(f"it answered {path} with {status}{_KEY_HINT if status in {401, 403} else ''}")
        return content


_KEY_HINT = ": name the file of its API key with --engine-key-file"


def reachable_address(peer: str | None, upstream: Upstream) -> str | None:
    """Return an engine's listen address as peers reach it; ``None`` if it is not a valid address.

    A wildcard address is replaced by the host of the engine's URL.
    """
    try:
        return None if peer is None else reached_from_elsewhere(peer, upstream.host)
    except ValueError:
        return None
