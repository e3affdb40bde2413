"""Canary: store a synthetic prompt through a vLLM server, have each tier serve it, and compare the tokens.

The hint ``canary`` replaces a request's ``cache_salt`` in kvtier's keys, not in vLLM's. So requests with one
id and different salts share their chunks in kvtier, and nothing in vLLM's own cache, which stays as it is::

    POST /v1/completions  cache: write, canary: {id}        computes the prompt, stores it: the reference
    POST /v1/completions  cache: read,  canary: {id, tier}  loads it, for each tier that stored chunks reach

The prompt is a chunk and :data:`REST_TOKENS` tokens. It ends in words of its beginning, which a model
continues by what it has read there: other KV leads to other tokens. A run computes it once if all is well,
and for a tier that does not serve it at most once for each of :data:`PAUSES`, and once more.

Another server may load it: from a peer or shared pool, or because the first one has pushed it there.
"""

from __future__ import annotations

import logging
import math
import random
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from string import ascii_lowercase
from typing import Annotated, Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec

from kvtier.errors import KVTierError
from kvtier.logs import printable
from kvtier.settings.observability import CanarySettings
from kvtier.settings.peer import reached_from_elsewhere

logger = logging.getLogger("kvtier")

Stage = Literal["store", "lookup", "load", "tokens"]
"""Where the path broke; ``tokens``: what was loaded leads to other tokens than what was computed."""
CHUNK_TOKENS, REST_TOKENS, NEW_TOKENS = 256, 32, 8
"""In a chunk, until an engine has reported how many it has; after the chunk; to generate."""
MAX_CHUNK_TOKENS = 1 << 16
REQUEST_SECONDS, PUSH_SECONDS, MAX_PAUSE_SECONDS = 60.0, 5.0, 3600.0
MAX_BYTES = 16 << 20
"""Of an answer: vLLM's metrics are its longest one."""
ELSEWHERE = "-"
"""No tier's name: what another server has stored is loaded from where it is."""
PAUSES = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Between reads from a tier: a chunk may be committed a moment later, or wait in the tier's queue."""
TOLERANCE = 0.5
"""Of a token's log-probability: in bfloat16, other batches change it by some 0.1, other KV by several."""
ALERT_AFTER = 2
"""Consecutive failures before an alert: a chunk may be evicted by chance. Wrong tokens alert at once."""
GREEDY = {
    "truncation_side": "left",
    "max_tokens": NEW_TOKENS,
    "temperature": 0.0,
    "ignore_eos": True,
    "logprobs": 5,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
_WAITING = re.compile(r"^vllm:num_requests_waiting(?:\{.*\})? (\S+)$", re.MULTILINE)

Hints = Mapping[str, object]
NONE: Hints = {}


class CanaryError(KVTierError):
    """The canary could not run, for a reason that is not the cache's."""


class NotServed(Exception):
    """What was stored is not served: the stage, the reason, and the tier, if any."""


class Report(msgspec.Struct):
    """What kvtier's connector reports of a canary's request, in tokens."""

    connected: bool
    """Whether the engine is connected to its cache process."""
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_TOKENS)]
    tiers: list[str]
    """Those that stored chunks can reach."""
    stored: int
    located: int
    loaded: dict[str, int]
    verifies: bool = False
    """Whether what it stores a second time is compared with the first: shadow verification is on."""
    pools: bool = False
    """Whether chunks that other hosts hold are looked up."""
    peer: str | None = None
    """The address that other hosts push chunks to."""


EACH = msgspec.Meta(min_length=NEW_TOKENS, max_length=NEW_TOKENS)


class Answer(NamedTuple):
    """An answer of vLLM: the generated tokens, and the most likely ones at each place."""

    tokens: Annotated[list[int], EACH]
    likely: Annotated[list[dict[str, float]], EACH]
    prompt_tokens: int
    report: Report | None

    def distance(self, other: Answer) -> float:
        """Return the greatest difference of a token's log-probability, up to the first other token."""
        found, places = 0.0, (self.tokens, other.tokens, self.likely, other.likely)
        for mine, theirs, ours, others in zip(*places, strict=True):
            name = f"token_id:{mine}"
            found = max(found, abs(ours[name] - others.get(name, -math.inf)))
            if mine != theirs:
                break
        return found


class Result(msgspec.Struct):
    """The result of one run."""

    prompt_tokens: int = 0
    stored: int = 0
    served: dict[str, tuple[int, float]] = msgspec.field(default_factory=dict)
    """The tokens that each tier has served, and in how many seconds."""
    requests: int = 0
    computed: int = 0
    """Prompt tokens that the engine has computed."""
    stage: Stage | None = None
    """``None`` if every tier has served what was stored, with the same tokens."""
    reason: str = ""
    tier: str = ""

    def describe(self) -> str:
        """Return one line that names what was stored, and served or not."""
        parts = [f"{self.stored} of {self.prompt_tokens} tokens stored"]
        parts += [f"{tier} served {n} in {1000 * took:.0f} ms" for tier, (n, took) in self.served.items()]
        if self.stage is not None:
            parts.append(f"{self.stage} failed{self.tier and f' for tier {self.tier}'}: {self.reason}")
        return "; ".join([*parts, f"{self.requests} requests computed {self.computed} prompt tokens"])


class Canary:
    """A client of one vLLM server. Use it as an async context manager."""

    def __init__(self, url: str, key: str | None = None, seconds: float = REQUEST_SECONDS) -> None:
        """``key``: the server's API key. ``seconds``: the timeout of each request. Raises CanaryError."""
        if key is not None and not (key.isascii() and key.isprintable()):
            raise CanaryError("the API key contains characters that no HTTP header may contain")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._seconds = seconds
        self._chunk_tokens, self._model, self._measured = CHUNK_TOKENS, "", False
        self._report: Report | None = None
        """The last one."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # An engine is not reached through the proxy of the environment.
        self._http = httpx.AsyncClient(headers=headers, timeout=seconds, trust_env=False)

    async def __aenter__(self) -> Canary:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._http.aclose()

    async def waiting(self) -> int:
        """Return how many requests wait for the engine, which is saturated then. Raises CanaryError."""
        return int(sum(map(float, _WAITING.findall(await self._ask("GET", "/metrics")))))

    async def run(self, writer: Canary | None = None) -> Result:
        """Have this server store a prompt and each tier serve it; or load what ``writer`` stores.

        Both clients have run before then. Safe to cancel: vLLM aborts the request, and the chunks expire.
        Raises :class:`CanaryError` if a server cannot be asked, or computes other tokens each time.
        """
        result = Result()
        try:
            await self._run(result, writer or self)
        except NotServed as error:
            result.stage, result.reason, result.tier = error.args
        return result

    async def _run(self, result: Result, writer: Canary) -> None:
        own, push, expect = self._report, NONE, NONE
        if writer is not self and own is not None and own.peer is not None and not own.pools:
            with suppress(ValueError):  # It reads from no other host: what it gets is pushed there.
                to = reached_from_elsewhere(own.peer, urlsplit(self.url).hostname or "")
                push = {"kv_transfer": {"to": to}}
                expect = {"expect": {"tokens": writer._chunk_tokens + REST_TOKENS, "seconds": PUSH_SECONDS}}
        run, reference, report = await writer._store(result, push)
        tiers = report.tiers
        if writer is not self:
            await writer._read(result, run, tiers[0], first=True)  # Now it is known to be stored.
            self._chunk_tokens, tiers = writer._chunk_tokens, [ELSEWHERE]
        for tier in tiers:
            answer = await self._read(result, run, tier, first=tier == tiers[0], more=expect)
            if (distance := reference.distance(answer)) > TOLERANCE:
                again = reference.distance(await self._complete(result, run, {"cache": "off"}))
                if again > TOLERANCE:
                    reason = f"computes other tokens each time: {again:.2f} > {TOLERANCE}"
                    raise CanaryError(f"{self.url} {reason}")
                reason = f"log-probabilities differ by {distance:.2f}, when computed twice by {again:.2f}"
                raise NotServed("tokens", reason, tier)
            if report.verifies and not self._measured:
                # In a batch with another prompt: that may change what is computed, and shows how much.
                stored = {"cache": "write", "canary": {"id": run}}
                await self._complete(result, run, stored, beside=True)
                self._measured = True

    async def _store(self, result: Result, more: Hints) -> tuple[str, Answer, Report]:
        models = await self._ask("GET", "/v1/models")
        try:
            self._model = str(msgspec.json.decode(models)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise CanaryError(f"{self.url} does not list its models like vLLM: {error!r}") from error
        for _ in range(2):  # In the first run of this client, it learns how many tokens a chunk has.
            run, tokens = secrets.token_hex(16), self._chunk_tokens
            answer = await self._complete(result, run, {"cache": "write", "canary": {"id": run}, **more})
            if (report := answer.report) is None:
                reason = "has no kvtier, an older one, or one that caches nothing: see vLLM's log"
                raise CanaryError(f"{self.url} {reason}")
            result.prompt_tokens, result.stored = answer.prompt_tokens, report.stored
            if not (report.connected and report.tiers):
                raise NotServed("store", "the engine is not connected to its cache process", "")
            self._chunk_tokens = report.chunk_tokens
            if tokens == report.chunk_tokens:
                return run, answer, report
        raise CanaryError(f"{self.url} reports chunks of another size each time")

    async def _read(self, result: Result, run: str, tier: str, *, first: bool, more: Hints = NONE) -> Answer:
        """Have one tier serve the prompt. Raises :class:`NotServed`."""
        whole = self._chunk_tokens
        for pause in (*PAUSES, None):
            began = time.monotonic()
            hints = {"cache": "read", "canary": {"id": run, "tier": tier}, **more}
            answer = await self._complete(result, run, hints)
            report = answer.report
            if report is None:
                raise CanaryError(f"{self.url} has been restarted")
            loaded = sum(report.loaded.values())
            result.stored = max(result.stored, report.located)  # What was stored after the first answer.
            result.computed -= loaded
            served = loaded if first else report.loaded.get(tier, 0)
            if served >= whole:
                name = f"{', '.join(report.loaded)} of {self.url}" if tier == ELSEWHERE else tier
                result.served[name] = served, time.monotonic() - began
                return answer
            if loaded < whole <= report.located:  # It is gone now: a further attempt would not locate it.
                raise NotServed("load", f"{loaded} of {report.located} located tokens were loaded", tier)
            if pause is not None:
                await anyio.sleep(pause)
        assert report is not None
        if loaded >= whole:
            late = f"not there {sum(PAUSES):.0f} s after they were stored, while a faster tier serves them"
            raise NotServed("store", late, tier)
        reason = f"{report.located} of {result.stored} stored tokens were located"
        if not report.connected:
            reason = "the engine is not connected to its cache process"
        raise NotServed("lookup" if result.stored >= whole else "store", reason, tier)

    async def _complete(self, result: Result, run: str, hints: Hints, *, beside: bool = False) -> Answer:
        """Complete the prompt of a run; with ``beside``, at the same time as another one."""
        tokens = self._chunk_tokens + REST_TOKENS
        words = random.Random(run).choices(ascii_lowercase, k=tokens)  # noqa: S311 - of a token or more each
        prompts = [" ".join(words + words[tokens // 2 :][: REST_TOKENS // 2]), " ".join(reversed(words))]
        request = GREEDY | {
            "model": self._model,
            "prompt": prompts if beside else prompts[0],
            "truncate_prompt_tokens": tokens,
            "cache_salt": secrets.token_hex(16),
            "kv_transfer_params": {"kvtier": hints},
        }
        body = await self._ask("POST", "/v1/completions", request)
        try:
            found = msgspec.json.decode(body)
            choice, prompt = found["choices"][0], found["usage"]["prompt_tokens"]
            report = ((found.get("kv_transfer_params") or {}).get("kvtier") or {}).get("canary")
            parts = choice["token_ids"], choice["logprobs"]["top_logprobs"], prompt, report
            answer = msgspec.convert(parts, Answer)
            answer.distance(answer)  # Raises if a generated token is not among the most likely ones.
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CanaryError(f"{self.url} does not answer like vLLM: {error!r}") from error
        result.requests += 1 + beside
        result.computed += answer.prompt_tokens
        self._report = answer.report or self._report
        return answer

    async def _ask(self, method: str, path: str, request: object = None) -> str:
        try:
            with anyio.fail_after(self._seconds):  # httpx's timeout is that of each piece.
                async with self._http.stream(method, self.url + path, json=request) as answer:
                    body = bytearray()
                    async for piece in answer.aiter_bytes():
                        body += piece
                        if len(body) > MAX_BYTES:
                            raise CanaryError(f"{self.url}{path} answers with more than {MAX_BYTES} bytes")
        except (TimeoutError, httpx.TimeoutException):
            raise CanaryError(f"{self.url} has not answered within {self._seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CanaryError(f"{self.url} does not answer: {error}") from error
        if answer.status_code in (401, 403):
            raise CanaryError(f"{self.url} requires an API key, or another one")
        if not answer.is_success:
            text = printable(body.decode(errors="replace"))
            raise CanaryError(f"{self.url}{path} answers with status {answer.status_code}: {text}")
        return body.decode(errors="replace")


class Periodic:
    """The canary of a cache process, for one of its engines."""

    def __init__(self, url: str, settings: CanarySettings, connected: Callable[[], bool]) -> None:
        """``connected``: whether an engine is connected. While none is, it is starting or stopping."""
        self._every, key = settings.every, settings.api_key
        self._canary = Canary(url, None if key is None else key.get_secret_value())
        self._connected = connected
        self._failures = 0
        self._skipped = ""
        self.status: dict[str, Any] = {"alert": False, "last": "", "last_ok": time.time()}
        self.status["results"] = dict.fromkeys(("ok", *get_args(Stage), "skipped"), 0)
        """The last result, when it was ok (at first, that of the start), and counts since the start."""

    async def run(self) -> None:
        """Run until cancelled; after failures, at longer and longer intervals."""
        async with self._canary:
            while True:
                pause = self._every * 2 ** max(0, min(self._failures, 16) - ALERT_AFTER + 1)
                await anyio.sleep(min(pause, max(self._every, MAX_PAUSE_SECONDS)))
                try:
                    await self.once()
                except Exception:  # Whatever an engine answers, it must not end the cache process.
                    logger.exception("canary failed")

    async def once(self) -> None:
        """Run once, unless the engine is busy, starting or stopping."""
        result, why = Result(), ""
        try:
            if self._connected() and (waiting := await self._canary.waiting()):
                why = f"{waiting} requests are waiting"
            elif self._connected():
                result = await self._canary.run()
        except CanaryError as error:
            why = str(error)
        if not self._connected():  # Not before, or no more.
            why = "no engine is connected"
        self.status["results"]["skipped" if why else result.stage or "ok"] += 1
        if why and why != self._skipped:
            logger.info("canary skipped: %s", why)
        self._skipped = why
        if why:
            return
        healthy, before = result.stage is None, self._failures
        self._failures = 0 if healthy else before + 1
        alert = result.stage == "tokens" or self._failures >= ALERT_AFTER
        self.status |= {"alert": alert, "last": result.describe()}
        if healthy:
            self.status["last_ok"] = time.time()
        if before or not healthy:
            level = logging.ERROR if alert else logging.INFO
            logger.log(level, "canary of %s: %s", self._canary.url, self.status["last"])
