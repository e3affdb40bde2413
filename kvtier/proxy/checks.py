"""Asks every engine whether it lives, and where its instance listens for peers."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import anyio
import httpx
import msgspec

from kvtier.proxy.body import answered_params
from kvtier.proxy.engine import Engine, Role, State, described
from kvtier.settings_peer import split_address

if TYPE_CHECKING:
    from kvtier.proxy.fleet import Fleet
    from kvtier.proxy.settings import ProxySettings

logger = logging.getLogger("kvtier.proxy")

MOST_FAILED = 3
"""An engine that was up may be too busy to answer once or twice."""
PROBE_SECONDS = 30.0
PROBE_AGAIN_SECONDS = 30.0
MOST_ANSWER_BYTES = 4 << 20
WILDCARDS = frozenset(("0.0.0.0", "::", "*"))  # noqa: S104 - recognised, not listened on


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def read(response: httpx.Response, most: int = MOST_ANSWER_BYTES) -> bytes | None:
    """The whole body of an answer, or ``None`` for one that is too long."""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    content = bytearray()
    async for piece in response.stream:
        content += piece
        if len(content) > most:
            return None
    return bytes(content)


class Checks:
    """Watches engines, each in a task of its own."""

    def __init__(self, fleet: Fleet, settings: ProxySettings) -> None:
        self._fleet = fleet
        self._interval = settings.check
        self._limit = settings.check * 2.5
        self._roles = (Role.DECODE,) if settings.controller is None else tuple(Role)
        """Whose peer addresses matter: those of prefillers only to tell what the controller calls them."""
        self._headers = {"accept-encoding": "identity"}
        if settings.engine_key is not None:
            self._headers["authorization"] = f"Bearer {settings.engine_key.get_secret_value()}"

    async def watch(self, engine: Engine) -> None:
        """Ask again and again until the engine is removed and nothing is under way there."""
        failed, probed = 0, 0.0
        while not engine.removed:
            began = time.monotonic()
            why = await self._failing(engine)
            if engine.heard_at > began:
                why = None  # Whoever is that late, it is not dead.
            failed = failed + 1 if why else 0
            if why and (engine.state != State.UP or failed >= MOST_FAILED or why == _REFUSED):
                self._down(engine, why)
            elif not why:
                due = engine.state != State.UP or time.monotonic() > probed + PROBE_AGAIN_SECONDS
                if engine.peer is None and due and engine.role in self._roles:
                    probed = time.monotonic()
                    await self._learn(engine)
                self._up(engine)
            await engine.sleep(self._interval)
        await engine.until_idle()
        await engine.connections.aclose()
        self._fleet.leaving.discard(engine)

    async def _failing(self, engine: Engine) -> str | None:
        """Why the engine is not well, in words that follow its name; ``None`` where it is."""
        request = httpx.Request("GET", engine.at("/health"), headers=self._headers)
        try:
            with anyio.fail_after(self._limit):
                async with engine.connections.exchange(request, self._limit) as response:
                    await read(response)
        except TimeoutError:
            return f"has not answered /health within {self._limit:g} s"
        except httpx.ConnectError:
            return _REFUSED
        except httpx.TransportError as error:
            return described(error)
        if response.status_code >= 500:
            return f"answers /health with {response.status_code}"
        return None

    def _up(self, engine: Engine) -> None:
        if engine.state != State.UP and not engine.removed:
            logger.info("the %s engine %s is up, its peer is %s", engine.role, engine.url, engine.peer)
            engine.lives()

    def _down(self, engine: Engine, why: str) -> None:
        if engine.state != State.DOWN and not engine.removed:
            logger.warning("the %s engine %s %s", engine.role, engine.url, why)
        engine.is_down(why)

    async def _learn(self, engine: Engine) -> None:
        """Have it compute one token, and say where its instance is reached."""
        try:
            with anyio.fail_after(PROBE_SECONDS):
                said = await self._probe(engine)
        except (TimeoutError, httpx.TransportError, msgspec.DecodeError, ValueError) as error:
            said = str(error) or type(error).__name__
        if said and engine.role == Role.DECODE and engine.state != State.UP:
            logger.warning(
                "nothing can be handed over to %s, which does not say its peer address (%s): give it "
                "peer.listen, or write --decode %s=HOST:PORT",
                engine.url,
                said,
                engine.url,
            )

    async def _probe(self, engine: Engine) -> str | None:
        """What was wrong with its answer; ``None`` where it has said its address."""
        status, content = await self._ask(engine, "GET", "/v1/models")
        if status != 200:
            return f"it answers /v1/models with {status}{_KEY if status in {401, 403} else ''}"
        models = msgspec.json.decode(content, type=_Models).data
        if not models:
            return "it serves no model"
        asked = {
            "model": models[0].id,
            "prompt": "a",
            "max_tokens": 1,
            "kv_transfer_params": {"kvtier": {}},
        }
        status, content = await self._ask(engine, "POST", "/v1/completions", msgspec.json.encode(asked))
        if status != 200:
            return f"it answers /v1/completions with {status}{_KEY if status in {401, 403} else ''}"
        engine.peer = reachable(answered_params(content).peer, engine)
        return None if engine.peer else "its answer names none"

    async def _ask(
        self, engine: Engine, method: str, path: str, content: bytes | None = None
    ) -> tuple[int, bytes]:
        headers = self._headers if content is None else {**self._headers, "content-type": "application/json"}
        request = httpx.Request(method, engine.at(path), headers=headers, content=content)
        async with engine.connections.exchange(request, PROBE_SECONDS) as response:
            return response.status_code, await read(response) or b""


_REFUSED = "cannot be reached"
_KEY = ": name the file of its API key with --engine-key-file"


def reachable(peer: str | None, engine: Engine) -> str | None:
    """An address that an engine says it listens on, as others reach it; ``None`` for what is none."""
    if peer is None:
        return None
    try:
        host, port = split_address(peer)
    except ValueError:
        return None
    if host in WILDCARDS:
        host = engine.host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
