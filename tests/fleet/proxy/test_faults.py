"""Engines that refuse, die or hang, and clients that disconnect, with the least effect on others."""

from __future__ import annotations

import json

import anyio
import pytest

from kvtier.fleet.proxy.exchange import INTERRUPTED
from kvtier.fleet.proxy.serve import run_proxy
from kvtier.fleet.proxy.upstream import Role, State
from tests.rigs.waiting import until

from .conftest import PROMPT, Cluster, events_of, running, settings_of
from .stub import (
    DONE,
    EVENTS,
    Behaviour,
    Stub,
    dies,
    dies_after_head,
    dies_in_answer,
    dies_in_stream,
    event,
    hangs,
    normal,
    responds,
)

pytestmark = pytest.mark.anyio

NO_RESPONSE = [dies, dies_after_head, dies_in_stream(0)]
REFUSES = [responds(500), responds(503), responds(429)]


def name(behaviour: Behaviour) -> str:
    return getattr(behaviour, "__name__", "")


# ── prefillers ──


@pytest.mark.parametrize("fault", [*NO_RESPONSE, dies_in_answer, *REFUSES], ids=name)
async def test_prefill_is_retried_on_another_prefiller(fault: Behaviour) -> None:
    async with running(2, 1) as cluster:
        cluster.prefillers[0].always = fault
        for number in range(2):  # One of them starts with the first.
            assert (await cluster.complete(cache_salt=str(number))).status_code == 200
        assert len(cluster.prefillers[0].requests) == 1
        assert [decode.kvtier_params is not None for decode in cluster.decoders[0].requests] == [True, True]
        assert cluster.proxy.statistics.prefills == {"failed": 1, "transferred": 2}
        assert cluster.proxy.statistics.retries == {"prefill": 1}


@pytest.mark.parametrize("fault", [*NO_RESPONSE, dies_in_answer, *REFUSES], ids=name)
async def test_decoder_serves_if_no_prefiller_is_left(cluster: Cluster, fault: Behaviour) -> None:
    cluster.prefillers[0].always = fault
    answer = await cluster.complete()
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, " hello")
    assert cluster.decoders[0].requests[0].body == PROMPT
    assert cluster.proxy.statistics.prefills == {"failed": 1}


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_client_error_of_a_prefiller_is_left_to_the_decoder(status: int) -> None:
    async with running(2, 1) as cluster:
        for stub in (*cluster.prefillers, *cluster.decoders):
            stub.always = responds(status)
        answer = await cluster.complete()
        assert (answer.status_code, answer.json()) == (status, {"error": {"message": "mine", "code": status}})
        assert sum(len(prefiller.requests) for prefiller in cluster.prefillers) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"no json",
        b"[]",
        b"",
        json.dumps({"kv_transfer_params": 3}).encode(),
        json.dumps({"kv_transfer_params": {"kvtier": {"transferred": {"tokens": "many"}}}}).encode(),
        json.dumps({"kv_transfer_params": {"kvtier": {"transferred": {"tokens": -1}}}}).encode(),
        json.dumps({"kv_transfer_params": {"kvtier": {"transferred": {"tokens": True}}}}).encode(),
        json.dumps({"kv_transfer_params": {"kvtier": {"peer": 5, "transferred": {}}}}).encode(),
    ],
)
async def test_malformed_answer_of_a_prefiller_is_ignored(cluster: Cluster, answer: bytes) -> None:
    cluster.prefillers[0].always = responds(200, answer)
    assert (await cluster.complete()).status_code == 200
    assert cluster.decoders[0].requests[0].body == PROMPT


async def test_prefill_times_out() -> None:
    async with running(1, 1, prefill_timeout="200ms") as cluster:
        cluster.prefillers[0].always = hangs
        assert (await cluster.complete()).status_code == 200
        await until(lambda: cluster.prefillers[0].disconnected)


async def test_hanging_prefiller_is_marked_down(cluster: Cluster) -> None:
    stub = cluster.prefillers[0]
    stub.always = stub.health = hangs
    assert (await cluster.complete()).status_code == 200
    (engine,) = cluster.proxy.upstreams.of(Role.PREFILL)
    assert (engine.state, engine.reason) == (State.DOWN, "did not answer /health within 0.25 s")
    await cluster.complete()  # It is not tried again.
    assert len(stub.requests) == 1
    assert cluster.proxy.statistics.skipped["no_prefiller"] + cluster.proxy.statistics.skipped["cached"] == 2
    stub.always, stub.health = normal, responds(200, b"")
    await cluster.wait_until_ready()
    await cluster.complete(cache_salt="other")
    assert len(stub.requests) == 2


async def test_prefiller_recovers(cluster: Cluster) -> None:
    (engine,) = cluster.proxy.upstreams.of(Role.PREFILL)
    cluster.prefillers[0].health = responds(503)
    await until(lambda: engine.state == State.DOWN)
    assert engine.reason == "answered /health with 503"
    await cluster.complete()
    assert cluster.prefillers[0].requests == []
    cluster.prefillers[0].health = responds(404)  # Not vLLM, but it answers.
    await cluster.wait_until_ready()
    await cluster.complete(cache_salt="other")
    assert len(cluster.prefillers[0].requests) == 1


# ── decoders ──


@pytest.mark.parametrize("fault", [*NO_RESPONSE, responds(503), responds(502)], ids=name)
@pytest.mark.parametrize("stream", [False, True])
async def test_request_is_retried_on_another_decoder(fault: Behaviour, stream: bool) -> None:
    async with running(1, 2) as cluster:
        first, second = cluster.decoders
        first.always = fault
        for number in range(2):  # One of them starts with the first.
            answer = await cluster.complete(stream=stream, cache_salt=str(number))
            assert answer.status_code == 200
            if stream:
                assert answer.content == b"".join(EVENTS)
        assert len(first.requests) == 1
        assert first.requests[0].kvtier_params is not None
        # The parameters for the first are not sent to the second.
        assert sorted(request.kvtier_params is None for request in second.requests) == [False, True]
        assert cluster.proxy.statistics.retries == {"decode": 1}
        assert cluster.outcomes == {"ok": 2}


async def test_broken_answer_is_retried_before_the_client_receives_any_of_it(cluster: Cluster) -> None:
    cluster.decoders[0].then.append(dies_in_answer)
    answer = await cluster.complete()
    assert answer.json()["choices"][0]["text"] == " hello"
    assert len(cluster.decoders[0].requests) == 2


@pytest.mark.parametrize("fault", NO_RESPONSE, ids=name)
async def test_number_of_decoders_tried_is_limited(fault: Behaviour) -> None:
    async with running(0, 5) as cluster:
        for decoder in cluster.decoders:
            decoder.always = fault
        answer = await cluster.complete()
        assert answer.status_code == 503
        assert sum(len(decoder.requests) for decoder in cluster.decoders) == 3


@pytest.mark.parametrize(("status", "tried"), [(400, 1), (404, 1), (429, 1), (500, 1), (503, 2)])
async def test_error_of_the_last_decoder_that_is_tried_is_forwarded_unchanged(
    status: int, tried: int
) -> None:
    async with running(0, 2) as cluster:
        for decoder in cluster.decoders:
            decoder.always = responds(status, b'{"error":  "so"}', retry_after="7")
        answer = await cluster.complete()
        assert (answer.status_code, answer.content) == (status, b'{"error":  "so"}')
        assert answer.headers["retry-after"] == "7"
        assert sum(len(decoder.requests) for decoder in cluster.decoders) == tried


async def test_no_decoder_is_an_error(cluster: Cluster) -> None:
    for engine in cluster.proxy.upstreams.of(Role.DECODE):
        cluster.proxy.upstreams.remove(engine)
    answer = await cluster.complete()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "no decode engine can be reached" in answer.json()["error"]["message"]
    assert cluster.prefillers[0].requests == []


async def test_decoder_that_is_down_is_tried_as_a_last_resort() -> None:
    stub = Stub()
    async with stub.serving():
        pass
    async with run_proxy(settings_of(decode=[stub.url], check="1h")) as ((host, port), proxy):
        (engine,) = proxy.upstreams
        cluster = Cluster(proxy, f"http://{host}:{port}", [], [stub])
        async with cluster.client:
            await until(lambda: engine.state == State.DOWN)
            assert (await cluster.complete()).status_code == 503
            async with stub.serving():
                assert (await cluster.complete()).status_code == 200
                await engine.connections.aclose()


async def test_decoder_dies_in_mid_stream(cluster: Cluster) -> None:
    cluster.decoders[0].then.append(dies_in_stream(2))
    answer = await cluster.complete(stream=True)
    assert answer.status_code == 200
    assert answer.content.startswith(b"".join(EVENTS[:2]))
    error = {"message": INTERRUPTED, "type": "server_error", "param": None, "code": 502}
    assert events_of(answer.content)[2:] == [{"error": error}, "[DONE]"]
    assert len(cluster.decoders[0].requests) == 1
    assert cluster.outcomes == {"interrupted": 1}


async def test_decoder_dies_in_mid_event(cluster: Cluster) -> None:
    cluster.decoders[0].then.append(dies_in_stream(1, b'data: {"half'))
    answer = await cluster.complete(stream=True)
    assert answer.content.startswith(EVENTS[0] + b'data: {"half\n\ndata: {"error"')
    assert answer.content.endswith(DONE)


async def test_idle_stream_times_out() -> None:
    async with running(0, 1, idle_timeout="200ms") as cluster:
        cluster.decoders[0].stream(event(1))
        answer = await cluster.complete(stream=True)
        assert events_of(answer.content)[1]["error"]["code"] == 502


async def test_hanging_decoder_is_replaced() -> None:
    async with running(0, 2) as cluster:
        stub = cluster.decoders[0]
        stub.always = stub.health = hangs
        for decoder in cluster.proxy.upstreams.of(Role.DECODE)[1:]:
            decoder.load += 1  # The first is tried first.
        answer = await cluster.complete()
        assert answer.status_code == 200
        for decoder in cluster.proxy.upstreams.of(Role.DECODE)[1:]:
            decoder.load -= 1
        await until(lambda: stub.disconnected)
        assert len(stub.requests) == 1


# ── clients ──


@pytest.mark.parametrize(
    ("role", "stream"), [(Role.PREFILL, False), (Role.DECODE, False), (Role.DECODE, True)]
)
async def test_client_disconnects_before_the_answer(cluster: Cluster, role: Role, stream: bool) -> None:
    (stub,) = cluster.prefillers if role == Role.PREFILL else cluster.decoders
    stub.always = hangs
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: cluster.complete(stream=stream))
        await until(lambda: stub.requests)
        tasks.cancel_scope.cancel()
    await until(lambda: stub.disconnected)
    await until(lambda: cluster.outcomes == {"cancelled": 1})
    assert len(cluster.decoders[0].requests) == (role == Role.DECODE)


async def test_client_disconnects_in_mid_stream(cluster: Cluster) -> None:
    stub = cluster.decoders[0]
    stub.stream(event(1))
    async with cluster.stream() as response:
        assert await anext(aiter(response.aiter_raw())) == event(1)
    await until(lambda: stub.disconnected)
    await until(lambda: cluster.outcomes == {"cancelled": 1})


async def test_slow_client_delays_only_its_own_stream(cluster: Cluster) -> None:
    sent = 0

    async def endless(answer: object) -> None:
        nonlocal sent
        await answer.begin_stream()  # type: ignore[attr-defined]
        while True:
            await answer.send_chunk(b"x" * 65536)  # type: ignore[attr-defined]
            sent += 1

    cluster.decoders[0].then.append(endless)
    async with cluster.stream():
        before = -1
        while sent != before:  # Until backpressure stops the stream.
            before = sent
            await anyio.sleep(0.3)
        assert sent * 65536 < 64 << 20
        assert (await cluster.complete(prompt="x")).status_code == 200
    await until(lambda: cluster.outcomes.get("cancelled") == 1)
