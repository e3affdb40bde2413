"""Limits of concurrent requests and bytes, and the shutdown."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import anyio
import httpx
import pytest

from tests.rigs.waiting import until

from .conftest import PROMPT, Cluster, events_of, running
from .stub import event, hangs, normal

pytestmark = pytest.mark.anyio


async def test_too_many_requests_are_refused_with_retry_after() -> None:
    async with running(0, 1, max_requests=2) as cluster:
        stub = cluster.decoders[0]
        stub.always = hangs
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(cluster.complete)
            await until(lambda: len(stub.requests) == 2)
            answer = await cluster.complete()
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            error = answer.json()["error"]
            assert error["type"] == "rate_limit_error"
            assert "2 requests are in flight, the limit of this proxy (--max-requests)" in error["message"]
            assert len(stub.requests) == 2
            assert (await cluster.client.get("/health")).status_code == 200
            tasks.cancel_scope.cancel()
        stub.always = normal
        await until(lambda: not cluster.proxy.admission.in_flight)
        assert (await cluster.complete()).status_code == 200
        assert cluster.outcomes == {"refused": 1, "cancelled": 2, "ok": 1}


async def pieces(count: int, started: anyio.Event | None = None) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * 1024
    if started is not None:
        started.set()
        await anyio.sleep_forever()


@pytest.mark.parametrize("has_length", [True, False])
async def test_too_long_body(has_length: bool) -> None:
    async with running(0, 1, max_body="100KiB") as cluster:
        content = b"x" * (101 << 10) if has_length else pieces(101)
        answer = await cluster.client.post("/v1/completions", content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "the body is longer than 100KiB (--max-body)"
        assert cluster.decoders[0].requests == []
        assert (await cluster.complete()).status_code == 200


async def test_total_of_all_bodies_is_limited() -> None:
    async with running(0, 1, max_body="100KiB", max_held="150KiB") as cluster:
        stub = cluster.decoders[0]
        stub.then.append(hangs)
        content = json.dumps({"prompt": "x" * 90_000}).encode()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: cluster.client.post("/v1/completions", content=content))
            await until(lambda: stub.requests)
            answer = await cluster.client.post("/v1/completions", content=content)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert "fill 150KiB (--max-held)" in answer.json()["error"]["message"]
            assert (await cluster.complete(prompt="x")).status_code == 200
            tasks.cancel_scope.cancel()
        await until(lambda: not cluster.proxy.admission.held_bytes)
        assert (await cluster.client.post("/v1/completions", content=content)).status_code == 200


async def test_body_times_out(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.fleet.proxy.admission.BODY_SECONDS", 0.2)
    host, port = cluster.client.base_url.host, cluster.client.base_url.port
    assert port is not None
    async with await anyio.connect_tcp(host, port) as stream:
        await stream.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        answer = b""
        while b"has not arrived within 0.2 s" not in answer:
            answer += await stream.receive()
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_client_disconnects_within_its_body(cluster: Cluster) -> None:
    started = anyio.Event()
    async with anyio.create_task_group() as tasks:
        content = pieces(3, started)
        tasks.start_soon(lambda: cluster.client.post("/v1/completions", content=content))
        await started.wait()
        tasks.cancel_scope.cancel()
    await content.aclose()
    await until(lambda: cluster.outcomes == {"cancelled": 1})


async def test_shutdown_finishes_streams_and_refuses_requests(cluster: Cluster) -> None:
    slow, admission = cluster.decoders[0].stream(event(1)), cluster.proxy.admission
    async with anyio.create_task_group() as tasks, cluster.stream() as response:
        received = aiter(response.aiter_raw())
        assert await anext(received) == event(1)
        tasks.start_soon(admission.drain, 30)
        await until(lambda: admission.draining)
        answer = await cluster.complete()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "shutting down" in answer.json()["error"]["message"]
        health = await cluster.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        slow.send(event(2))
        assert await anext(received) == event(2)
        slow.send(None)
        assert [piece async for piece in received] == []
    assert cluster.outcomes == {"refused": 1, "ok": 1}


async def test_shutdown_interrupts_requests_after_its_timeout() -> None:
    async with running() as cluster:
        cluster.decoders[0].stream(event(1))
        cluster.prefillers[0].then.extend([normal, hangs])
        answers: list[httpx.Response] = []

        async def complete(prompt: str) -> None:
            answers.append(await cluster.complete(stream=True, prompt=prompt))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(complete, PROMPT["prompt"])
            await until(lambda: cluster.decoders[0].requests)
            await until(lambda: cluster.proxy.statistics.first_byte.count)
            tasks.start_soon(complete, "other " * 500)
            await until(lambda: len(cluster.prefillers[0].requests) == 2)
            await cluster.proxy.admission.drain(0.1)
        early, late = sorted(answers, key=lambda answer: answer.status_code)
        assert events_of(early.content)[1]["error"]["code"] == 503
        assert (late.status_code, late.json()["error"]["code"]) == (503, 503)
        await until(lambda: cluster.prefillers[0].disconnected)
        await until(lambda: cluster.decoders[0].disconnected)
