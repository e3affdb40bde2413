"""Engines that refuse, die and hang, and clients that leave: nobody notices more than must be."""

from __future__ import annotations

import json

import anyio
import pytest

from kvtier.proxy.engine import Role, State
from kvtier.proxy.exchange import INTERRUPTED
from kvtier.proxy.serve import proxying

from .conftest import PROMPT, Place, running, settings_of, texts
from .stub import (
    DONE,
    EVENTS,
    Behaviour,
    Slow,
    Stub,
    dies,
    dies_after_head,
    dies_in_answer,
    dies_in_stream,
    event,
    hangs,
    normal,
    says,
)

pytestmark = pytest.mark.anyio

UNSAID = [dies, dies_after_head, dies_in_stream(0)]
REFUSES = [says(500), says(503), says(429)]


def name(behaviour: Behaviour) -> str:
    return getattr(behaviour, "__name__", "")


# ── prefillers ──


@pytest.mark.parametrize("fault", [*UNSAID, dies_in_answer, *REFUSES], ids=name)
async def test_another_prefiller_is_asked(fault: Behaviour) -> None:
    async with running(2, 1) as place:
        place.prefillers[0].always = fault
        for number in range(2):  # One of them begins at the first.
            assert (await place.ask(cache_salt=str(number))).status_code == 200
        assert len(place.prefillers[0].asked) == 1
        assert [decode.ours is not None for decode in place.decoders[0].asked] == [True, True]
        assert place.proxy.statistics.prefills == {"failed": 1, "handed_over": 2}
        assert place.proxy.statistics.retries == {"prefill": 1}


@pytest.mark.parametrize("fault", [*UNSAID, dies_in_answer, *REFUSES], ids=name)
async def test_where_none_is_left_the_decoder_serves(place: Place, fault: Behaviour) -> None:
    place.prefillers[0].always = fault
    answer = await place.ask()
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, " hello")
    assert place.decoders[0].asked[0].body == PROMPT
    assert place.proxy.statistics.prefills == {"failed": 1}


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_what_a_prefiller_refuses_is_the_decoders_to_refuse(status: int) -> None:
    async with running(2, 1) as place:
        for stub in (*place.prefillers, *place.decoders):
            stub.always = says(status)
        answer = await place.ask()
        assert (answer.status_code, answer.json()) == (status, {"error": {"message": "mine", "code": status}})
        assert sum(len(prefiller.asked) for prefiller in place.prefillers) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"no json",
        b"[]",
        b"",
        json.dumps({"kv_transfer_params": 3}).encode(),
        json.dumps({"kv_transfer_params": {"kvtier": {"handed_over": {"tokens": "many"}}}}).encode(),
        json.dumps({"kv_transfer_params": {"kvtier": {"handed_over": {"tokens": -1}}}}).encode(),
        json.dumps({"kv_transfer_params": {"kvtier": {"handed_over": {"tokens": True}}}}).encode(),
        json.dumps({"kv_transfer_params": {"kvtier": {"peer": 5, "handed_over": {}}}}).encode(),
    ],
)
async def test_a_prefiller_that_talks_nonsense_is_no_harm(place: Place, answer: bytes) -> None:
    place.prefillers[0].always = says(200, answer)
    assert (await place.ask()).status_code == 200
    assert place.decoders[0].asked[0].body == PROMPT


async def test_a_prefiller_that_takes_too_long_is_done_without() -> None:
    async with running(1, 1, prefill_timeout="200ms") as place:
        place.prefillers[0].always = hangs
        assert (await place.ask()).status_code == 200
        await place.prefillers[0].until(lambda: place.prefillers[0].cut_off)


async def test_a_prefiller_that_is_found_hanging_is_left(place: Place) -> None:
    stub = place.prefillers[0]
    stub.always = stub.health = hangs
    assert (await place.ask()).status_code == 200
    (engine,) = place.proxy.fleet.of(Role.PREFILL)
    assert (engine.state, engine.why) == (State.DOWN, "has not answered /health within 0.25 s")
    await place.ask()  # It is not even asked.
    assert len(stub.asked) == 1
    assert place.proxy.statistics.skipped["no_prefiller"] + place.proxy.statistics.skipped["cached"] == 2
    stub.always, stub.health = normal, says(200, b"")
    await place.is_ready()
    await place.ask(cache_salt="other")
    assert len(stub.asked) == 2


async def test_a_prefiller_that_is_gone_comes_back(place: Place) -> None:
    (engine,) = place.proxy.fleet.of(Role.PREFILL)
    place.prefillers[0].health = says(503)
    await place.until(lambda: engine.state == State.DOWN)
    assert engine.why == "answers /health with 503"
    await place.ask()
    assert place.prefillers[0].asked == []
    place.prefillers[0].health = says(404)  # No vLLM, but it answers.
    await place.is_ready()
    await place.ask(cache_salt="other")
    assert len(place.prefillers[0].asked) == 1


# ── decoders ──


@pytest.mark.parametrize("fault", [*UNSAID, says(503), says(502)], ids=name)
@pytest.mark.parametrize("stream", [False, True])
async def test_another_decoder_takes_over(fault: Behaviour, stream: bool) -> None:
    async with running(1, 2) as place:
        first, second = place.decoders
        first.always = fault
        for number in range(2):  # One of them begins at the first.
            answer = await place.ask(stream=stream, cache_salt=str(number))
            assert answer.status_code == 200
            if stream:
                assert answer.content == b"".join(EVENTS)
        assert len(first.asked) == 1
        assert first.asked[0].ours is not None
        # The second was not handed what was meant for the first.
        assert sorted(asked.ours is None for asked in second.asked) == [False, True]
        assert place.proxy.statistics.retries == {"decode": 1}
        assert place.outcomes == {"ok": 2}


async def test_an_answer_that_breaks_off_before_anybody_has_seen_it_is_asked_for_again(place: Place) -> None:
    place.decoders[0].then.append(dies_in_answer)
    answer = await place.ask()
    assert answer.json()["choices"][0]["text"] == " hello"
    assert len(place.decoders[0].asked) == 2


@pytest.mark.parametrize("fault", UNSAID, ids=name)
async def test_a_request_that_kills_engines_does_not_kill_all(fault: Behaviour) -> None:
    async with running(0, 5) as place:
        for decoder in place.decoders:
            decoder.always = fault
        answer = await place.ask()
        assert answer.status_code == 503
        assert sum(len(decoder.asked) for decoder in place.decoders) == 3


@pytest.mark.parametrize("status", [400, 404, 429, 500])
async def test_what_a_decoder_refuses_is_passed_on_as_it_is(status: int) -> None:
    async with running(0, 2) as place:
        for decoder in place.decoders:
            decoder.always = says(status, b'{"error":  "so"}', retry_after="7")
        answer = await place.ask()
        assert (answer.status_code, answer.content) == (status, b'{"error":  "so"}')
        assert answer.headers["retry-after"] == "7"
        assert sum(len(decoder.asked) for decoder in place.decoders) == 1


async def test_the_last_decoders_refusal_is_passed_on() -> None:
    async with running(0, 2) as place:
        for decoder in place.decoders:
            decoder.always = says(503)
        answer = await place.ask()
        assert (answer.status_code, answer.json()) == (503, {"error": {"message": "mine", "code": 503}})


async def test_without_a_decoder_clients_are_told(place: Place) -> None:
    for engine in place.proxy.fleet.of(Role.DECODE):
        place.proxy.remove(engine)
    answer = await place.ask()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "no decode engine can be reached" in answer.json()["error"]["message"]
    assert place.prefillers[0].asked == []


async def test_a_decoder_that_has_ended_is_tried_even_so() -> None:
    stub = Stub()
    async with stub.serving():
        pass
    async with proxying(settings_of(decode=[stub.url], check="1h")) as ((host, port), proxy):
        (engine,) = proxy.fleet
        place = Place(proxy, f"http://{host}:{port}", [], [stub])
        async with place.client:
            await place.until(lambda: engine.state == State.DOWN)
            assert (await place.ask()).status_code == 503
            async with stub.serving():
                assert (await place.ask()).status_code == 200
                await engine.connections.aclose()


async def test_a_decoder_in_mid_stream(place: Place) -> None:
    place.decoders[0].then.append(dies_in_stream(2))
    answer = await place.ask(stream=True)
    assert answer.status_code == 200
    assert answer.content.startswith(b"".join(EVENTS[:2]))
    error = {"message": INTERRUPTED, "type": "server_error", "param": None, "code": 502}
    assert texts(answer.content)[2:] == [{"error": error}, "[DONE]"]
    assert len(place.decoders[0].asked) == 1
    assert place.outcomes == {"interrupted": 1}


async def test_a_decoder_in_mid_event(place: Place) -> None:
    place.decoders[0].then.append(dies_in_stream(1, b'data: {"half'))
    answer = await place.ask(stream=True)
    assert answer.content.startswith(EVENTS[0] + b'data: {"half\n\ndata: {"error"')
    assert answer.content.endswith(DONE)


async def test_a_decoder_that_falls_silent() -> None:
    async with running(0, 1, silence="200ms") as place:
        slow = Slow()
        place.decoders[0].then.append(slow)
        slow.say(event(1))
        answer = await place.ask(stream=True)
        assert texts(answer.content)[1]["error"]["code"] == 502


async def test_a_decoder_that_is_found_hanging_is_left() -> None:
    async with running(0, 2) as place:
        stub = place.decoders[0]
        stub.always = stub.health = hangs
        for decoder in place.proxy.fleet.of(Role.DECODE)[1:]:
            decoder.load += 1  # The first is asked first.
        answer = await place.ask()
        assert answer.status_code == 200
        for decoder in place.proxy.fleet.of(Role.DECODE)[1:]:
            decoder.load -= 1
        await stub.until(lambda: stub.cut_off)
        assert len(stub.asked) == 1


# ── clients ──


async def leave(place: Place, until: object, **fields: object) -> None:
    """Ask, and go as soon as it is so."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: place.ask(**fields))
        await until  # type: ignore[misc]
        tasks.cancel_scope.cancel()


async def test_a_client_that_leaves_while_its_prompt_is_computed(place: Place) -> None:
    stub = place.prefillers[0]
    stub.always = hangs
    await leave(place, stub.until(lambda: stub.asked))
    await stub.until(lambda: stub.cut_off)
    await place.until(lambda: place.outcomes == {"cancelled": 1})
    assert place.decoders[0].asked == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_answer(place: Place, stream: bool) -> None:
    stub = place.decoders[0]
    stub.always = hangs
    await leave(place, stub.until(lambda: stub.asked), stream=stream)
    await stub.until(lambda: stub.cut_off)
    await place.until(lambda: place.outcomes == {"cancelled": 1})


async def test_a_client_that_leaves_in_mid_stream(place: Place) -> None:
    stub, slow = place.decoders[0], Slow()
    stub.then.append(slow)
    slow.say(event(1))
    async with place.stream() as response:
        assert await anext(aiter(response.aiter_raw())) == event(1)
    await stub.until(lambda: stub.cut_off)
    await place.until(lambda: place.outcomes == {"cancelled": 1})


async def test_a_client_that_does_not_read_holds_up_the_engine_alone(place: Place) -> None:
    sent = 0

    async def endless(answer: object) -> None:
        nonlocal sent
        await answer.begin()  # type: ignore[attr-defined]
        while True:
            await answer.piece(b"x" * 65536)  # type: ignore[attr-defined]
            sent += 1

    place.decoders[0].then.append(endless)
    async with place.stream():
        before = -1
        while sent != before:  # Until nothing more goes through.
            before = sent
            await anyio.sleep(0.3)
        assert sent * 65536 < 64 << 20
        assert (await place.ask(prompt="x")).status_code == 200
    await place.until(lambda: place.outcomes.get("cancelled") == 1)
