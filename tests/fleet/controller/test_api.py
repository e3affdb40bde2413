"""The controller's HTTP API: access, requests, errors, descriptions, and the event stream."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from starlette.requests import HTTPConnection
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from kvtier.fleet.controller import bodies, stream
from kvtier.fleet.controller.answers import InstancesAnswer
from kvtier.fleet.controller.app import INTERNAL_ERROR, WRONG_TOKEN, Authenticator
from kvtier.fleet.controller.events import Event
from kvtier.fleet.member.protocol import CONNECT_PATH
from tests.rigs.running_controller import (
    A_TO_B,
    KEYS,
    MODEL,
    TIMEOUT_SECONDS,
    Gate,
    RunningController,
    heartbeat,
    running_controller,
)

pytestmark = pytest.mark.anyio

TOKEN = "an unguessable token"
READS = ("/instances", "/instances/a", "/events", "/events/1", "/metrics", "/stream", "/why")
WRITES = (
    *("/lookup", "/move", "/prefetch", "/pin", "/unpin", "/clear", "/why"),
    *("/check_finish", "/health", "/query_instance", "/query_worker_info", "/compress", "/decompress"),
)


# Access


async def test_requests_and_registration_require_the_token(tmp_path: Path) -> None:
    async with running_controller(tmp_path, token=TOKEN) as controller:
        async with httpx.AsyncClient(base_url=controller.url, trust_env=False, verify=False) as client:
            for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Basic {TOKEN}"}):
                for method, paths in (("GET", READS), ("POST", WRITES)):
                    for path in paths:
                        answer = await client.request(method, path, headers=headers, content=b"{" * 1000)
                        assert answer.status_code == 401, path
                        assert answer.headers["WWW-Authenticate"] == "Bearer"
                        assert "Authorization: Bearer" in answer.json()["detail"]
                        assert TOKEN not in answer.text
                with pytest.raises(InvalidStatus) as refused:
                    await connect(
                        controller.url.replace("http", "ws") + CONNECT_PATH,
                        additional_headers=headers,
                        proxy=None,
                    )
                assert refused.value.response.status_code == 401
            for path in ("/", "/healthz", "/docs", "/openapi.json"):
                assert (await client.get(path)).status_code == 200, path
        assert not controller.registry.members
        async with controller.instance("a"):
            assert (await controller.get("/healthz")) == {
                "status": "ok",
                "version": "0.2.0",
                "instances": 1,
                "leads": True,
            }


# Requests


WRONG_BODIES = [
    ("/lookup", "{}", "set `tokens`, `prompt` or `messages`"),
    ("/lookup", '{"tokens": [1], "prompt": "x"}', "only one of"),
    ("/why", '{"messages": [{"role": "user"}], "prompt": "x"}', "only one of"),
    ("/why", '{"messages": ["x"]}', "messages[0]: Expected `object`"),
    ("/why", '{"tokens": [1, -1]}', "tokens[1]"),
    ("/lookup", '{"tokens": [1, "2"]}', "tokens[1]: Expected `int`, got `str`"),
    ("/lookup", '{"tokens": [1, true]}', "tokens[1]"),
    ("/lookup", '{"tokens": [1.5]}', "tokens[0]"),
    ("/lookup", '{"tokens": [-1]}', "tokens[0]: Expected `int` >= 0"),
    ("/lookup", '{"tokens": [4294967296]}', "tokens[0]"),
    ("/lookup", '{"tokens": "12"}', "tokens"),
    ("/lookup", '{"tokens": [1], "tokenz": 2}', "unknown field `tokenz`"),
    ("/lookup", '{"prompt": "\\ud800"}', "not valid JSON"),
    ("/lookup", "[", "Expected `object`, got `array`"),
    ("/lookup", "", "not valid JSON"),
    ("/lookup", '{"tokens": [1], "%s": 2}' % ("x" * 60_000), "unknown field `xxx"),
    ("/lookup", '{"tokens": [1,]}', "not valid JSON"),
    ("/lookup", '{"tokens": [1], "salt": "%s"}' % ("x" * 2000), "salt"),
    ("/move", '{"tokens": [1]}', "missing required field `old_position`"),
    ("/move", '{"tokens": [1], "old_position": ["a"], "new_position": ["b", ""]}', "old_position"),
    ("/prefetch", '{"tokens": [1], "instance": "a", "tier": "b", "deadline": "soon"}', "is not a duration"),
    ("/prefetch", '{"tokens": [1], "instance": "a", "tier": "b", "deadline": 0}', "deadline"),
    ("/pin", '{"tokens": [1], "instance": "a", "tier": "b", "ttl": -1}', "ttl"),
    ("/clear", '{"instance": "a", "model": "m"}', "set `tokens` or `prompt` as well"),
    ("/clear", "{}", "missing required field `instance`"),
]


async def test_invalid_body_is_refused_with_a_message(controller: RunningController) -> None:
    for path, body, message in WRONG_BODIES:
        answer = await controller.client.post(path, content=body)
        assert answer.status_code == 422, answer.text
        assert message in answer.json()["detail"], (path, body)
        assert answer.json()["known"] == []
        assert len(answer.text) < 500


async def test_body_limits(controller: RunningController, monkeypatch: pytest.MonkeyPatch) -> None:
    async with controller.instance("a"):
        many = json.dumps({"tokens": [100_000 + n % 900 for n in range(200_000)]})
        assert (await controller.client.post("/lookup", content=many)).json()["num_tokens"] == 200_000
        monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 1 << 20)
        answer = await controller.client.post("/lookup", content=many)
        assert (answer.status_code, answer.json()["detail"]) == (
            413,
            "the body is longer than 1,048,576 bytes",
        )
        assert answer.headers.get("connection") != "close", "the rest of the body is skipped"
    monkeypatch.setattr(bodies, "RECEIVE_SECONDS", 0.05)
    async with await anyio.connect_tcp(*controller.controller.address) as connected:
        await connected.send(
            b"POST /lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n" + b'{"tokens": ['
        )
        with anyio.fail_after(TIMEOUT_SECONDS):
            assert b" 408 " in await connected.receive()


async def test_too_long_prompt_is_one_message(controller: RunningController) -> None:
    answer = await controller.client.post("/lookup", content='{"prompt": "%s"}' % ("é" * (2 << 20)))
    assert answer.status_code == 422
    assert "`prompt` is longer than 4,190,208 bytes: send `tokens` instead" in answer.json()["detail"]


async def test_unknown_paths_and_methods(controller: RunningController) -> None:
    assert (await controller.client.get("/nowhere")).json()["detail"] == "Not Found"
    assert (await controller.client.get("/move")).status_code == 405
    assert (await controller.client.get("/events", params={"limit": 0})).status_code == 422
    problem = (await controller.client.get("/events/1", params={"wait": "x"})).json()
    assert problem["detail"].startswith("query.wait: ")


async def test_internal_error_is_reported_and_logged(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(controller.controller.operations, "lookup", lambda *_: 1 / 0)
    answer = await controller.client.post("/lookup", json={"tokens": [1]})
    assert (answer.status_code, answer.json()["detail"]) == (500, INTERNAL_ERROR)
    assert "ZeroDivisionError" in caplog.text


# Instances, events and metrics


async def test_instances_are_described(controller: RunningController) -> None:
    async with controller.instance("b"), controller.instance("a", ram=KEYS) as a:
        body = (await controller.client.get("/instances")).content
        listed = InstancesAnswer.model_validate_json(body).instances
        assert [instance.instance for instance in listed] == ["a", "b"]
        described = await controller.get("/instances/a")
        assert described["history"] == []
        assert (described["state"], described["version"], described["host"], described["process"]) == (
            "connected", "0.1.0", "test-host", 4242,
        )  # fmt: skip
        assert (described["peer"], described["transport"], described["up_to_date"]) == ("a:8200", "tcp", True)
        assert described["models"] == MODEL.names
        assert described["engines"] == ["engine"]
        assert described["last_heartbeat"] >= described["registered_at"]
        assert described["hit_rate"] is None
        assert [tier["name"] for tier in described["tiers"]] == ["ram", "ssd", "pool"]
        assert described["tiers"][0] == {
            "name": "ram", "type": "cpu", "capacity": 1 << 30, "used": 0, "chunks": 0, "available": True,
            "shared": False, "found": 0, "hit_rate": None, "outages": 0, "corrupt": 0,
        }  # fmt: skip
        await a.send(heartbeat(used=8192, looked_up=100, found=20))
        await controller.wait_until(
            lambda: controller.registry.find("a").heartbeat == heartbeat(8192, 100, 20)
        )
        history, members = controller.controller.history, controller.registry.members.values()
        at = time.time() // 10 * 10
        await history.sample(members, at - 10)
        await a.send(heartbeat(used=8192, looked_up=200, found=50))
        await controller.wait_until(
            lambda: controller.registry.find("a").heartbeat == heartbeat(8192, 200, 50)
        )
        await history.sample(members, at)
        described = await controller.get("/instances/a")
        assert (described["looked_up_tokens"], described["hit_rate"], described["tiers"][1]["used"]) == (
            200,
            0.75,
            8192,
        )
        used = [{"used": 8192}, {"used": 8192}, {"used": 0}]  # That of a shared pool is not known.
        assert described["history"] == [
            {"time": at - 10, "hit_rate": None, "tiers": used}, {"time": at, "hit_rate": 0.9, "tiers": used},
        ]  # fmt: skip
    answer = await controller.client.get("/instances/z")
    assert answer.status_code == 404


async def test_events_are_listed_and_awaited(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS), controller.instance("b") as b:
        gate = b.before = Gate()
        accepted = await controller.post("/move", **A_TO_B)
        pinned = await controller.done("/pin", instance="a", tier="ssd", tokens=[7])
        listed = await controller.get("/events", limit=10)
        assert [event["event_id"] for event in listed["events"]] == [pinned["event_id"], accepted["event_id"]]
        assert len((await controller.get("/events", limit=1))["events"]) == 1
        await gate.reached.wait()
        path = f"/events/{accepted['event_id']}"
        assert (await controller.get(path, wait=0.01))["state"] == "running"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.wait_for_end, accepted)
            await anyio.sleep(0.01)
            gate.opened.set()
    answer = await controller.client.get("/events/nonsense")
    assert answer.status_code == 404
    assert set(answer.json()["known"]) == {accepted["event_id"], pinned["event_id"]}
    for event in (await controller.get("/events"))["events"]:
        assert Event.model_validate(event).state == "done", "as the CLI parses it"


async def test_prometheus_metrics(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS), controller.instance("b"):
        await controller.done("/move", **A_TO_B)
        await controller.held()
        answer = await controller.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    for line in (
        'kvtier_controller_info{version="0.2.0"} 1.0',
        "kvtier_controller_instances 2.0",
        "kvtier_controller_keys 5.0",
        'kvtier_controller_chunks{instance="b",tier="ram"} 5.0',
        'kvtier_controller_chunks{instance="a",tier="ram"} 0.0',
        'kvtier_controller_events_total{kind="move",state="done"} 1.0',
        "kvtier_controller_events_unfinished 0.0",
        "kvtier_controller_lookups_total 1.0",
    ):
        assert line in lines
    assert 'kvtier_controller_event_seconds_total{kind="move"} ' in answer.text


async def test_every_call_has_a_description(controller: RunningController) -> None:
    description = await controller.get("/openapi.json")
    paths = description["paths"]
    assert {path for path in paths if "post" in paths[path]} == set(WRITES)
    for path, methods in paths.items():
        for method, call in methods.items():
            assert call["description"], path
            if method == "post":
                properties = call["requestBody"]["content"]["application/json"]["schema"]["properties"]
                assert all(schema["description"] for schema in properties.values()), path
    assert (
        "copy" in paths["/move"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    )


async def test_answers_are_described_for_clients_of_any_language(controller: RunningController) -> None:
    description = await controller.get("/openapi.json")
    for name in ("Event", "Result", "Report", "TierCurve", "Point", "Change"):
        schema = description["components"]["schemas"][name]
        assert schema["required"] == list(schema["properties"]), "none is ever missing"
    assert not re.findall(r"``|:\w+:`", json.dumps(description)), "the markup of Python"


# The event stream


class Listener:
    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def next(self) -> tuple[str, Any]:
        """Return the name and data of the next message."""
        with anyio.fail_after(TIMEOUT_SECONDS):
            name = await anext(self._lines)
            data = await anext(self._lines)
            assert await anext(self._lines) == ""
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    async def wait_for(self, name: str, **values: Any) -> Any:
        """Return the next message with this name and these values."""
        while True:
            received, data = await self.next()
            if received == name and all(data[key] == value for key, value in values.items()):
                return data


@asynccontextmanager
async def listening(controller: RunningController) -> AsyncIterator[Listener]:
    async with controller.client.stream("GET", "/stream") as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield Listener(response)


async def test_stream_sends_changes_immediately(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "INSTANCES_SECONDS", 0.02)
    monkeypatch.setattr(stream, "EVENTS_SECONDS", 0.01)
    async with listening(controller) as listener:
        assert await listener.next() == ("instances", {"instances": [], "gone": []})
        async with controller.instance("a", ram=KEYS), controller.instance("b") as b:
            gate = b.before = Gate()
            while len((await listener.wait_for("instances"))["instances"]) < 2:
                pass
            accepted = await controller.post("/move", **A_TO_B)
            await listener.wait_for("event", event_id=accepted["event_id"], state="running")
            gate.opened.set()
            event = await listener.wait_for("event", state="done")
            assert event == await controller.get(f"/events/{accepted['event_id']}")
        while (await listener.wait_for("instances"))["instances"]:
            pass
    await controller.wait_until(lambda: not controller.events.listeners)


async def test_stream_sends_keepalives(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "KEEPALIVE_SECONDS", 0.05)
    monkeypatch.setattr(stream, "EVENTS_SECONDS", 0.01)
    async with listening(controller) as listener:
        for _ in range(4):
            assert (await listener.next())[0] == "instances"


async def test_slow_reader_misses_the_oldest_changes(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "EVENTS_SECONDS", 0.001)
    monkeypatch.setattr(stream, "MAX_CHANGED", 3)
    async with listening(controller) as listener:
        await listener.next()
        # Until the next turn of the event loop, no event is sent.
        events = [controller.events.create("pin") for _ in range(10)]
        controller.events.progress(events[8], 0, 0)
        received = [(await listener.wait_for("event"))["event_id"] for _ in range(3)]
        assert received == [event.event_id for event in events[7:]]
        controller.events.close()


async def test_slow_reader_is_disconnected(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "EVENTS_SECONDS", 0.001)
    monkeypatch.setattr(stream, "TIMEOUT_SECONDS", 0.2)
    host, port = controller.controller.address
    async with await anyio.connect_tcp(host, port) as reader:
        await reader.send(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await controller.wait_until(lambda: controller.events.listeners)
        events = [controller.events.create("pin", model="x" * 60_000) for _ in range(200)]
        with anyio.fail_after(TIMEOUT_SECONDS):
            while controller.events.listeners:
                for event in events:
                    controller.events.progress(event, 0, 0)
                await anyio.sleep(0.005)
        controller.events.close()


async def test_number_of_readers_is_limited(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MAX_READERS", 1)
    async with listening(controller):
        answer = await controller.client.get("/stream")
        assert answer.status_code == 503
    await controller.wait_until(lambda: not controller.events.listeners)
    async with listening(controller):
        pass


def connection_with(headers: Mapping[str, str]) -> HTTPConnection:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return HTTPConnection({"type": "http", "headers": raw, "path": "/clear", "query_string": b""})


@pytest.mark.parametrize("host", ["127.0.0.1:9000", "localhost:9000", "[::1]:9000", "localhost", "127.8.8.8"])
def test_without_a_token_this_host_has_access(host: str) -> None:
    assert Authenticator(None).refusal(connection_with({"Host": host})) is None
    assert Authenticator(None).refusal(connection_with({"Host": host, "Origin": f"http://{host}"})) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.1:9000", "Origin": "http://evil.example"},
        {"Host": "127.0.0.1:9000", "Origin": "http://127.0.0.1:8080"},
        {"Host": "127.0.0.1:9000", "Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "evil.example:9000", "Origin": "http://evil.example:9000"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "[::1"},
        {"Host": ""},
        {},
    ],
)
def test_without_a_token_other_sites_have_no_access(headers: dict[str, str]) -> None:
    refusal = Authenticator(None).refusal(connection_with(headers))
    assert refusal is not None
    assert refusal.status_code == 403
    assert "--token-file" in refusal.detail


@pytest.mark.parametrize("authorization", ["Bearer right", "bearer right", "Bearer  right "])
def test_token_grants_access_from_anywhere(authorization: str) -> None:
    headers = {"Host": "evil.example", "Origin": "http://elsewhere.example", "Authorization": authorization}
    assert Authenticator("right").refusal(connection_with(headers)) is None


@pytest.mark.parametrize(
    "authorization", ["", "right", "Bearer", "Bearer wrong", "Basic right", "Bearer r\xefght"]
)
def test_wrong_token_is_refused(authorization: str) -> None:
    refusal = Authenticator("right").refusal(
        connection_with({"Host": "localhost", "Authorization": authorization})
    )
    assert refusal is not None
    assert refusal.status_code == 401
    assert refusal.detail == WRONG_TOKEN
    assert refusal.headers == {"WWW-Authenticate": "Bearer"}
