"""What the controller knows of who holds a prompt. Without its answer the proxy does with its own memory."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import anyio
import httpx
import msgspec

from kvtier.proxy.body import CHAT_PATH, Body
from kvtier.proxy.checks import WILDCARDS, read
from kvtier.proxy.connections import verification
from kvtier.settings_peer import split_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.proxy.engine import Engine
    from kvtier.proxy.fleet import Fleet
    from kvtier.proxy.headers import Headers
    from kvtier.proxy.settings import ProxySettings
    from kvtier.proxy.statistics import Statistics

logger = logging.getLogger("kvtier.proxy")

LOOK_UP_SECONDS = 0.25
"""A request waits no longer for it: choosing well is worth less than answering soon."""
NAMES_SECONDS = 5.0
MOST_TOKENS_BYTES = 64 << 20
PAUSE_SECONDS = 5.0
"""After a failure nothing is asked for so long."""


class _Instance(msgspec.Struct):
    instance: str
    host: str
    peer: str | None = None


class _Instances(msgspec.Struct):
    instances: list[_Instance]


class _Found(msgspec.Struct):
    num_tokens: int
    instances: dict[str, dict[str, int]]


class _Tokenized(msgspec.Struct):
    tokens: msgspec.Raw


class Held:
    """How many leading tokens of one prompt are held where, and how many it has."""

    def __init__(self, tokens: int, instances: Mapping[str, int]) -> None:
        self.tokens = tokens
        self._instances = instances

    def by(self, engine: Engine) -> int:
        """How many the engine's instance holds."""
        return self._instances.get(engine.instance or "", 0)


class Directory:
    """The controller, as the proxy asks it."""

    def __init__(self, settings: ProxySettings, fleet: Fleet, statistics: Statistics) -> None:
        headers = {}
        if settings.controller_token is not None:
            headers["authorization"] = f"Bearer {settings.controller_token.get_secret_value()}"
        assert settings.controller is not None
        self._client = httpx.AsyncClient(
            base_url=settings.controller,
            headers=headers,
            trust_env=False,
            verify=verification(settings.controller) or False,
        )
        self._fleet = fleet
        self._statistics = statistics
        self._paused_until = 0.0
        self._failing = False

    async def run(self) -> None:
        """Learn again and again which engine the controller calls what. Ends when it is cancelled."""
        async with self._client:
            while True:
                await self._learn_names()
                await anyio.sleep(NAMES_SECONDS)

    async def look_up(self, body: Body, tokenizer: Engine | None, headers: Headers) -> Held | None:
        """Who holds the prompt, or ``None`` where that cannot be said soon.

        A chat is turned into token ids by the engine ``tokenizer``, with the client's ``headers``.
        """
        if time.monotonic() < self._paused_until:
            return None
        try:
            with anyio.fail_after(LOOK_UP_SECONDS):
                asked = await self._question(body, tokenizer, headers)
                if asked is None:
                    return None
                answer = await self._client.post("/lookup", content=msgspec.json.encode(asked))
            if answer.status_code != 200:  # A model that no instance serves yet, for example.
                self._statistics.look_ups["refused"] += 1
                return None
            found = msgspec.json.decode(answer.content, type=_Found)
        except (TimeoutError, httpx.HTTPError, msgspec.DecodeError) as error:
            self._statistics.look_ups["failed"] += 1
            self._pause(str(error) or type(error).__name__)
            return None
        self._statistics.look_ups["answered"] += 1
        return Held(found.num_tokens, {name: max(tiers.values()) for name, tiers in found.instances.items()})

    async def _question(
        self, body: Body, tokenizer: Engine | None, headers: Headers
    ) -> dict[str, object] | None:
        """The body of ``/lookup``; ``None`` for what cannot be asked about."""
        asked: dict[str, object] = {"model": body.text("model"), "salt": body.text("cache_salt")}
        if body.path == CHAT_PATH:
            tokens = None if tokenizer is None else await _tokenize(body, tokenizer, headers)
            return None if tokens is None else {**asked, "tokens": tokens}
        prompt = body.fields["prompt"]
        return {**asked, ("prompt" if bytes(prompt)[:1] == b'"' else "tokens"): prompt}

    async def _learn_names(self) -> None:
        try:
            with anyio.fail_after(NAMES_SECONDS):
                answer = await self._client.get("/instances")
                if answer.status_code != 200:
                    self._pause(f"it answers /instances with {answer.status_code}")
                    return
                instances = msgspec.json.decode(answer.content, type=_Instances).instances
                places = {instance.instance: await _places(instance) for instance in instances}
                for engine in self._fleet:
                    where = await _resolved(engine.peer)
                    names = [name for name, place in places.items() if where & place]
                    engine.instance = names[0] if len(names) == 1 else None
        except (TimeoutError, httpx.HTTPError, msgspec.DecodeError) as error:
            self._pause(str(error) or type(error).__name__)
            return
        if self._failing:
            logger.info("the controller answers again")
        self._failing = False

    def _pause(self, why: str) -> None:
        if not self._failing:
            logger.warning("the controller does not answer: %s: choosing by what was sent where", why)
        self._failing = True
        self._paused_until = time.monotonic() + PAUSE_SECONDS


async def _tokenize(body: Body, engine: Engine, headers: Headers) -> msgspec.Raw | None:
    content = body.for_tokenizing()
    request = httpx.Request("POST", engine.at("/tokenize"), headers=headers, content=content)
    try:
        async with engine.connections.exchange(request, LOOK_UP_SECONDS) as response:
            answer = await read(response, MOST_TOKENS_BYTES)
        return msgspec.json.decode(answer or b"", type=_Tokenized).tokens
    except (httpx.TransportError, msgspec.DecodeError):  # An error, too, has no tokens.
        return None


async def _places(instance: _Instance) -> set[tuple[str, int]]:
    """All addresses that an instance's peers may know it by."""
    if instance.peer is None:
        return set()
    try:
        host, port = split_address(instance.peer)
    except ValueError:
        return set()
    return await _resolved(f"{instance.host}:{port}" if host in WILDCARDS else instance.peer)


async def _resolved(address: str | None) -> set[tuple[str, int]]:
    if address is None:
        return set()
    try:
        host, port = split_address(address)
        found = await anyio.getaddrinfo(host, port)
    except (ValueError, OSError, UnicodeError):
        return set()
    return {(str(entry[4][0]), port) for entry in found}
