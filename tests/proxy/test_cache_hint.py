"""The hint ``cache`` for the engines, from what clients send."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvtier.proxy import cache_hint as module
from kvtier.proxy.body import CHAT_PATH, Body

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


def test_body_without_these_fields_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(raw: msgspec.Raw | None) -> object:
        assert raw is None
        return None

    monkeypatch.setattr(module, "_decoded", decode)
    assert hint_of({"messages": [{"role": "user", "content": LONG}], "tools": []}) is None


def test_deep_nesting_is_no_error() -> None:
    deep: object = {"cache_control": HOUR}
    for _ in range(20):
        deep = {"content": [deep]}
    assert hint_of({"messages": [deep]}) is None
    nested = b'{"messages": ' + b"[" * 5000 + b'"cache_control"' + b"]" * 5000 + b"}"
    assert Body(CHAT_PATH, nested).cache == {}


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
