"""The hint ``cache`` for the engines, from what clients send."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from kvtier.fleet.proxy.body import CHAT_PATH, Body

from .conftest import LONG, PROMPT, Cluster

pytestmark = pytest.mark.anyio


EPHEMERAL: dict[str, Any] = {"type": "ephemeral"}
HOUR: dict[str, Any] = {"type": "ephemeral", "ttl": "1h"}


def hint_of(fields: dict[str, Any]) -> object:
    """Return the hint that an engine gets."""
    decoded = json.loads(Body(CHAT_PATH, json.dumps(fields).encode()).for_decode(0, 1.0))
    return ((decoded.get("kv_transfer_params") or {}).get("kvtier") or {}).get("cache")


def message(control: object, **more: Any) -> dict[str, Any]:
    part = {"type": "text", "text": "hello", "cache_control": control, **more}
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        (message(EPHEMERAL), {"retention": 300.0}),
        (message({**EPHEMERAL, "ttl": "5m"}), {"retention": 300.0}),
        (message(HOUR), {"retention": 3600.0}),
        (message({**EPHEMERAL, "ttl": "2h"}), None),
        (message({**EPHEMERAL, "ttl": 5}), None),
        (message({"type": "persistent"}), None),
        (message(None), None),
        (message("ephemeral"), None),
        ({"messages": [{"role": "user", "content": "x", "cache_control": HOUR}]}, {"retention": 3600.0}),
        ({"system": [{"type": "text", "text": "x", "cache_control": HOUR}]}, {"retention": 3600.0}),
        ({"tools": [{"type": "function", "cache_control": HOUR}]}, {"retention": 3600.0}),
        ({"cache_control": EPHEMERAL}, {"retention": 300.0}),
        ({**message(EPHEMERAL), "tools": [{"cache_control": HOUR}]}, {"retention": 3600.0}),
        ({"messages": [{"content": [{"content": [{"cache_control": HOUR}]}]}]}, {"retention": 3600.0}),
        ({"messages": [{"role": "user", "content": "cache_control: ephemeral"}]}, None),
        ({"metadata": {"cache_control": HOUR}}, None),
        ({"priority": -7}, {"priority": 7}),
        ({"priority": 100_000}, {"priority": -100}),
        ({"priority": 0}, None),
        ({"priority": True}, None),
        ({"priority": "high"}, None),
        ({**message(HOUR), "priority": 3}, {"retention": 3600.0, "priority": -3}),
    ],
)
def test_fields_of_other_apis(fields: dict[str, Any], hint: object) -> None:
    assert hint_of(fields) == hint


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"retention": 10}, {"retention": 10, "priority": -3}),
        ({"priority": 0}, {"retention": 3600.0, "priority": 0}),
        ({"retention": None, "resume": 5}, {"retention": None, "resume": 5, "priority": -3}),
        (
            {"tenant": "of someone else", "recompute": 0.5},
            {"retention": 3600.0, "priority": -3, "recompute": 0.5},
        ),
        ("off", {"retention": 3600.0, "priority": -3, "mode": "off"}),
        ({"retention": -1}, {"retention": 3600.0, "priority": -3}),
        ({"unknown": 1}, {"retention": 3600.0, "priority": -3}),
        ("sometimes", {"retention": 3600.0, "priority": -3}),
        (3, {"retention": 3600.0, "priority": -3}),
        (None, {"retention": 3600.0, "priority": -3}),
    ],
)
def test_what_the_client_gives_itself_counts(given: object, hint: object) -> None:
    fields = {**message(HOUR), "priority": 3, "kv_transfer_params": {"kvtier": {"cache": given}}}
    assert hint_of(fields) == hint


def test_other_fields_stay_as_they_are() -> None:
    content = b'{"messages": [{"content": [{"cache_control": {"type": "ephemeral"}, "n": 1.10}]}], "x": 1e3}'
    prepared = Body(CHAT_PATH, content).for_decode(0, 1.0)
    assert b'"n": 1.10' in prepared
    assert b'"x":1e3' in prepared
    fields = json.loads(prepared)
    assert fields.pop("kv_transfer_params") == {"kvtier": {"cache": {"retention": 300.0}}}
    assert fields == json.loads(content)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"kv_transfer_params": 3, "priority": 1}', b'{"messages": [{"content": "x"}]}']
)
def test_body_without_a_hint_is_forwarded_byte_for_byte(content: bytes) -> None:
    assert Body(CHAT_PATH, content).for_decode(0, 1.0) is content


def test_text_is_no_cache_control() -> None:
    quoted = json.dumps({"cache_control": HOUR})
    assert hint_of({"messages": [{"role": "user", "content": f"{LONG} {quoted}"}], "tools": []}) is None
    both = [{"content": [{"text": quoted, "cache_control": {"type": "ephemeral"}}]}]
    assert hint_of({"messages": both}) == {"retention": 300.0}


def test_many_values_take_no_memory() -> None:
    """A tree of a million objects would take 100 MB, and stop all streams of the proxy for a second."""
    marked = b'{"cache_control": {"type": "ephemeral"}}'
    content = b'{"cache_control": 1, "messages": [' + b"{}," * 300_000 + marked + b"]}"
    tracemalloc.start()
    try:
        body = Body(CHAT_PATH, content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert body.cache == {"retention": 300.0}
    assert peak < 10 * len(content)


@pytest.mark.parametrize("name", ["priority", "cache_control", "system", "messages"])
@pytest.mark.parametrize(
    "value", [b'"\xff cache_control"', b'"\\ud800 cache_control"', b"[" * 5000 + b"]" * 5000]
)
def test_malformed_values_are_no_error(name: str, value: bytes) -> None:
    content = b'{"prompt": "x", "%s": %s}' % (name.encode(), value)
    assert Body(CHAT_PATH, content).cache == {}


HIDDEN = '{"prompt": "x", "kv_transfer_params": {"kvtier": {"cache": {"tenant": "a"}}%s}%s}'


@pytest.mark.parametrize(
    "content",
    [
        (HIDDEN % ("", ', "x": NaN')).encode(),
        (HIDDEN % (', "x": Infinity', "")).encode(),
        (HIDDEN % (', "\\ud800": 1', "")).encode(),
        (HIDDEN % ("", ', "\\ud800": 1')).encode(),
        (HIDDEN % ("", "")).encode("utf-8-sig"),
        (HIDDEN % ("", "")).encode("utf-16"),
    ],
)
async def test_hints_that_only_an_engine_could_read_are_refused(cluster: Cluster, content: bytes) -> None:
    assert "kvtier" in json.loads(content)["kv_transfer_params"]
    answer = await cluster.client.post("/v1/completions", content=content)
    assert answer.status_code == 400
    assert "kv_transfer_params cannot be read" in answer.json()["error"]["message"]
    assert cluster.decoders[0].requests == []


def test_mode_of_an_invalid_hint_counts() -> None:
    hint = {"mode": "off", "retention": -1}
    assert hint_of({"kv_transfer_params": {"kvtier": {"cache": hint}}}) == {"mode": "off"}


async def test_both_engines_get_the_hint(cluster: Cluster) -> None:
    await cluster.complete(priority=-2)
    (prefill,), (decode,) = cluster.prefillers[0].requests, cluster.decoders[0].requests
    assert prefill.kvtier_params == {"kv_transfer": {"to": "127.0.0.1:55555"}, "cache": {"priority": 2}}
    assert decode.kvtier_params == {"expect": {"tokens": 300, "seconds": 10.0}, "cache": {"priority": 2}}
    assert decode.body["priority"] == -2


@pytest.mark.parametrize("mode", ["off", "read", "write"])
async def test_prompt_that_may_not_use_the_cache_is_not_prefilled(cluster: Cluster, mode: str) -> None:
    await cluster.complete(kv_transfer_params={"kvtier": {"cache": mode}})
    assert cluster.proxy.statistics.skipped == {"unsuitable": 1}
    assert cluster.decoders[0].requests[0].body["prompt"] == PROMPT["prompt"]
    assert cluster.decoders[0].requests[0].kvtier_params == {"cache": {"mode": mode}}
