"""Serve one request: prefill on one engine, decode on another, and stream the response to the client."""

from __future__ import annotations

import logging
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import anyio
import httpx
from starlette.responses import Response

from kvtier.concurrency.tasks import open_tasks
from kvtier.fleet.proxy.body import Body, response_params, without_params
from kvtier.fleet.proxy.checks import reachable_address
from kvtier.fleet.proxy.client import (
    BUSY,
    CLOSE,
    EVENT_STREAM,
    Client,
    ClientDisconnected,
    Headers,
    Refused,
    to_client,
    to_engine,
)
from kvtier.fleet.proxy.connections import pieces, read_body, read_up_to
from kvtier.fleet.proxy.upstream import Role, Upstream, UpstreamLost, describe_transport_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from starlette.types import Receive, Scope, Send

    from kvtier.fleet.proxy.admission import Ticket
    from kvtier.fleet.proxy.directory import Held
    from kvtier.fleet.proxy.proxy import Proxy
    from kvtier.fleet.proxy.upstream import Upstreams

logger = logging.getLogger("kvtier.proxy")

MAX_TRIES = 3
"""Engines of one role tried per request, so that a request that crashes engines cannot crash all of them."""
MAX_ANSWER_BYTES = 32 << 20
"""Largest non-streaming response that is buffered. A longer one is streamed to the client."""
UNAVAILABLE = frozenset((502, 503, 504))
"""Status codes of an engine, or a load balancer before it, that is unavailable; another one may not be."""
RETRIED = UNAVAILABLE | {429, 500}
"""Status codes of a prefill engine that are retried on another. The decoder repeats any other error."""
INTERRUPTED = "the engine failed in the middle of its response: the response is incomplete"
NO_DECODE_ENGINE = "no decode engine can be reached: try again later"
MODELS_SECONDS = 5.0
"""Timeout of one decode engine for the list of models."""


class Exchange:
    """One completion request, as an ASGI application: ``await exchange(scope, receive, send)``."""

    def __init__(self, proxy: Proxy, path: str) -> None:
        self._proxy = proxy
        self._statistics = proxy.statistics
        self._path = path
        self._started = time.monotonic()
        self._held: Held | None = None
        self._outcome = "ok"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a response or an error; return early if the client disconnects."""
        client = Client(scope, receive, send)
        try:
            with self._proxy.admission.admit() as ticket:
                await self._run(client, ticket)
        except Refused as refused:
            if self._outcome != "interrupted":
                self._outcome = "refused"
            await client.refuse(refused)
        except ClientDisconnected:
            client.disconnected = True
        cancelled = client.disconnected and not client.ended
        self._statistics.requests["cancelled" if cancelled else self._outcome] += 1

    async def _run(self, client: Client, ticket: Ticket) -> None:
        with ticket.scope:
            content = await self._proxy.admission.read(
                ticket, client.receive, client.header(b"content-length")
            )
            async with open_tasks() as tasks:

                async def cancel_on_disconnect() -> None:
                    await client.wait_disconnect()
                    tasks.cancel_scope.cancel()

                # Not before the body is complete: it would take messages that are a part of it.
                tasks.start_soon(cancel_on_disconnect)
                await self._answer(client, Body(self._path, content))
                tasks.cancel_scope.cancel()
        if ticket.stopped and not client.ended:
            message = "this proxy is shutting down: send the request to another one"
            raise Refused(503, message, BUSY | CLOSE)

    async def _answer(self, client: Client, body: Body) -> None:
        headers = to_engine(client.headers)
        await self._look_up(body, headers)
        decoder = self._choose(Role.DECODE, body)
        if decoder is None:
            raise Refused(503, NO_DECODE_ENGINE, BUSY)
        # Reserved meanwhile: a burst of requests would else choose the same decoder.
        with decoder.reserved():
            tokens = await self._prefill(body, headers, decoder)
        tried: list[Upstream] = []
        while decoder is not None:
            # The KV was transferred to the first decoder only.
            prepared = body.for_decode(0 if tried else tokens, self._proxy.settings.timeout)
            tried.append(decoder)
            try:
                with decoder.reserved():
                    await self._decode(
                        client, body, decoder, _post(decoder, self._path, headers, prepared), tried
                    )
                return
            except UpstreamLost as lost:
                self._record_failure(lost)
                decoder = self._next_decoder(lost, body, tried)
        raise Refused(503, NO_DECODE_ENGINE, BUSY)

    # ── engine selection ──

    async def _look_up(self, body: Body, headers: Headers) -> None:
        """Ask the controller who caches the prompt, unless the prompt is too short for a remote prefill."""
        directory, prompt, upstreams = self._proxy.directory, body.prompt, self._proxy.upstreams
        if directory is None or prompt is None or prompt.tokens < self._proxy.settings.min_prefill:
            return
        tokenizer = upstreams.choose(Role.DECODE, lambda _: 0)
        self._held = await directory.look_up(body, tokenizer, headers)

    def _choose(self, role: Role, body: Body, exclude: Sequence[Upstream] = ()) -> Upstream | None:
        return self._proxy.upstreams.choose(role, lambda upstream: self._held_by(upstream, body), exclude)

    def _held_by(self, upstream: Upstream, body: Body) -> int:
        if self._held is not None and upstream.instance is not None:
            return self._held.instances.get(upstream.instance, 0)
        return upstream.memory.held(body.prompt) if body.prompt is not None else 0

    def _next_decoder(self, lost: UpstreamLost, body: Body, tried: Sequence[Upstream]) -> Upstream | None:
        if len(tried) >= MAX_TRIES:
            return None
        self._statistics.retries[Role.DECODE] += 1
        other = self._choose(Role.DECODE, body, tried)
        if other is None and lost.retryable and tried.count(lost.upstream) == 1:
            return lost.upstream
        return other

    def _skip_reason(self, body: Body, decoder: Upstream) -> str | None:
        """Return why to skip the remote prefill; ``None`` if it is worthwhile."""
        settings = self._proxy.settings
        if body.prompt is None or not body.may_be_prefilled:
            return "unsuitable"
        tokens = self._held.tokens if self._held is not None else body.prompt.tokens
        if tokens < settings.min_prefill:
            return "short"
        held = self._held_by(decoder, body)
        if held and (tokens - held < settings.min_prefill or held >= settings.max_cached * tokens):
            return "cached"
        if decoder.peer is None:
            return "no_peer"
        return None

    # ── prefill ──

    async def _prefill(self, body: Body, headers: Headers, decoder: Upstream) -> int:
        """Prefill on another engine; return how many tokens of KV it transfers to the decoder, or 0."""
        reason = self._skip_reason(body, decoder)
        if reason is not None:
            self._statistics.skipped[reason] += 1
            return 0
        assert decoder.peer is not None
        content = body.for_prefill(decoder.peer)
        # An engine with both roles cannot transfer to itself.
        same = self._proxy.upstreams.find(Role.PREFILL, decoder.url)
        tried: list[Upstream] = [] if same is None else [same]
        for number in range(MAX_TRIES):
            prefiller = self._choose(Role.PREFILL, body, tried)
            if prefiller is None:
                break
            tried.append(prefiller)
            if number:
                self._statistics.retries[Role.PREFILL] += 1
            try:
                return await self._prefill_at(prefiller, body, _post(prefiller, self._path, headers, content))
            except UpstreamLost as lost:
                self._statistics.prefills["failed"] += 1
                self._record_failure(lost)
        self._statistics.skipped["no_prefiller"] += 1
        return 0

    async def _prefill_at(self, prefiller: Upstream, body: Body, request: httpx.Request) -> int:
        limit = self._proxy.settings.prefill_timeout
        started = time.monotonic()
        with prefiller.reserved(), prefiller.awaiting_response(), anyio.move_on_after(limit) as deadline:
            async with prefiller.connections.exchange(request, limit) as response:
                content = await read_body(response)
        if deadline.cancelled_caught:
            raise UpstreamLost(prefiller, f"did not prefill within {limit:g} s (--prefill-timeout)")
        if response.status_code in RETRIED:
            raise UpstreamLost(prefiller, f"answered with {response.status_code}")
        if response.status_code != 200 or content is None:
            self._statistics.prefills["refused"] += 1
            return 0
        self._statistics.prefill.add(time.monotonic() - started)
        prefiller.served += 1
        assert body.prompt is not None
        prefiller.memory.add(body.prompt)
        params = response_params(content)
        if prefiller.configured_peer is None and params.peer is not None:
            prefiller.peer = reachable_address(params.peer, prefiller)
        self._statistics.prefills["transferred" if params.tokens else "kept"] += 1
        self._statistics.transferred_tokens += params.tokens
        return params.tokens

    # ── decode ──

    async def _decode(
        self, client: Client, body: Body, decoder: Upstream, request: httpx.Request, tried: Sequence[Upstream]
    ) -> None:
        """Forward the decoder's response. Raises :class:`UpstreamLost` only before anything was forwarded."""
        async with AsyncExitStack() as stack:
            with decoder.awaiting_response():
                exchange = decoder.connections.exchange(request, self._proxy.settings.idle_timeout)
                response = await stack.enter_async_context(exchange)
                if response.status_code in UNAVAILABLE and self._has_untried_decoder(tried):
                    raise UpstreamLost(decoder, f"answered with {response.status_code}")
                rest, streams = pieces(response), _streams(response)
                # The first piece of a stream, or a whole response, which is retried if it breaks off.
                content, complete = await read_up_to(rest, 0 if streams else MAX_ANSWER_BYTES)
            decoder.served += 1
            if response.status_code < 400:
                self._statistics.first_byte.add(time.monotonic() - self._started)
                if body.prompt is not None:
                    decoder.memory.add(body.prompt)
            else:
                self._outcome = "error"
            decoder.last_response_at = time.monotonic()
            if complete and not streams:
                if not body.wants_params:
                    content = without_params(content)
                await client.start(response.status_code, to_client(response.headers.raw, len(content)))
                await client.end(content)
                return
            await client.start(response.status_code, to_client(response.headers.raw))
            await client.write(content)
            if not complete:
                await self._relay(client, decoder, rest)
            await client.end()

    async def _relay(self, client: Client, decoder: Upstream, rest: AsyncIterator[bytes]) -> None:
        """Stream the rest of the response. Hot path: runs for every token but the first."""
        try:
            async for piece in rest:
                decoder.last_response_at = time.monotonic()
                await client.write(piece)
        except httpx.TransportError as error:
            self._outcome = "interrupted"
            decoder.failed += 1
            logger.warning(
                "decode engine %s %s in the middle of a response",
                decoder.url,
                describe_transport_error(error),
            )
            raise Refused(502, INTERRUPTED) from None

    def _has_untried_decoder(self, tried: Sequence[Upstream]) -> bool:
        decoders = self._proxy.upstreams.of(Role.DECODE)
        return len(tried) < MAX_TRIES and any(upstream not in tried for upstream in decoders)

    def _record_failure(self, lost: UpstreamLost) -> None:
        logger.warning("%s", lost)
        lost.upstream.record_failure(lost)


def _post(upstream: Upstream, path: str, headers: Headers, content: bytes) -> httpx.Request:
    return httpx.Request("POST", upstream.endpoint(path), headers=headers, content=content)


def _streams(response: httpx.Response) -> bool:
    content_type: str = response.headers.get("content-type", "")
    return content_type.lower().startswith(EVENT_STREAM.decode())


async def list_models(upstreams: Upstreams, headers: Headers) -> Response:
    """Return the answer of the first decode engine that gives one. Raises :class:`Refused`."""
    tried: list[Upstream] = []
    while upstream := upstreams.choose(Role.DECODE, lambda _: 0, tried):
        tried.append(upstream)
        request = httpx.Request("GET", upstream.endpoint("/v1/models"), headers=to_engine(headers))
        try:
            with upstream.reserved(), upstream.awaiting_response(), anyio.move_on_after(MODELS_SECONDS):
                async with upstream.connections.exchange(request, MODELS_SECONDS) as response:
                    answer = Response(await read_body(response) or b"", response.status_code)
                answer.raw_headers = to_client(response.headers.raw, len(answer.body))
                return answer
        except UpstreamLost as lost:
            logger.warning("%s", lost)
    raise Refused(503, NO_DECODE_ENGINE, BUSY)
