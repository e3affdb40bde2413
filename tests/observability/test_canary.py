"""The canary against a scripted server: what it concludes, when it runs, and when it alerts."""

from __future__ import annotations

import itertools
import json
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest

from kvtier.cli.checks_running import KEY, check_engines
from kvtier.observability import canary as module
from kvtier.observability.canary import (
    CHUNK_TOKENS,
    NEW_TOKENS,
    REST_TOKENS,
    Canary,
    CanaryError,
    Periodic,
    Result,
)
from kvtier.settings.observability import CanarySettings

pytestmark = pytest.mark.anyio

URL = "http://engine:8000"
SECRET = "not-for-logs"
PROMPT = CHUNK_TOKENS + REST_TOKENS


class Engine:
    """A vLLM server with kvtier, whose answers are set by attributes."""

    def __init__(self) -> None:
        self.tiers = ["ram", "ssd"]
        self.loads: Callable[[str], dict[str, int]] = lambda tier: {tier: PROMPT}
        self.located = PROMPT
        self.connected = True
        self.chunk_tokens = CHUNK_TOKENS
        self.kvtier = True
        self.offset: Callable[[Any], float] = lambda hints: 0.0
        """What is added to the log-probabilities of a request with these hints."""
        self.metrics = 'vllm:num_requests_waiting{engine="0"} 0.0\nvllm:kv_cache_usage_perc{engine="0"} 0.1\n'
        self.status = 200
        self.requests: list[dict[str, Any]] = []
        self.verifies = self.pools = False
        self.peer: str | None = None

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.status != 200:
            return httpx.Response(self.status, text="starting")
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self.metrics)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "llama"}]})
        body = json.loads(request.content)
        self.requests.append(body)
        return httpx.Response(200, json=self._completion(body))

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        hints = body["kv_transfer_params"]["kvtier"]
        tier = hints.get("canary", {}).get("tier", "")
        report = {
            "connected": self.connected,
            "chunk_tokens": self.chunk_tokens,
            "tiers": self.tiers,
            "stored": body["truncate_prompt_tokens"],
            "located": self.located if tier else 0,
            "loaded": self.loads(tier) if tier else {},
            "verifies": self.verifies,
            "pools": self.pools,
            "peer": self.peer,
        }
        top = [{f"token_id:{at}": -1.0 + self.offset(hints)} for at in range(NEW_TOKENS)]
        return completion(list(range(NEW_TOKENS)), top) | {
            "usage": {"prompt_tokens": body["truncate_prompt_tokens"]},
            "kv_transfer_params": {"kvtier": {"peer": None, "canary": report}} if self.kvtier else None,
        }


def completion(tokens: list[int], top: list[dict[str, float]]) -> dict[str, Any]:
    choice = {"token_ids": tokens, "logprobs": {"top_logprobs": top}}
    return {"choices": [choice], "usage": {"prompt_tokens": PROMPT}, "kv_transfer_params": None}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    client = httpx.AsyncClient

    def connect(**options: Any) -> httpx.AsyncClient:
        return client(transport=httpx.MockTransport(engine.answer), **options)

    monkeypatch.setattr(httpx, "AsyncClient", connect)
    monkeypatch.setattr(module, "PAUSES", (0.0, 0.0))
    return engine


async def run() -> Result:
    async with Canary(URL + "/v1/") as canary:
        return await canary.run()


async def test_a_healthy_cache_is_asked_once_for_each_tier(engine: Engine) -> None:
    result = await run()
    assert result.stage is None
    assert list(result.served) == ["ram", "ssd"]
    assert (result.requests, result.computed) == (3, PROMPT)
    ids = {request["kv_transfer_params"]["kvtier"]["canary"]["id"] for request in engine.requests}
    salts = {request["cache_salt"] for request in engine.requests}
    assert (len(ids), len(salts)) == (1, 3)
    assert len({request["prompt"] for request in engine.requests}) == 1
    await run()
    assert len({request["prompt"] for request in engine.requests}) == 2


async def test_the_prompt_is_as_long_as_the_chunks_of_the_engine(engine: Engine) -> None:
    engine.chunk_tokens = 640
    engine.located = 672
    engine.loads = lambda tier: {tier: 672}
    result = await run()
    assert result.stage is None
    assert (result.prompt_tokens, result.requests) == (672, 4)


async def test_an_engine_that_verifies_computes_one_prompt_again_in_a_batch(engine: Engine) -> None:
    engine.verifies = True
    async with Canary(URL) as canary:
        assert (await canary.run()).requests == 5
        assert (await canary.run()).requests == 3
    [again] = [request for request in engine.requests if isinstance(request["prompt"], list)]
    stored = engine.requests[0]
    assert again["prompt"][0] == stored["prompt"] != again["prompt"][1]
    assert again["kv_transfer_params"] == stored["kv_transfer_params"]
    assert again["cache_salt"] != stored["cache_salt"]


@pytest.mark.parametrize("pools", [True, False])
async def test_another_engine_loads_what_one_has_stored_or_pushed_to_it(engine: Engine, pools: bool) -> None:
    engine.pools, engine.peer = pools, "0.0.0.0:8201"
    async with Canary(URL) as first, Canary("http://other:8000") as second:
        await first.run()
        await second.run()
        engine.requests.clear()
        engine.loads = lambda tier: {"peers": PROMPT}
        result = await second.run(first)
    assert result.stage is None
    assert "peers of http://other:8000 served" in result.describe()
    write, _, read = (request["kv_transfer_params"]["kvtier"] for request in engine.requests)
    assert read["canary"]["id"] == write["canary"]["id"]
    pushed = {"kv_transfer": {"to": "other:8201"}}
    assert {name: write[name] for name in write if name not in ("cache", "canary")} == (
        {} if pools else pushed
    )
    assert ("expect" in read) is not pools


def test_the_checks_of_several_engines_end_with_what_one_loads_from_another(engine: Engine) -> None:
    checks = check_engines([URL, "http://other:8000"])
    assert [check.status for check in checks] == ["ok", "ok", "ok"]
    assert checks[2].name == f"http://other:8000 loads what {URL} stores"
    engine.loads = lambda tier: {} if tier == "-" else {tier: PROMPT}
    engine.located = 0
    [*_, last] = check_engines([URL, "http://other:8000"])
    assert (last.status, "peer.others" in last.remedy) == ("fail", True), last
    engine.kvtier = False
    assert len(check_engines([URL, "http://other:8000"])) == 2


async def test_an_engine_whose_chunks_change_all_the_time_is_left(
    monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    sizes = itertools.count(300)
    monkeypatch.setattr(
        Engine, "chunk_tokens", property(lambda _: next(sizes), lambda *_: None), raising=False
    )
    with pytest.raises(CanaryError, match="another size each time"):
        await run()
    assert len(engine.requests) == 2


async def test_an_answer_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    engine.metrics *= 20
    async with Canary(URL) as canary:
        with pytest.raises(CanaryError, match="more than 1000 bytes"):
            await canary.waiting()


@pytest.mark.parametrize(
    ("change", "stage", "tier", "requests"),
    [
        ({"connected": False}, "store", "", 1),
        ({"located": 0, "loads": lambda tier: {}}, "lookup", "ram", 4),
        ({"loads": lambda tier: {"ram": PROMPT}}, "store", "ssd", 5),
        ({"loads": lambda tier: {} if tier == "ssd" else {tier: PROMPT}}, "load", "ssd", 3),
        ({"loads": lambda tier: {tier: 100}}, "load", "ram", 2),
        ({"offset": lambda hints: 0.9 * (hints["cache"] == "read")}, "tokens", "ram", 3),
        ({"offset": lambda hints: 0.3 * (hints["cache"] == "read")}, None, "", 3),
    ],
)
async def test_the_stage_where_the_path_broke_is_named(
    engine: Engine, change: dict[str, Any], stage: str | None, tier: str, requests: int
) -> None:
    vars(engine).update(change)
    result = await run()
    assert (result.stage, result.tier, result.requests) == (stage, tier, requests)
    assert f"{PROMPT} of {PROMPT} tokens stored" in result.describe()


async def test_an_engine_that_computes_other_tokens_each_time_is_no_failure_of_the_cache(
    engine: Engine,
) -> None:
    engine.offset = lambda hints: float(len(engine.requests))
    with pytest.raises(CanaryError, match="other tokens each time"):
        await run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kvtier": False}, "has no kvtier"),
        ({"chunk_tokens": 1 << 40}, "like vLLM"),
        ({"chunk_tokens": 0}, "like vLLM"),
        ({"status": 401}, "requires an API key"),
        ({"status": 503}, "answers with status 503: starting"),
        ({"_completion": lambda body: []}, "does not answer like vLLM"),
        ({"_completion": lambda body: {"choices": [{}], "usage": {"prompt_tokens": 3}}}, "like vLLM"),
        ({"_completion": lambda body: completion([], [])}, "like vLLM"),
        ({"_completion": lambda body: completion([1], [{"token_id:1": -1.0}])}, "like vLLM"),
        ({"_completion": lambda body: completion([1] * NEW_TOKENS, [{}] * NEW_TOKENS)}, "like vLLM"),
    ],
)
async def test_a_server_that_cannot_be_checked_is_no_failure_of_the_cache(
    engine: Engine, change: dict[str, Any], message: str
) -> None:
    vars(engine).update(change)
    with pytest.raises(CanaryError, match=message):
        await run()


class Watched:
    """A periodic canary, and whether an engine is connected."""

    def __init__(self) -> None:
        self.connected = True
        settings = CanarySettings(engine=URL, api_key=SECRET)  # type: ignore[arg-type]
        self.periodic = Periodic(URL, settings, lambda: self.connected)

    async def once(self) -> dict[str, Any]:
        await self.periodic.once()
        return self.periodic.status


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"metrics": "vllm:num_requests_waiting 3.0\n"}, "3 requests are waiting"),
        ({"status": 503}, "status 503"),
    ],
)
async def test_a_busy_or_starting_engine_is_left_alone(
    engine: Engine, change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched()
    vars(engine).update(change)
    for _ in range(3):
        status = await watched.once()
    assert not engine.requests
    assert (status["results"]["skipped"], status["alert"]) == (3, False)
    assert len([record for record in caplog.records if reason in record.message]) == 1


async def test_no_alert_while_the_engine_stops(engine: Engine) -> None:
    watched = Watched()

    def stopping(tier: str) -> dict[str, int]:
        watched.connected = False
        return {}

    engine.loads = stopping
    assert (await watched.once())["results"]["skipped"] == 1
    assert (await watched.once())["results"]["skipped"] == 2
    assert not watched.periodic.status["alert"]


async def test_two_failures_alert_once_each_until_a_run_is_ok(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watched, serves, started = Watched(), engine.loads, time.time()
    engine.loads = lambda tier: {}
    assert not (await watched.once())["alert"]
    status = await watched.once()
    assert (status["alert"], status["results"]["load"]) == (True, 2)
    [error] = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert f"{PROMPT} of {PROMPT} tokens stored; load failed for tier ram: 0 of {PROMPT} located" in error
    engine.loads = serves
    status = await watched.once()
    assert (status["alert"], status["results"]["ok"]) == (False, 1)
    assert status["last_ok"] > started
    assert SECRET not in caplog.text


async def test_wrong_tokens_alert_at_once(engine: Engine) -> None:
    watched = Watched()
    engine.offset = lambda hints: 2.0 * (hints["cache"] == "read")
    assert (await watched.once())["alert"]


def test_a_key_that_no_header_may_contain_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY, f"{SECRET}\n")
    [check] = check_engines([URL])
    assert (check.status, SECRET in str(check)) == ("fail", False), check


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "does not answer"),
        ("ftp://127.0.0.1", "does not answer"),
        ("http://127.0.0.1:1", "does not answer"),
        ("http://[::1", "does not answer"),
    ],
)
def test_a_wrong_url_fails_with_what_to_check(url: str, message: str) -> None:
    [check] = check_engines([url])
    assert (check.status, message in check.found) == ("fail", True), check
    assert "check the URL" in check.remedy


def test_a_slow_engine_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        async def run() -> None:
            async with Canary(f"http://127.0.0.1:{port}", seconds=0.05) as canary:
                await canary.run()

        with pytest.raises(CanaryError, match="has not answered within"):
            anyio.run(run)
