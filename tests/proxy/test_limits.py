"""How much the proxy takes at once, and how it ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import anyio
import httpx
import pytest

from .conftest import PROMPT, Place, running, texts
from .stub import Slow, event, hangs, normal

pytestmark = pytest.mark.anyio


async def test_more_requests_than_it_takes_are_told_when_to_come_back() -> None:
    async with running(0, 1, most_requests=2) as place:
        stub = place.decoders[0]
        stub.always = hangs
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(place.ask)
            await stub.until(lambda: len(stub.asked) == 2)
            answer = await place.ask()
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            error = answer.json()["error"]
            assert error["type"] == "rate_limit_error"
            assert "2 requests are under way, as many as this proxy takes at once" in error["message"]
            assert len(stub.asked) == 2
            assert (await place.client.get("/health")).status_code == 200
            tasks.cancel_scope.cancel()
        stub.always = normal
        await place.until(lambda: not place.proxy.admission.under_way)
        assert (await place.ask()).status_code == 200
        assert place.outcomes == {"refused": 1, "cancelled": 2, "ok": 1}


async def pieces(count: int, started: anyio.Event | None = None) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * 1024
    if started is not None:
        started.set()
        await anyio.sleep_forever()


@pytest.mark.parametrize("told", [True, False])
async def test_a_body_that_is_too_long(told: bool) -> None:
    async with running(0, 1, most_body="100KiB") as place:
        content = b"x" * (101 << 10) if told else pieces(101)
        answer = await place.client.post("/v1/completions", content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "the body is longer than 100KiB (--most-body)"
        assert place.decoders[0].asked == []
        assert (await place.ask()).status_code == 200


async def test_bodies_that_are_too_long_together() -> None:
    async with running(0, 1, most_body="100KiB", most_held="150KiB") as place:
        stub = place.decoders[0]
        stub.then.append(hangs)
        content = json.dumps({"prompt": "x" * 90_000}).encode()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: place.client.post("/v1/completions", content=content))
            await stub.until(lambda: stub.asked)
            answer = await place.client.post("/v1/completions", content=content)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert "fill 150KiB (--most-held)" in answer.json()["error"]["message"]
            assert (await place.ask(prompt="x")).status_code == 200
            tasks.cancel_scope.cancel()
        await place.until(lambda: not place.proxy.admission.held_bytes)
        assert (await place.client.post("/v1/completions", content=content)).status_code == 200


async def test_a_body_that_does_not_come(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.proxy.admission.BODY_SECONDS", 0.2)
    host, port = place.client.base_url.host, place.client.base_url.port
    assert port is not None
    async with await anyio.connect_tcp(host, port) as stream:
        await stream.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        answer = b""
        while b"has not arrived within 0.2 s" not in answer:
            answer += await stream.receive()
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_client_that_leaves_in_its_body(place: Place) -> None:
    started = anyio.Event()
    async with anyio.create_task_group() as tasks:
        content = pieces(3, started)
        tasks.start_soon(lambda: place.client.post("/v1/completions", content=content))
        await started.wait()
        tasks.cancel_scope.cancel()
    await content.aclose()
    await place.until(lambda: place.outcomes == {"cancelled": 1})


async def test_at_the_end_streams_finish_and_nothing_begins(place: Place) -> None:
    slow, admission = Slow(), place.proxy.admission
    place.decoders[0].then.append(slow)
    slow.say(event(1))
    async with anyio.create_task_group() as tasks, place.stream() as response:
        received = aiter(response.aiter_raw())
        assert await anext(received) == event(1)
        tasks.start_soon(admission.drain, 30)
        await place.until(lambda: admission.draining)
        answer = await place.ask()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "about to end" in answer.json()["error"]["message"]
        health = await place.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        slow.say(event(2))
        assert await anext(received) == event(2)
        slow.say(None)
        assert [piece async for piece in received] == []
    assert place.outcomes == {"refused": 1, "ok": 1}


async def test_what_takes_longer_than_the_end_is_told_so() -> None:
    async with running() as place:
        slow = Slow()
        place.decoders[0].then.append(slow)
        slow.say(event(1))
        place.prefillers[0].then.extend([normal, hangs])
        answers: list[httpx.Response] = []

        async def ask(prompt: str) -> None:
            answers.append(await place.ask(stream=True, prompt=prompt))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, PROMPT["prompt"])
            await place.decoders[0].until(lambda: place.decoders[0].asked)
            await place.until(lambda: place.proxy.statistics.first_byte.count)
            tasks.start_soon(ask, "other " * 500)
            await place.prefillers[0].until(lambda: len(place.prefillers[0].asked) == 2)
            await place.proxy.admission.drain(0.1)
        early, late = sorted(answers, key=lambda answer: answer.status_code)
        assert texts(early.content)[1]["error"]["code"] == 503
        assert (late.status_code, late.json()["error"]["code"]) == (503, 503)
        await place.prefillers[0].until(lambda: place.prefillers[0].cut_off)
        await place.decoders[0].until(lambda: place.decoders[0].cut_off)
