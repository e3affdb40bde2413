"""Engines come and go, say who they are, and are chosen."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest

from kvtier.errors import SettingsError
from kvtier.proxy.app import make_app
from kvtier.proxy.checks import reachable
from kvtier.proxy.connections import Connections
from kvtier.proxy.engine import Engine, Role, State
from kvtier.proxy.fleet import SLACK, Fleet
from kvtier.proxy.prompt import BLOCK_BYTES, PrefixMemory, Prompt
from kvtier.proxy.settings import EngineAddress, is_loopback, proxy_settings

from .conftest import Place, running, settings_of
from .stub import DONE, Slow, Stub, event, says

pytestmark = pytest.mark.anyio

TOKEN = "a token of these tests"


# ── added and removed ──


async def test_engines_are_added_and_removed(place: Place) -> None:
    (prefiller,), (decoder,) = place.prefillers, place.decoders
    listed = (await place.client.get("/engines")).json()
    assert [(engine["role"], engine["url"], engine["state"]) for engine in listed] == [
        ("prefill", prefiller.url, "up"),
        ("decode", decoder.url, "up"),
    ]
    async with Stub("10.0.0.9:1").serving() as stub:
        added = await place.client.post("/engines", json={"role": "decode", "url": stub.url + "/v1/"})
        assert (added.status_code, added.json()["url"]) == (201, stub.url)
        again = await place.client.post("/engines", json={"role": "decode", "url": stub.url})
        assert again.status_code == 409
        assert "is there already" in again.json()["error"]["message"]
        await place.is_ready()
        removed = await place.client.delete("/engines", params={"url": decoder.url})
        assert [engine["url"] for engine in removed.json()] == [decoder.url]
        await place.ask()
        assert place.prefillers[0].asked[0].ours == {"hand_over": {"to": "10.0.0.9:1"}}
        assert (len(stub.asked), len(decoder.asked)) == (1, 0)
        assert (await place.client.delete("/engines", params={"url": decoder.url})).status_code == 404
        await decoder.until(lambda: not decoder.connections)
        await place.client.delete("/engines", params={"url": stub.url, "role": "decode"})
        await stub.until(lambda: not stub.connections)


async def test_an_engine_that_is_removed_may_finish(place: Place) -> None:
    slow, (decoder,) = Slow(), place.decoders
    decoder.then.append(slow)
    slow.say(event(1))
    async with place.stream() as response:
        received = aiter(response.aiter_raw())
        assert await anext(received) == event(1)
        await place.client.delete("/engines", params={"url": decoder.url})
        assert (await place.ask()).status_code == 503
        slow.say(DONE)
        assert await anext(received) == DONE
        slow.say(None)
        assert [piece async for piece in received] == []
    await place.until(lambda: not place.proxy.fleet.leaving)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"role": "decode", "url": "nowhere"}, "write one like http://10.0.0.1:8100"),
        ({"role": "decode", "url": "ftp://a"}, "write one like http://10.0.0.1:8100"),
        ({"role": "decode", "url": "http://user:secret@a:1"}, "leave it out"),
        ({"role": "both", "url": "http://a:1"}, "body.role"),
        ({"role": "decode", "url": "http://a:1", "peer": "a"}, "is no address"),
        ({"role": "decode", "url": "http://a:1", "peer": "0.0.0.0:1"}, "cannot be connected to"),
        ({"role": "decode"}, "body.url"),
    ],
)
async def test_what_is_no_engine_is_refused(place: Place, body: dict[str, Any], said: str) -> None:
    answer = await place.client.post("/engines", json=body)
    assert answer.status_code == 422
    assert said in answer.json()["error"]["message"]
    assert "secret" not in answer.text


async def test_a_token_is_needed_where_there_is_one() -> None:
    async with running(0, 1, token=TOKEN) as place:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
            for method in ("GET", "POST", "DELETE"):
                answer = await place.client.request(method, "/engines", headers=headers)
                assert answer.status_code == 401
        answer = await place.client.get("/engines", headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200


async def test_without_one_only_this_host_may_and_no_page_in_its_browser(place: Place) -> None:
    answer = await place.client.get("/engines", headers={"Origin": "https://evil.example"})
    assert answer.status_code == 403
    app: Any = httpx.ASGITransport(make_app(place.proxy), client=("192.0.2.1", 1))
    async with httpx.AsyncClient(transport=app, base_url="http://proxy") as client:
        assert (await client.get("/engines")).status_code == 403
        assert (await client.get("/health")).status_code == 200


def test_what_is_this_host() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("10.0.0.1", "::", "::ffff:10.0.0.1", "localhost", "")))


# ── what they say of themselves ──


async def test_an_engines_peer_is_asked_for(place: Place) -> None:
    (engine,) = place.proxy.fleet.of(Role.DECODE)
    assert engine.peer == "127.0.0.1:55555"  # It listens on all addresses.
    assert place.decoders[0].probes[0].body == {
        "model": "m",
        "prompt": "a",
        "max_tokens": 1,
        "kv_transfer_params": {"kvtier": {}},
    }


async def test_the_peer_that_was_written_stands() -> None:
    async with (
        Stub("10.0.0.1:1").serving() as stub,
        running(0, 0, decode=[f"{stub.url}=10.0.0.2:2"]) as place,
    ):
        (engine,) = place.proxy.fleet
        assert (engine.peer, stub.probes) == ("10.0.0.2:2", [])


async def test_what_has_no_peer_is_not_prefilled_for(caplog: pytest.LogCaptureFixture) -> None:
    async with Stub(None).serving() as stub, running(1, 1, decode=[stub.url]) as place:
        await place.ask()
        assert place.prefillers[0].asked == []
        assert place.proxy.statistics.skipped == {"no_peer": 1}
        assert f"write --decode {stub.url}=HOST:PORT" in caplog.text


async def test_an_engine_that_wants_a_key(caplog: pytest.LogCaptureFixture) -> None:
    async with Stub().serving() as stub:
        stub.models = says(401)
        async with running(1, 1, decode=[stub.url]):
            assert "name the file of its API key with --engine-key-file" in caplog.text
        stub.models = says(200, {"data": [{"id": "m"}]})
        async with running(1, 1, decode=[stub.url], engine_key="sk-of-the-proxy"):
            assert stub.probes[0].header("authorization") == "Bearer sk-of-the-proxy"
        assert "sk-of-the-proxy" not in caplog.text


@pytest.mark.parametrize(
    "models", [says(500), says(200, b"no json"), says(200, {"data": []}), says(200, {"data": [{"id": 3}]})]
)
async def test_an_engine_that_answers_nonsense_serves_even_so(models: Any) -> None:
    async with Stub().serving() as stub:
        stub.models = models
        async with running(1, 1, decode=[stub.url]) as place:
            assert (await place.ask()).status_code == 200
            assert place.proxy.statistics.skipped == {"no_peer": 1}


async def test_an_engine_that_came_back_is_asked_anew(place: Place) -> None:
    (engine,), (stub,) = place.proxy.fleet.of(Role.DECODE), place.decoders
    await place.ask()
    assert len(engine.memory)
    stub.health = says(503)
    await place.until(lambda: engine.state == State.DOWN)
    assert (len(engine.memory), engine.peer) == (0, None)
    stub.peer, stub.health = "0.0.0.0:7", says(200, b"")
    await place.is_ready()
    assert engine.peer == "127.0.0.1:7"


async def test_addresses_as_others_reach_them() -> None:
    engine = Engine(Role.DECODE, "http://10.0.0.5:8000", None, Connections(None), 1000)
    assert reachable("10.0.0.1:2", engine) == "10.0.0.1:2"
    assert reachable("[::]:2", engine) == "10.0.0.5:2"
    assert reachable("[fe80::1]:2", engine) == "[fe80::1]:2"
    assert [reachable(peer, engine) for peer in (None, "", "a", "a:b", "::1:2")] == [None] * 5


async def test_models_are_those_of_a_decoder() -> None:
    async with running(1, 2) as place:
        place.decoders[0].models = place.decoders[1].models = says(200, b'{"data":  [ ]}', x_said="so")
        answer = await place.client.get("/v1/models", headers={"Authorization": "Bearer k"})
        assert (answer.status_code, answer.content, answer.headers["x-said"]) == (
            200,
            b'{"data":  [ ]}',
            "so",
        )
        for engine in place.proxy.fleet.of(Role.DECODE):
            place.proxy.remove(engine)
        assert (await place.client.get("/v1/models")).status_code == 503


# ── chosen ──


def fleet_of(count: int) -> list[Engine]:
    fleet = Fleet(1000)
    return [fleet.add(Role.DECODE, f"http://d{number}:1") for number in range(count)]


def choice(engines: list[Engine], **held: int) -> str | None:
    fleet = Fleet(1000)
    fleet._engines = {(engine.role, engine.url): engine for engine in engines}
    chosen = fleet.choose(Role.DECODE, lambda engine: held.get(engine.host, 0))
    return None if chosen is None else chosen.host


def test_the_idlest_that_holds_most_is_chosen() -> None:
    engines = fleet_of(3)
    for engine, load in zip(engines, (3, 1, 2), strict=True):
        engine.lives()
        engine.load = load
    assert choice(engines) == "d1"
    assert choice(engines, d0=100) == "d0"
    assert choice(engines, d0=100, d2=200) == "d2"
    engines[0].load = SLACK + 3
    assert choice(engines, d0=100) == "d1"  # It has too much to do.
    engines[1].is_down("has gone")
    assert choice(engines, d1=100) == "d2"
    for engine in engines:
        engine.is_down("has gone")
    assert choice(engines) is not None  # One that is down is better than none.
    assert choice([]) is None


def test_equals_take_turns() -> None:
    fleet = Fleet(1000)
    for number in range(3):
        fleet.add(Role.PREFILL, f"http://p{number}:1").lives()
    chosen = []
    for _ in range(6):
        engine = fleet.choose(Role.PREFILL, lambda _: 0)
        assert engine is not None
        with engine.loaded():
            chosen.append(engine.host)
    assert chosen == ["p0", "p1", "p2"] * 2
    for engine in fleet:
        engine.is_down("has gone")
    assert fleet.choose(Role.PREFILL, lambda _: 0) is None  # A prompt can be computed without.


async def test_conversations_stay_where_they_began() -> None:
    async with running(2, 2) as place:
        for _ in range(2):
            for number in range(4):
                await place.ask(prompt=f"user {number} " * 500)
        for stub in (*place.prefillers, *place.decoders):
            prompts = [asked.body["prompt"] for asked in stub.asked]
            assert len(prompts) == (2 if stub in place.prefillers else 4)
            assert len(set(prompts)) == 2


# ── remembered ──


def test_a_prompt_is_known_by_its_bytes() -> None:
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


def test_memory_is_bounded_and_beginnings_stay_longest() -> None:
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


# ── named ──


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"decode": ["nowhere"]}, "--decode: 'nowhere' is no URL of an engine"),
        ({"decode": ["http://a:1=b"]}, "--decode: 'b' is no address"),
        ({"decode": ["http://a:1", "http://a:1/v1=b:2"]}, "http://a:1 is named twice"),
        ({"prefill": ["http://a:1/?x=1"]}, "--prefill: "),
        ({"prefill": [f"http://a:{port}" for port in range(1, 300)]}, "more than 256 engines"),
        ({"controller": "a:b"}, "--controller: "),
        ({"token": "short"}, "--token: it has fewer than 16 characters"),
        ({"most_body": "1GiB"}, "--most-body: "),
        ({"most_body": "2MiB", "most_held": "1MiB"}, "most_held"),
        ({"listen": "9000"}, "--listen: "),
        ({"check": "never"}, "--check: "),
        ({"unknown": 1}, "--unknown: "),
    ],
)
def test_settings_that_are_wrong(values: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        proxy_settings(**values)
    assert said in str(caught.value)


def test_engines_as_they_are_written() -> None:
    assert EngineAddress.of("http://a:1/v1/") == ("http://a:1", None)
    assert EngineAddress.of("https://a/base=[::1]:5") == ("https://a/base", "[::1]:5")
    assert settings_of(decode=["http://a:1=b:2"]).decoders == [EngineAddress("http://a:1", "b:2")]


async def test_many_connections_to_one_engine(place: Place) -> None:
    (engine,) = place.proxy.fleet.of(Role.DECODE)
    slow = [Slow() for _ in range(50)]
    place.decoders[0].then.extend(slow)
    async with anyio.create_task_group() as tasks:
        for _ in slow:
            tasks.start_soon(lambda: place.ask(prompt="x", stream=True))
        await place.until(lambda: engine.connections.used >= 50)
        for one in slow:
            one.say(None)
    assert place.outcomes == {"ok": 50}
