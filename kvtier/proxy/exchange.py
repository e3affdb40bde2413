"""One request's way: from the client to a prefiller, to a decoder, and the answer back."""

from __future__ import annotations

import logging
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import anyio
import httpx

from kvtier.proxy.admission import BUSY
from kvtier.proxy.body import Body, answered_params, without_params
from kvtier.proxy.checks import reachable, read
from kvtier.proxy.client import EVENT_STREAM, Client
from kvtier.proxy.engine import Engine, Role, described
from kvtier.proxy.errors import ClientGone, EngineLost, Refused
from kvtier.proxy.headers import Headers, to_client, to_engine
from kvtier.tasks import open_tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvtier.http import Message, Receive, Send
    from kvtier.proxy.admission import Ticket
    from kvtier.proxy.directory import Held
    from kvtier.proxy.proxy import Proxy

logger = logging.getLogger("kvtier.proxy")

MOST_TRIES = 3
"""Engines of one role that a request may go to: one that kills engines shall not kill all."""
MOST_ANSWER_BYTES = 32 << 20
"""Of an answer that is no stream. A longer one goes to the client as it comes."""
UNAVAILABLE = frozenset((502, 503, 504))
"""The engine, or what is before it, cannot answer now; another may."""
RETRIED = UNAVAILABLE | {429, 500}
"""A prefiller's answers after which another is asked. What else it says, the decoder will say, too."""
INTERRUPTED = "the engine has gone in the middle of its answer: what was sent is only a part of it"
NOBODY = "no decode engine can be reached at present: try again later"


class Exchange:
    """One request to an engine, as ASGI has it: ``await exchange(scope, receive, send)``."""

    def __init__(self, proxy: Proxy, path: str) -> None:
        self._proxy = proxy
        self._statistics = proxy.statistics
        self._path = path
        self._started = time.monotonic()
        self._held: Held | None = None
        self._outcome = "ok"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer, whatever happens; ends early where the client leaves."""
        client = Client(scope, receive, send)
        try:
            with self._proxy.admission.admit() as ticket:
                await self._run(client, ticket)
        except Refused as refused:
            if self._outcome != "interrupted":
                self._outcome = "refused"
            await client.refuse(refused)
        except ClientGone:
            client.gone = True
        self._statistics.requests["cancelled" if client.gone and not client.ended else self._outcome] += 1

    async def _run(self, client: Client, ticket: Ticket) -> None:
        with ticket.scope:
            content = await self._proxy.admission.read(
                ticket, client.receive, client.header(b"content-length")
            )
            async with open_tasks() as tasks:

                async def leave() -> None:
                    await client.leave()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(leave)
                await self._answer(client, Body(self._path, content))
                tasks.cancel_scope.cancel()
        if ticket.stopped and not client.ended:
            raise Refused(
                503, "this proxy ends: send the request to another", {**BUSY, "connection": "close"}
            )

    async def _answer(self, client: Client, body: Body) -> None:
        headers = to_engine(client.headers)
        fleet = self._proxy.fleet
        await self._look_up(body, headers)
        decoder = fleet.choose(Role.DECODE, lambda engine: self._held_by(engine, body))
        if decoder is None:
            raise Refused(503, NOBODY, BUSY)
        with decoder.loaded():
            tokens = await self._prefill(body, headers, decoder)
        tried: list[Engine] = []
        while decoder is not None:
            # Another decoder has not been handed anything.
            prepared = body.for_decode(0 if tried else tokens, self._proxy.settings.patience)
            tried.append(decoder)
            try:
                with decoder.loaded():
                    await self._decode(
                        client, body, decoder, _post(decoder, self._path, headers, prepared), tried
                    )
                return
            except EngineLost as lost:
                self._note(lost)
                decoder = self._next_decoder(lost, body, tried)
        raise Refused(503, NOBODY, BUSY)

    # ── who gets it ──

    async def _look_up(self, body: Body, headers: Headers) -> None:
        """Ask the controller, where there is one, and the answer could change anything."""
        directory, prompt, fleet = self._proxy.directory, body.prompt, self._proxy.fleet
        if directory is None or prompt is None or prompt.tokens < self._proxy.settings.least_prefill:
            return
        tokenizer = fleet.choose(Role.DECODE, lambda _: 0)
        self._held = await directory.look_up(body, tokenizer, headers)

    def _held_by(self, engine: Engine, body: Body) -> int:
        if self._held is not None and engine.instance is not None:
            return self._held.by(engine)
        return engine.memory.held(body.prompt) if body.prompt is not None else 0

    def _next_decoder(self, lost: EngineLost, body: Body, tried: Sequence[Engine]) -> Engine | None:
        if len(tried) >= MOST_TRIES:
            return None
        self._statistics.retries[Role.DECODE] += 1
        other = self._proxy.fleet.choose(Role.DECODE, lambda engine: self._held_by(engine, body), tried)
        if other is None and lost.again and tried.count(lost.engine) == 1:
            return lost.engine
        return other

    def _why_not(self, body: Body, decoder: Engine) -> str | None:
        """Why no prefiller is asked; ``None`` where one is."""
        settings = self._proxy.settings
        if body.prompt is None or not body.may_be_prefilled:
            return "unsuitable"
        tokens = self._held.tokens if self._held is not None else body.prompt.tokens
        if tokens < settings.least_prefill:
            return "short"
        held = self._held_by(decoder, body)
        if held and (tokens - held < settings.least_prefill or held >= settings.most_cached * tokens):
            return "cached"
        if decoder.peer is None:
            return "no_peer"
        return None

    # ── the prefiller ──

    async def _prefill(self, body: Body, headers: Headers, decoder: Engine) -> int:
        """Have the prompt computed, and how many of its tokens are on their way to the decoder."""
        reason = self._why_not(body, decoder)
        if reason is not None:
            self._statistics.skipped[reason] += 1
            return 0
        assert decoder.peer is not None
        content = body.for_prefill(decoder.peer)
        same = self._proxy.fleet.find(Role.PREFILL, decoder.url)
        tried: list[Engine] = [] if same is None else [same]
        for number in range(MOST_TRIES):
            prefiller = self._proxy.fleet.choose(
                Role.PREFILL, lambda engine: self._held_by(engine, body), tried
            )
            if prefiller is None:
                break
            tried.append(prefiller)
            if number:
                self._statistics.retries[Role.PREFILL] += 1
            try:
                return await self._prefill_at(prefiller, body, _post(prefiller, self._path, headers, content))
            except EngineLost as lost:
                self._statistics.prefills["failed"] += 1
                self._note(lost)
        self._statistics.skipped["no_prefiller"] += 1
        return 0

    async def _prefill_at(self, prefiller: Engine, body: Body, request: httpx.Request) -> int:
        limit = self._proxy.settings.prefill_timeout
        started = time.monotonic()
        with prefiller.loaded(), prefiller.waiting(), anyio.move_on_after(limit) as patience:
            async with prefiller.connections.exchange(request, limit) as response:
                content = await read(response)
        if patience.cancelled_caught:
            raise EngineLost(prefiller, f"has not prefilled within {limit:g} s (--prefill-timeout)")
        if response.status_code in RETRIED:
            raise EngineLost(prefiller, f"answers with {response.status_code}")
        if response.status_code != 200 or content is None:
            self._statistics.prefills["refused"] += 1
            return 0
        self._statistics.prefill.add(time.monotonic() - started)
        prefiller.served += 1
        assert body.prompt is not None
        prefiller.memory.add(body.prompt)
        params = answered_params(content)
        if prefiller.named_peer is None and params.peer is not None:
            prefiller.peer = reachable(params.peer, prefiller)
        self._statistics.prefills["handed_over" if params.tokens else "kept"] += 1
        self._statistics.handed_over_tokens += params.tokens
        return params.tokens

    # ── the decoder ──

    async def _decode(
        self, client: Client, body: Body, decoder: Engine, request: httpx.Request, tried: Sequence[Engine]
    ) -> None:
        """Pass its answer on. Raises :class:`EngineLost` only as long as nothing was passed on."""
        async with AsyncExitStack() as stack:
            with decoder.waiting():
                exchange = decoder.connections.exchange(request, self._proxy.settings.silence)
                response = await stack.enter_async_context(exchange)
                if response.status_code in UNAVAILABLE and self._has_another(tried):
                    raise EngineLost(decoder, f"answers with {response.status_code}")
                pieces = _pieces(response)
                begun = await _begin(pieces, whole=not _streams(response))
            decoder.served += 1
            if response.status_code < 400:
                self._statistics.first_byte.add(time.monotonic() - self._started)
                if body.prompt is not None:
                    decoder.memory.add(body.prompt)
            else:
                self._outcome = "error"
            decoder.heard_at = time.monotonic()
            if begun.complete and not _streams(response):
                await self._send_whole(client, body, response, begun.content)
                return
            await client.start(response.status_code, to_client(response.headers.raw))
            await client.write(begun.content)
            if not begun.complete:
                await self._relay(client, decoder, pieces)
            await client.end()

    async def _send_whole(self, client: Client, body: Body, response: httpx.Response, content: bytes) -> None:
        if not body.wants_params:
            content = without_params(content)
        await client.start(response.status_code, to_client(response.headers.raw, len(content)))
        await client.end(content)

    async def _relay(self, client: Client, decoder: Engine, pieces: AsyncIterator[bytes]) -> None:
        """The path of every token but the first."""
        try:
            async for piece in pieces:
                decoder.heard_at = time.monotonic()
                await client.write(piece)
        except httpx.TransportError as error:
            self._outcome = "interrupted"
            decoder.failed += 1
            logger.warning(
                "the decode engine %s %s in the middle of an answer", decoder.url, described(error)
            )
            raise Refused(502, INTERRUPTED) from None

    def _has_another(self, tried: Sequence[Engine]) -> bool:
        there = self._proxy.fleet.of(Role.DECODE)
        return len(tried) < MOST_TRIES and any(engine not in tried for engine in there)

    def _note(self, lost: EngineLost) -> None:
        logger.warning("%s", lost)
        lost.engine.has_failed(lost)


class _Begun:
    """The first piece of a stream, or all of what is none."""

    __slots__ = ("complete", "content")

    def __init__(self, content: bytes, *, complete: bool) -> None:
        self.content = content
        self.complete = complete


def _post(engine: Engine, path: str, headers: Headers, content: bytes) -> httpx.Request:
    return httpx.Request("POST", engine.at(path), headers=headers, content=content)


def _streams(response: httpx.Response) -> bool:
    content_type: str = response.headers.get("content-type", "")
    return content_type.lower().startswith(EVENT_STREAM.decode())


def _pieces(response: httpx.Response) -> AsyncIterator[bytes]:
    """The body as it comes. The response's own iterators would cost more than all the rest."""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    return aiter(response.stream)


async def _begin(pieces: AsyncIterator[bytes], *, whole: bool) -> _Begun:
    content = bytearray()
    async for piece in pieces:
        content += piece
        if content and (not whole or len(content) > MOST_ANSWER_BYTES):
            return _Begun(bytes(content), complete=False)
    return _Begun(bytes(content), complete=True)
