"""One request through the proxy: what engines are sent, and what the client gets."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from kvtier.proxy.engine import Role

from .conftest import LONG, PROMPT, Place, running
from .stub import DONE, EVENTS, Slow, event, says

pytestmark = pytest.mark.anyio


async def test_a_prompt_is_prefilled_here_and_decoded_there(place: Place) -> None:
    answer = await place.ask(temperature=0.5, stream=False)
    assert answer.status_code == 200
    assert answer.json() == {"id": "cmpl-1", "choices": [{"index": 0, "text": " hello"}], "usage": {"n": 1.0}}
    (prefill,), (decode,) = place.prefillers[0].asked, place.decoders[0].asked
    assert prefill.body == {
        **PROMPT,
        "temperature": 0.5,
        "stream": False,
        "max_tokens": 1,
        "n": 1,
        "kv_transfer_params": {"kvtier": {"hand_over": {"to": "127.0.0.1:55555"}}},
    }
    assert decode.body == {
        **PROMPT,
        "temperature": 0.5,
        "stream": False,
        "kv_transfer_params": {"kvtier": {"expect": {"tokens": 300, "seconds": 10.0}}},
    }
    assert place.outcomes == {"ok": 1}
    assert place.proxy.statistics.prefill.count == 1
    assert place.proxy.statistics.handed_over_tokens == 300


async def test_a_chat_is_too(place: Place) -> None:
    asked: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": LONG}],
        "max_completion_tokens": 50,
        "min_tokens": 10,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 12345678901234567890,
        "unknown": {"deep": [None, "é"]},
    }
    content = json.dumps(asked, ensure_ascii=False).encode().replace(b"null", b"1.10, 1e3,null")
    asked = json.loads(content)
    answer = await place.client.post("/v1/chat/completions", content=content)
    assert answer.content == b"".join(EVENTS)
    (prefill,), (decode,) = place.prefillers[0].asked, place.decoders[0].asked
    assert prefill.path == decode.path == "/v1/chat/completions"
    expected = {**asked, "stream": False, "n": 1, "max_tokens": 1, "max_completion_tokens": 1}
    for name in ("stream_options", "min_tokens"):
        del expected[name]
    expected["kv_transfer_params"] = {"kvtier": {"hand_over": {"to": "127.0.0.1:55555"}}}
    assert prefill.body == expected
    assert decode.body.pop("kv_transfer_params") == {"kvtier": {"expect": {"tokens": 300, "seconds": 10.0}}}
    for value in ("1.10", "1e3", "12345678901234567890", '"é"'):  # Nothing is written in another way.
        assert value in decode.content.decode()
    assert {key: value for key, value in decode.body.items() if key != "kv_transfer_params"} == asked


async def test_what_is_not_prefilled_goes_to_the_decoder_byte_for_byte(place: Place) -> None:
    content = b'{ "prompt" : "short", "model":"m",  "n": 1.0, "x": 1, "x": 2 }'
    await place.client.post("/v1/completions", content=content)
    assert place.decoders[0].asked[0].content == content
    assert place.prefillers[0].asked == []
    assert place.proxy.statistics.skipped == {"short": 1}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no json",
        b"[1]",
        b'{"prompt": "\xff"}',
        b'{"messages": 3}',
        b"[" * 5000,
        b'{"prompt": ' + b"[" * 5000,
    ],
)
async def test_what_is_no_request_is_the_decoders_to_explain(place: Place, content: bytes) -> None:
    place.decoders[0].always = says(400, b'{"error": "the engine says so"}', x_said="yes")
    answer = await place.client.post("/v1/completions", content=content)
    assert (answer.status_code, answer.content) == (400, b'{"error": "the engine says so"}')
    assert answer.headers["x-said"] == "yes"
    assert place.decoders[0].asked[0].content == content
    assert place.outcomes == {"error": 1}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "short"}, "short"),
        ({"prompt": list(range(255))}, "short"),
        ({"prompt": None}, "unsuitable"),
        ({"prompt_logprobs": 1}, "unsuitable"),
        ({"echo": True, "logprobs": 0}, "unsuitable"),
        ({"kv_transfer_params": 3}, "unsuitable"),
    ],
)
async def test_some_prompts_are_left_to_the_decoder(
    place: Place, fields: dict[str, Any], reason: str
) -> None:
    assert (await place.ask(**fields)).status_code == 200
    assert place.proxy.statistics.skipped == {reason: 1}
    assert place.prefillers[0].asked == []


@pytest.mark.parametrize("prompt", [list(range(256)), [[1, 2] * 200], ["word " * 300, "word"]])
async def test_tokens_are_counted(place: Place, prompt: object) -> None:
    await place.ask(prompt=prompt)
    assert len(place.prefillers[0].asked) == 1
    assert place.prefillers[0].asked[0].body["prompt"] == prompt


async def test_what_the_decoder_holds_is_not_prefilled_again(place: Place) -> None:
    for _ in range(2):
        await place.ask()
    await place.ask(prompt=LONG + " and a bit more")
    assert len(place.prefillers[0].asked) == 1
    assert place.proxy.statistics.skipped == {"cached": 2}
    await place.ask(prompt=LONG, cache_salt="of another tenant")
    await place.ask(prompt=LONG + "more " * 2000)
    assert len(place.prefillers[0].asked) == 3


async def test_a_conversation_is_known_by_its_beginning(place: Place) -> None:
    messages = [{"role": "user", "content": LONG}]
    await place.client.post("/v1/chat/completions", json={"model": "m", "messages": messages})
    messages += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "and now?"}]
    await place.client.post("/v1/chat/completions", json={"model": "m", "messages": messages})
    assert place.proxy.statistics.skipped == {"cached": 1}


async def test_without_a_prefiller_the_decoder_serves() -> None:
    async with running(0, 1) as place:
        assert (await place.ask()).json()["choices"][0]["text"] == " hello"
        assert place.proxy.statistics.skipped == {"no_prefiller": 1}
        assert place.decoders[0].asked[0].body == PROMPT


async def test_a_prefiller_that_is_the_decoder_is_not_asked() -> None:
    async with running(0, 1) as place:
        place.proxy.add(Role.PREFILL, place.decoders[0].url)
        await place.is_ready()
        await place.ask()
        assert len(place.decoders[0].asked) == 1


async def test_a_prefiller_that_hands_nothing_over(place: Place) -> None:
    place.prefillers[0].hands_over = 0
    await place.ask()
    assert place.decoders[0].asked[0].body == PROMPT
    assert place.proxy.statistics.prefills == {"kept": 1}


@pytest.mark.parametrize("params", [{"mine": 1}, {"mine": 1, "kvtier": {"hand_over": {"to": "evil:1"}}}])
async def test_who_asks_for_params_gets_them_but_gives_no_orders(
    place: Place, params: dict[str, Any]
) -> None:
    answer = await place.ask(kv_transfer_params=params)
    assert answer.json()["kv_transfer_params"] == {"kvtier": {"peer": "0.0.0.0:55555"}, "other": 1}
    (prefill,), (decode,) = place.prefillers[0].asked, place.decoders[0].asked
    assert prefill.body["kv_transfer_params"] == {
        "mine": 1,
        "kvtier": {"hand_over": {"to": "127.0.0.1:55555"}},
    }
    assert decode.body["kv_transfer_params"]["mine"] == 1
    assert decode.ours == {"expect": {"tokens": 300, "seconds": 10.0}}
    await place.ask(prompt="short", kv_transfer_params=params)
    assert place.decoders[0].asked[1].ours == ({} if "kvtier" in params else None)


async def test_a_stream_comes_at_once_and_as_it_is(place: Place) -> None:
    slow = Slow()
    place.decoders[0].then.append(slow)
    said = [
        b": a comment\n\n",
        event(1),
        b"data: half of ",
        b"an event\r\n\r\n",
        b"\xff\x00 no text\n\n",
        DONE,
    ]
    slow.say(said[0])
    async with place.stream() as response:
        received, pieces = b"", aiter(response.aiter_raw())
        for content in said:
            if content is not said[0]:
                slow.say(content)
            piece = b""
            while len(piece) < len(content):  # Each is there before the next is said.
                with anyio.fail_after(30):
                    piece += await anext(pieces)
            received += piece
        slow.say(None)
        assert [piece async for piece in pieces] == []
    assert received == b"".join(said)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_headers_go_through_but_for_those_of_one_connection(place: Place) -> None:
    place.decoders[0].then.append(
        says(
            200, {"a": 1}, set_cookie="c=1", connection="x-private", x_private="no", x_id="7", keep_alive="5"
        )
    )
    headers = {
        "Authorization": "Bearer sk-secret",
        "X-Request-Id": "r-1",
        "Connection": "keep-alive, x-mine",
        "X-Mine": "no",
        "TE": "trailers",
        "Proxy-Authorization": "Basic no",
        "Accept-Encoding": "gzip",
    }
    answer = await place.client.post("/v1/completions", json=PROMPT, headers=headers)
    for asked in (place.prefillers[0].asked[0], place.decoders[0].asked[0]):
        assert asked.header("authorization") == "Bearer sk-secret"
        assert asked.header("x-request-id") == "r-1"
        assert asked.header("accept-encoding") == "identity"
        assert asked.header("content-type") == "application/json"
        for name in ("x-mine", "te", "proxy-authorization"):
            assert asked.header(name) is None
    assert place.decoders[0].asked[0].header("host") == place.decoders[0].url.removeprefix("http://")
    assert (answer.headers["set-cookie"], answer.headers["x-id"]) == ("c=1", "7")
    assert not {"x-private", "keep-alive"} & set(answer.headers)
    assert len(answer.headers.get_list("date")) == 1


async def test_keys_are_not_logged(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    place.prefillers[0].then.append(says(500))
    headers = {"Authorization": "Bearer sk-secret"}
    await place.client.post("/v1/completions", json=PROMPT, headers=headers)
    assert "sk-secret" not in caplog.text
    assert "answers with 500" in caplog.text


async def test_an_answer_too_long_to_be_looked_into_goes_through(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.proxy.exchange.MOST_ANSWER_BYTES", 1000)
    content = json.dumps({"text": "x" * 300_000, "kv_transfer_params": {"a": 1}}).encode()
    place.decoders[0].then.append(says(200, content))
    assert (await place.ask()).content == content


async def test_a_long_request_goes_through(place: Place) -> None:
    prompt = list(range(100_000, 200_000))
    await place.ask(prompt=prompt)
    assert place.decoders[0].asked[0].body["prompt"] == prompt


async def test_nothing_else_is_served(place: Place) -> None:
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/v1/other", 404)):
        answer = await place.client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == status
