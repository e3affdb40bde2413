"""Adding, probing, choosing and remembering engines."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import pytest

from kvtier.errors import SettingsError
from kvtier.fleet.proxy import exchange
from kvtier.fleet.proxy.app import make_app
from kvtier.fleet.proxy.checks import PROBE, reachable_address
from kvtier.fleet.proxy.connections import Connections
from kvtier.fleet.proxy.prompt import BLOCK_BYTES, PrefixMemory, Prompt
from kvtier.fleet.proxy.settings import ProxySettings, split_engine
from kvtier.fleet.proxy.upstream import SLACK, Role, State, Upstream, Upstreams
from kvtier.settings.peer import is_loopback
from tests.rigs.waiting import until

from .conftest import Cluster, running
from .stub import DONE, Behaviour, Slow, Stub, dies, event, hangs, responds

pytestmark = pytest.mark.anyio

TOKEN = "a token of these tests"


# ── adding and removing ──


async def test_engines_are_added_and_removed(cluster: Cluster) -> None:
    (prefiller,), (decoder,) = cluster.prefillers, cluster.decoders
    listed = (await cluster.client.get("/engines")).json()
    assert [(engine["role"], engine["url"], engine["state"]) for engine in listed] == [
        ("prefill", prefiller.url, "up"),
        ("decode", decoder.url, "up"),
    ]
    async with Stub("10.0.0.9:1").serving() as stub:
        added = await cluster.client.post("/engines", json={"role": "decode", "url": stub.url + "/v1/"})
        assert (added.status_code, added.json()["url"]) == (201, stub.url)
        again = await cluster.client.post("/engines", json={"role": "decode", "url": stub.url})
        assert again.status_code == 409
        assert "exists already" in again.json()["error"]["message"]
        await cluster.wait_until_ready()
        removed = await cluster.client.delete("/engines", params={"url": decoder.url})
        assert [engine["url"] for engine in removed.json()] == [decoder.url]
        await cluster.complete()
        assert cluster.prefillers[0].requests[0].kvtier_params == {"kv_transfer": {"to": "10.0.0.9:1"}}
        assert (len(stub.requests), len(decoder.requests)) == (1, 0)
        assert (await cluster.client.delete("/engines", params={"url": decoder.url})).status_code == 404
        await until(lambda: not decoder.connections)
        await cluster.client.delete("/engines", params={"url": stub.url, "role": "decode"})
        await until(lambda: not stub.connections)


async def test_removed_engine_finishes_its_requests(cluster: Cluster) -> None:
    (decoder,) = cluster.decoders
    slow = decoder.stream(event(1))
    async with cluster.stream() as response:
        received = aiter(response.aiter_raw())
        assert await anext(received) == event(1)
        await cluster.client.delete("/engines", params={"url": decoder.url})
        assert (await cluster.complete()).status_code == 503
        slow.send(DONE)
        assert await anext(received) == DONE
        slow.send(None)
        assert [piece async for piece in received] == []
    await until(lambda: not cluster.proxy.upstreams.draining)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"role": "decode", "url": "nowhere"}, "write one like http://10.0.0.1:8100"),
        ({"role": "decode", "url": "ftp://a"}, "write one like http://10.0.0.1:8100"),
        ({"role": "decode", "url": "http://user:secret@a:1"}, "leave it out"),
        ({"role": "both", "url": "http://a:1"}, "body.role"),
        ({"role": "decode", "url": "http://a:1", "peer": "a"}, "is not an address"),
        ({"role": "decode", "url": "http://a:1", "peer": "0.0.0.0:1"}, "cannot be connected to"),
        ({"role": "decode"}, "body.url"),
    ],
)
async def test_invalid_engine_is_refused(cluster: Cluster, body: dict[str, Any], message: str) -> None:
    answer = await cluster.client.post("/engines", json=body)
    assert answer.status_code == 422
    assert message in answer.json()["error"]["message"]
    assert "secret" not in answer.text


async def test_configured_token_is_required() -> None:
    async with running(0, 1, token=TOKEN) as cluster:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
            for method in ("GET", "POST", "DELETE"):
                answer = await cluster.client.request(method, "/engines", headers=headers)
                assert answer.status_code == 401
        answer = await cluster.client.get("/engines", headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200


async def test_without_a_token_only_this_host_has_access_and_no_browser_page(cluster: Cluster) -> None:
    answer = await cluster.client.get("/engines", headers={"Origin": "https://evil.example"})
    assert answer.status_code == 403
    app: Any = httpx.ASGITransport(make_app(cluster.proxy), client=("192.0.2.1", 1))
    async with httpx.AsyncClient(transport=app, base_url="http://proxy") as client:
        assert (await client.get("/engines")).status_code == 403
        assert (await client.get("/health")).status_code == 200


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("10.0.0.1", "::", "::ffff:10.0.0.1", "localhost", "")))


# ── probing ──


async def test_engine_is_probed_for_its_peer_address(cluster: Cluster) -> None:
    (engine,) = cluster.proxy.upstreams.of(Role.DECODE)
    assert engine.peer == "127.0.0.1:55555"  # It listens on all addresses.
    assert len(PROBE.split()) > 4, "several tokens, with any tokenizer"
    assert cluster.decoders[0].probes[0].body == {
        "model": "m",
        "prompt": PROBE,
        "max_tokens": 1,
        "kv_transfer_params": {"kvtier": {}},
    }


async def test_configured_peer_address_is_not_probed() -> None:
    async with (
        Stub("10.0.0.1:1").serving() as stub,
        running(0, 0, decode=[f"{stub.url}=10.0.0.2:2"]) as cluster,
    ):
        (engine,) = cluster.proxy.upstreams
        assert (engine.peer, stub.probes) == ("10.0.0.2:2", [])


async def test_no_prefill_for_a_decoder_without_a_peer_address(caplog: pytest.LogCaptureFixture) -> None:
    async with Stub(None).serving() as stub, running(1, 1, decode=[stub.url]) as cluster:
        await cluster.complete()
        assert cluster.prefillers[0].requests == []
        assert cluster.proxy.statistics.skipped == {"no_peer": 1}
        assert f"write --decode {stub.url}=HOST:PORT" in caplog.text


async def test_engine_requires_an_api_key(caplog: pytest.LogCaptureFixture) -> None:
    async with Stub().serving() as stub:
        stub.models = responds(401)
        async with running(1, 1, decode=[stub.url]):
            assert "name the file of its API key with --engine-key-file" in caplog.text
        stub.models = responds(200, {"data": [{"id": "m"}]})
        async with running(1, 1, decode=[stub.url], engine_key="sk-of-the-proxy"):
            assert stub.probes[0].header("authorization") == "Bearer sk-of-the-proxy"
        assert "sk-of-the-proxy" not in caplog.text


@pytest.mark.parametrize(
    "models",
    [
        responds(500),
        responds(200, b"no json"),
        responds(200, {"data": []}),
        responds(200, {"data": [{"id": 3}]}),
    ],
)
async def test_engine_with_malformed_models_still_serves(models: Any) -> None:
    async with Stub().serving() as stub:
        stub.models = models
        async with running(1, 1, decode=[stub.url]) as cluster:
            assert (await cluster.complete()).status_code == 200
            assert cluster.proxy.statistics.skipped == {"no_peer": 1}


async def test_engine_is_probed_again_after_an_outage(cluster: Cluster) -> None:
    (engine,), (stub,) = cluster.proxy.upstreams.of(Role.DECODE), cluster.decoders
    await cluster.complete()
    assert len(engine.memory)
    stub.health = responds(503)
    await until(lambda: engine.state == State.DOWN)
    assert (len(engine.memory), engine.peer) == (0, None)
    stub.peer, stub.health = "0.0.0.0:7", responds(200, b"")
    await cluster.wait_until_ready()
    assert engine.peer == "127.0.0.1:7"


async def test_reachable_address() -> None:
    engine = Upstream(Role.DECODE, "http://10.0.0.5:8000", None, Connections(None), 1000)
    assert reachable_address("10.0.0.1:2", engine) == "10.0.0.1:2"
    assert reachable_address("[::]:2", engine) == "10.0.0.5:2"
    assert reachable_address("[fe80::1]:2", engine) == "[fe80::1]:2"
    assert [reachable_address(peer, engine) for peer in (None, "", "a", "a:b", "::1:2")] == [None] * 5


async def test_models_come_from_a_decoder() -> None:
    async with running(1, 2) as cluster:
        cluster.decoders[0].models = cluster.decoders[1].models = responds(
            200, b'{"data":  [ ]}', x_test="so"
        )
        answer = await cluster.client.get("/v1/models", headers={"Authorization": "Bearer k"})
        assert (answer.status_code, answer.content, answer.headers["x-test"]) == (
            200,
            b'{"data":  [ ]}',
            "so",
        )
        for engine in cluster.proxy.upstreams.of(Role.DECODE):
            cluster.proxy.upstreams.remove(engine)
        assert (await cluster.client.get("/v1/models")).status_code == 503


@pytest.mark.parametrize("fault", [dies, hangs])
async def test_models_come_from_another_decoder_if_one_fails(
    fault: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MODELS_SECONDS", 1.0)
    async with running(0, 2) as cluster:
        (_, engine), (first, second) = cluster.proxy.upstreams.of(Role.DECODE), cluster.decoders
        first.models, second.models = fault, responds(200, b"{}")
        engine.load += 1  # The first is tried first.
        answer = await cluster.client.get("/v1/models")
        engine.load -= 1
        assert (answer.status_code, answer.content) == (200, b"{}")


# ── choosing ──


def decoders(count: int) -> Upstreams:
    upstreams = Upstreams(1000)
    for number in range(count):
        upstreams.add(Role.DECODE, f"http://d{number}:1")
    return upstreams


def choice(upstreams: Upstreams, **held: int) -> str | None:
    chosen = upstreams.choose(Role.DECODE, lambda engine: held.get(engine.host, 0))
    return None if chosen is None else chosen.host


def test_choice_by_prefix_and_load() -> None:
    upstreams = decoders(3)
    engines = list(upstreams)
    for engine, load in zip(engines, (3, 1, 2), strict=True):
        engine.mark_up()
        engine.load = load
    assert choice(upstreams) == "d1"
    assert choice(upstreams, d0=100) == "d0"
    assert choice(upstreams, d0=100, d2=200) == "d2"
    engines[0].load = SLACK + 3
    assert choice(upstreams, d0=100) == "d1"  # It is overloaded.
    engines[1].mark_down("unreachable")
    assert choice(upstreams, d1=100) == "d2"
    for engine in engines:
        engine.mark_down("unreachable")
    assert choice(upstreams) is not None  # An engine that is down is better than no engine.
    assert choice(decoders(0)) is None


def test_equal_engines_are_chosen_round_robin() -> None:
    upstreams = Upstreams(1000)
    for number in range(3):
        upstreams.add(Role.PREFILL, f"http://p{number}:1").mark_up()
    chosen = []
    for _ in range(6):
        engine = upstreams.choose(Role.PREFILL, lambda _: 0)
        assert engine is not None
        with engine.reserved():
            chosen.append(engine.host)
    assert chosen == ["p0", "p1", "p2"] * 2
    for engine in upstreams:
        engine.mark_down("unreachable")
    assert upstreams.choose(Role.PREFILL, lambda _: 0) is None  # Prefill instances are optional.


async def test_conversations_stay_on_their_engines() -> None:
    async with running(2, 2) as cluster:
        for _ in range(2):
            for number in range(4):
                await cluster.complete(prompt=f"user {number} " * 500)
        for stub in (*cluster.prefillers, *cluster.decoders):
            prompts = [request.body["prompt"] for request in stub.requests]
            assert len(prompts) == (2 if stub in cluster.prefillers else 4)
            assert len(set(prompts)) == 2


# ── prefix memory ──


def test_prefix_memory_matches_bytes() -> None:
    memory = PrefixMemory(1_000_000)
    text = bytes(range(65, 91)) * 400  # 10,400 bytes
    memory.add(Prompt(b'"' + text + b'"'))
    assert memory.held(Prompt(b'"' + text + b'"')) == Prompt(b'"' + text + b'"').tokens
    longer = Prompt(b'"' + text + text + b'"')
    assert memory.held(longer) == pytest.approx(10 * BLOCK_BYTES / 4, rel=0.01)
    assert memory.held(Prompt(b'"x' + text + b'"')) == 0
    assert memory.held(Prompt(b'"' + text + b'"', b"other")) == 0
    assert memory.held(Prompt(b'"' + text[:-2] + b'"')) > 0
    for empty in (b"", b'""', b"[]", b"[[]]"):
        assert memory.held(Prompt(empty)) == 0
        assert Prompt(empty).tokens <= 1


def test_prefix_memory_is_bounded_and_keeps_prefixes() -> None:
    memory = PrefixMemory(2560)  # 10 blocks
    prompts = [Prompt(f"{number}".encode() + b"x" * (8 * BLOCK_BYTES)) for number in range(2)]
    for prompt in prompts:
        memory.add(prompt)
        assert len(memory) <= 10
    assert memory.held(prompts[1]) == prompts[1].tokens
    assert 0 < memory.held(prompts[0]) < prompts[0].tokens
    memory.add(Prompt(b"y" * (100 * BLOCK_BYTES)))
    assert len(memory) == 10
    nothing = PrefixMemory(0)
    nothing.add(prompts[0])
    assert nothing.held(prompts[0]) == 0


# ── settings ──


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode": ["nowhere"]}, "--decode: 'nowhere' is not an engine URL"),
        ({"decode": ["http://a:1=b"]}, "--decode: 'b' is not an address"),
        ({"decode": ["http://a:1", "http://a:1/v1=b:2"]}, "http://a:1 is listed twice"),
        ({"prefill": ["http://a:1/?x=1"]}, "--prefill: "),
        ({"prefill": [f"http://a:{port}" for port in range(1, 300)]}, "more than 256 engines"),
        ({"controller": "a:b"}, "--controller: "),
        ({"token": "short"}, "--token: it has fewer than 16 characters"),
        ({"max_body": "1GiB"}, "--max-body: "),
        ({"max_body": "2MiB", "max_held": "1MiB"}, "max_held"),
        ({"listen": "9000"}, "--listen: "),
        ({"check": "never"}, "--check: "),
        ({"unknown": 1}, "--unknown: "),
    ],
)
def test_invalid_settings(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        ProxySettings.of(**values)
    assert message in str(caught.value)


def test_engine_addresses() -> None:
    assert split_engine("http://a:1/v1/") == ("http://a:1", None)
    assert split_engine("https://a/base=[::1]:5") == ("https://a/base", "[::1]:5")


async def test_many_connections_to_one_engine(cluster: Cluster) -> None:
    (engine,) = cluster.proxy.upstreams.of(Role.DECODE)
    slow = [Slow() for _ in range(50)]
    cluster.decoders[0].then.extend(slow)
    async with anyio.create_task_group() as tasks:
        for _ in slow:
            tasks.start_soon(lambda: cluster.complete(prompt="x", stream=True))
        await until(lambda: engine.connections.used >= 50)
        for behaviour in slow:
            behaviour.send(None)
    assert cluster.outcomes == {"ok": 50}


@pytest.fixture
def _no_garbage_collection() -> Iterator[None]:
    """Keep open what only the garbage collector would close."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
async def test_connection_cancelled_while_connecting_is_closed() -> None:
    connections, delays = Connections(None), random.Random(1)
    async with Stub().serving() as stub:
        cancelled = 0
        for _ in range(400):
            with anyio.move_on_after(delays.uniform(0.0001, 0.002)) as scope:
                async with connections.exchange(httpx.Request("GET", f"{stub.url}/health"), 5.0) as response:
                    await response.aread()
            cancelled += scope.cancelled_caught
            await connections.aclose()
        assert cancelled
        await until(lambda: not stub.connections)
