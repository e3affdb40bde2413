"""Single requests through the proxy: what engines and clients receive."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from kvtier.fleet.proxy.upstream import Role

from .conftest import LONG, PROMPT, Cluster, running
from .stub import DONE, EVENTS, event, responds

pytestmark = pytest.mark.anyio


async def test_completion_is_prefilled_and_decoded(cluster: Cluster) -> None:
    answer = await cluster.complete(temperature=0.5, stream=False)
    assert answer.status_code == 200
    assert answer.json() == {"id": "cmpl-1", "choices": [{"index": 0, "text": " hello"}], "usage": {"n": 1.0}}
    (prefill,), (decode,) = cluster.prefillers[0].requests, cluster.decoders[0].requests
    assert prefill.body == {
        **PROMPT,
        "temperature": 0.5,
        "stream": False,
        "max_tokens": 1,
        "n": 1,
        "kv_transfer_params": {"kvtier": {"kv_transfer": {"to": "127.0.0.1:55555"}}},
    }
    assert decode.body == {
        **PROMPT,
        "temperature": 0.5,
        "stream": False,
        "kv_transfer_params": {"kvtier": {"expect": {"tokens": 300, "seconds": 10.0}}},
    }
    assert cluster.outcomes == {"ok": 1}
    assert cluster.proxy.statistics.prefill.count == 1
    assert cluster.proxy.statistics.transferred_tokens == 300


async def test_chat_is_prefilled_and_decoded(cluster: Cluster) -> None:
    request: dict[str, Any] = {
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
    content = json.dumps(request, ensure_ascii=False).encode().replace(b"null", b"1.10, 1e3,null")
    request = json.loads(content)
    answer = await cluster.client.post("/v1/chat/completions", content=content)
    assert answer.content == b"".join(EVENTS)
    (prefill,), (decode,) = cluster.prefillers[0].requests, cluster.decoders[0].requests
    assert prefill.path == decode.path == "/v1/chat/completions"
    expected = {**request, "stream": False, "n": 1, "max_tokens": 1, "max_completion_tokens": 1}
    for name in ("stream_options", "min_tokens"):
        del expected[name]
    expected["kv_transfer_params"] = {"kvtier": {"kv_transfer": {"to": "127.0.0.1:55555"}}}
    assert prefill.body == expected
    assert decode.body.pop("kv_transfer_params") == {"kvtier": {"expect": {"tokens": 300, "seconds": 10.0}}}
    for value in ("1.10", "1e3", "12345678901234567890", '"é"'):  # Values keep their spelling.
        assert value in decode.content.decode()
    assert {key: value for key, value in decode.body.items() if key != "kv_transfer_params"} == request


async def test_request_without_prefill_is_forwarded_unchanged(cluster: Cluster) -> None:
    content = b'{ "prompt" : "short", "model":"m",  "n": 1.0, "x": 1, "x": 2 }'
    await cluster.client.post("/v1/completions", content=content)
    assert cluster.decoders[0].requests[0].content == content
    assert cluster.prefillers[0].requests == []
    assert cluster.proxy.statistics.skipped == {"short": 1}


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
async def test_malformed_request_is_forwarded_to_the_decoder(cluster: Cluster, content: bytes) -> None:
    cluster.decoders[0].always = responds(400, b'{"error": "of the engine"}', x_test="yes")
    answer = await cluster.client.post("/v1/completions", content=content)
    assert (answer.status_code, answer.content) == (400, b'{"error": "of the engine"}')
    assert answer.headers["x-test"] == "yes"
    assert cluster.decoders[0].requests[0].content == content
    assert cluster.outcomes == {"error": 1}


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
async def test_unsuitable_prompts_are_not_prefilled(
    cluster: Cluster, fields: dict[str, Any], reason: str
) -> None:
    assert (await cluster.complete(**fields)).status_code == 200
    assert cluster.proxy.statistics.skipped == {reason: 1}
    assert cluster.prefillers[0].requests == []


@pytest.mark.parametrize("prompt", [list(range(256)), [[1, 2] * 200], ["word " * 300, "word"]])
async def test_prompts_of_tokens_and_lists_are_prefilled(cluster: Cluster, prompt: object) -> None:
    await cluster.complete(prompt=prompt)
    assert len(cluster.prefillers[0].requests) == 1
    assert cluster.prefillers[0].requests[0].body["prompt"] == prompt


async def test_prompt_that_the_decoder_holds_is_not_prefilled_again(cluster: Cluster) -> None:
    for _ in range(2):
        await cluster.complete()
    await cluster.complete(prompt=LONG + " and a bit more")
    assert len(cluster.prefillers[0].requests) == 1
    assert cluster.proxy.statistics.skipped == {"cached": 2}
    await cluster.complete(prompt=LONG, cache_salt="of another tenant")
    await cluster.complete(prompt=LONG + "more " * 2000)
    assert len(cluster.prefillers[0].requests) == 3


async def test_conversation_is_recognized_by_its_prefix(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": LONG}]
    await cluster.client.post("/v1/chat/completions", json={"model": "m", "messages": messages})
    messages += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "and now?"}]
    await cluster.client.post("/v1/chat/completions", json={"model": "m", "messages": messages})
    assert cluster.proxy.statistics.skipped == {"cached": 1}


async def test_without_a_prefiller_the_decoder_serves() -> None:
    async with running(0, 1) as cluster:
        assert (await cluster.complete()).json()["choices"][0]["text"] == " hello"
        assert cluster.proxy.statistics.skipped == {"no_prefiller": 1}
        assert cluster.decoders[0].requests[0].body == PROMPT


async def test_no_prefill_if_prefiller_and_decoder_are_the_same() -> None:
    async with running(0, 1) as cluster:
        cluster.proxy.add(Role.PREFILL, cluster.decoders[0].url)
        await cluster.wait_until_ready()
        await cluster.complete()
        assert len(cluster.decoders[0].requests) == 1


async def test_prefill_without_a_transfer(cluster: Cluster) -> None:
    cluster.prefillers[0].transferred_tokens = 0
    await cluster.complete()
    assert cluster.decoders[0].requests[0].body == PROMPT
    assert cluster.proxy.statistics.prefills == {"kept": 1}


@pytest.mark.parametrize("params", [{"mine": 1}, {"mine": 1, "kvtier": {"kv_transfer": {"to": "evil:1"}}}])
async def test_client_receives_params_but_cannot_set_those_of_kvtier(
    cluster: Cluster, params: dict[str, Any]
) -> None:
    answer = await cluster.complete(kv_transfer_params=params)
    assert answer.json()["kv_transfer_params"] == {"kvtier": {"peer": "0.0.0.0:55555"}, "other": 1}
    (prefill,), (decode,) = cluster.prefillers[0].requests, cluster.decoders[0].requests
    assert prefill.body["kv_transfer_params"] == {
        "mine": 1,
        "kvtier": {"kv_transfer": {"to": "127.0.0.1:55555"}},
    }
    assert decode.body["kv_transfer_params"]["mine"] == 1
    assert decode.kvtier_params == {"expect": {"tokens": 300, "seconds": 10.0}}
    await cluster.complete(prompt="short", kv_transfer_params=params)
    assert cluster.decoders[0].requests[1].kvtier_params == ({} if "kvtier" in params else None)


async def test_stream_is_forwarded_immediately_and_unchanged(cluster: Cluster) -> None:
    contents = [
        b": a comment\n\n",
        event(1),
        b"data: half of ",
        b"an event\r\n\r\n",
        b"\xff\x00 no text\n\n",
        DONE,
    ]
    slow = cluster.decoders[0].stream(contents[0])
    async with cluster.stream() as response:
        received, pieces = b"", aiter(response.aiter_raw())
        for content in contents:
            if content is not contents[0]:
                slow.send(content)
            piece = b""
            while len(piece) < len(content):  # Each arrives before the next is sent.
                with anyio.fail_after(30):
                    piece += await anext(pieces)
            received += piece
        slow.send(None)
        assert [piece async for piece in pieces] == []
    assert received == b"".join(contents)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_headers_are_forwarded_except_hop_by_hop_headers(cluster: Cluster) -> None:
    cluster.decoders[0].then.append(
        responds(
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
    answer = await cluster.client.post("/v1/completions", json=PROMPT, headers=headers)
    for request in (cluster.prefillers[0].requests[0], cluster.decoders[0].requests[0]):
        assert request.header("authorization") == "Bearer sk-secret"
        assert request.header("x-request-id") == "r-1"
        assert request.header("accept-encoding") == "identity"
        assert request.header("content-type") == "application/json"
        for name in ("x-mine", "te", "proxy-authorization"):
            assert request.header(name) is None
    assert cluster.decoders[0].requests[0].header("host") == cluster.decoders[0].url.removeprefix("http://")
    assert (answer.headers["set-cookie"], answer.headers["x-id"]) == ("c=1", "7")
    assert not {"x-private", "keep-alive"} & set(answer.headers)
    assert len(answer.headers.get_list("date")) == 1


async def test_keys_are_not_logged(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    cluster.prefillers[0].then.append(responds(500))
    headers = {"Authorization": "Bearer sk-secret"}
    await cluster.client.post("/v1/completions", json=PROMPT, headers=headers)
    assert "sk-secret" not in caplog.text
    assert "answered with 500" in caplog.text


async def test_long_answer_is_forwarded_without_parsing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.fleet.proxy.exchange.MAX_ANSWER_BYTES", 1000)
    content = json.dumps({"text": "x" * 300_000, "kv_transfer_params": {"a": 1}}).encode()
    cluster.decoders[0].then.append(responds(200, content))
    assert (await cluster.complete()).content == content


async def test_long_request_is_forwarded(cluster: Cluster) -> None:
    prompt = list(range(100_000, 200_000))
    await cluster.complete(prompt=prompt)
    assert cluster.decoders[0].requests[0].body["prompt"] == prompt


async def test_other_paths_and_methods_are_refused(cluster: Cluster) -> None:
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/v1/other", 404)):
        answer = await cluster.client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == status
