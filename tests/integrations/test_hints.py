"""Hints of a request, and the handling of invalid ones."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.bridge.protocol import KVTransferResult
from kvtier.catalog.hints import ChunkHints
from kvtier.integrations.vllm.hints import (
    CacheHint,
    CanaryHint,
    ExpectHint,
    Hints,
    KVTransferHint,
    has_hints,
    read_hints,
)
from kvtier.integrations.vllm.prompt_transfers import PromptTransfers, role_of
from kvtier.integrations.vllm.request import RequestState, request_root
from kvtier.memory.keys import ChunkKey
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.settings import load_settings

TOKENS = list(range(100))
TRANSFER = {"kv_transfer": {"to": "10.0.0.2:8200"}}
EXPECT = {"expect": {"tokens": 100, "seconds": 2.5}}
CACHE = {"cache": {"tenant": "a", "priority": -3, "retention": 600, "resume": 30.5, "recompute": 0.25}}


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        ({}, Hints()),
        (TRANSFER, Hints(kv_transfer=KVTransferHint("10.0.0.2:8200"))),
        ({"kv_transfer": {"to": "[::1]:8200"}}, Hints(kv_transfer=KVTransferHint("[::1]:8200"))),
        (EXPECT, Hints(expect=ExpectHint(100, 2.5))),
        ({"expect": {"tokens": 1, "seconds": 3}}, Hints(expect=ExpectHint(1, 3))),
        ({"expect": {"tokens": 1}}, Hints(expect=ExpectHint(1))),
        ({"kv_transfer": None, "expect": None}, Hints()),
        ({"cache": {}}, Hints(cache=CacheHint())),
        (CACHE, Hints(cache=CacheHint("a", -3, 600, 30.5, 0.25))),
        ({"cache": "off"}, Hints(cache="off")),
        ({"cache": {"mode": "read"}}, Hints(cache=CacheHint(mode="read"))),
        ({"canary": {"id": "4f1e"}}, Hints(canary=CanaryHint("4f1e"))),
        ({"canary": {"id": "4f1e", "tier": "ssd"}}, Hints(canary=CanaryHint("4f1e", "ssd"))),
    ],
)
def test_valid_hints_are_parsed(hints: object, expected: Hints) -> None:
    assert has_hints({"kvtier": hints})
    assert read_hints({"kvtier": hints, "other": 1}) == expected


@pytest.mark.parametrize(
    "hints",
    [
        None,
        [],
        "x",
        7,
        {"hand-over": {}},
        {"kv_transfer": {}},
        {"kv_transfer": {"to": 8200}},
        {"kv_transfer": {"to": "8200"}},
        {"kv_transfer": {"to": "host:0"}},
        {"kv_transfer": {"to": "host:99999"}},
        {"kv_transfer": {"to": "::1:8200"}},
        {"kv_transfer": {"to": "a\nb:8200"}},
        {"kv_transfer": {"to": "a" * 400 + ":8200"}},
        {"kv_transfer": {"to": "host:8200", "more": 1}},
        {"expect": {}},
        {"expect": {"tokens": 0}},
        {"expect": {"tokens": True}},
        {"expect": {"tokens": "100"}},
        {"expect": {"tokens": 1.5}},
        {"expect": {"tokens": 1 << 40}},
        {"expect": {"tokens": 1, "seconds": 0}},
        {"expect": {"tokens": 1, "seconds": -1}},
        {"expect": {"tokens": 1, "seconds": float("nan")}},
        {"expect": {"tokens": 1, "seconds": float("inf")}},
        {"expect": {"tokens": 1, "seconds": "1s"}},
        {"cache": {"tenant": "a" * 65}},
        {"cache": {"tenant": 7}},
        {"cache": {"priority": 101}},
        {"cache": {"priority": 0.5}},
        {"cache": {"retention": -1}},
        {"canary": {}},
        {"canary": "4f1e"},
        {"canary": {"id": ""}},
        {"canary": {"id": "4f1e\n"}},
        {"canary": {"id": "\ud800"}},
        {"canary": {"id": "a" * 65}},
        {"canary": {"id": "4f1e", "tier": "\ud800"}},
        {"cache": {"resume": float("nan")}},
        {"cache": {"recompute": float("inf")}},
        {"cache": {"colour": "red"}},
        {"cache": "none"},
        {"cache": "OFF"},
        {"cache": False},
        {"cache": {"mode": "none"}},
    ],
)
def test_invalid_hints_are_refused(hints: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_hints({"kvtier": hints})


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, ["kvtier"], "kvtier"])
def test_foreign_parameters_are_ignored(params: Any) -> None:
    assert not has_hints(params)


class Bridge:
    """A stand-in for a bridge, with the used methods."""

    def __init__(self) -> None:
        self.welcome = SimpleNamespace(peer="0.0.0.0:8200")
        self.result: KVTransferResult | None = None
        self.started: list[tuple[str, int, int]] = []
        self.ended: list[tuple[int, bool]] = []

    def transfer_kv(self, to: str, root: bytes, keys: list[bytes], tokens: int, trace: bytes = b"") -> int:
        self.started.append((to, len(keys), tokens))
        return len(self.started)

    def transferred(self, ticket: int) -> KVTransferResult | None:
        return self.result

    def end_kv_transfer(self, ticket: int, *, complete: bool) -> None:
        self.ended.append((ticket, complete))


LAYOUT = ChunkLayout(64, (GroupLayout(16, (1,)),))


class Stats(Counter[str]):
    """A stand-in for vLLM's counters."""

    def add(self, name: str, amount: float) -> None:
        self[name] += int(amount)


def kv_transfers(bridge: Bridge, **settings: Any) -> PromptTransfers:
    return PromptTransfers(load_settings(settings), LAYOUT, bridge, Stats())  # type: ignore[arg-type]


def state_of(transfer: PromptTransfers, params: object) -> RequestState:
    request: Any = SimpleNamespace(
        request_id="a",
        kv_transfer_params=params,
        all_token_ids=TOKENS,
        num_prompt_tokens=len(TOKENS),
        prompt_embeds=None,
        cache_salt=None,
        lora_request=None,
        mm_features=[],
    )
    state = RequestState(request, request_root(bytes(32), request), 64)
    state.hints = transfer.hints(request)
    return state


def transferring() -> tuple[Bridge, PromptTransfers, RequestState]:
    """Begin the transfer of a prompt."""
    bridge = Bridge()
    transfer = kv_transfers(bridge)
    state = state_of(transfer, {"kvtier": TRANSFER})
    transfer.begin(state)
    return bridge, transfer, state


def test_prompt_is_transferred_with_its_tail_and_answered() -> None:
    bridge, transfer, state = transferring()
    transfer.begin(state)
    assert bridge.started == [("10.0.0.2:8200", 2, 100)]
    assert transfer.wants_tail(state)
    assert transfer.finish(state) == 100
    assert bridge.ended == [], "its last chunks may not be reserved yet"
    transfer.end_finished()
    assert bridge.ended == [(1, True)]
    assert transfer.answer(state.request, 100) == {
        "kvtier": {"peer": "0.0.0.0:8200", "transferred": {"tokens": 100, "from": "0.0.0.0:8200"}}
    }


def test_answer_promises_only_transferred_tokens() -> None:
    bridge, transfer, state = transferring()
    bridge.result = KVTransferResult(1, 64, "no room")
    assert transfer.finish(state) == 64
    assert transfer.answer(state.request, 0) == {"kvtier": {"peer": "0.0.0.0:8200"}}


def test_abandoned_kv_transfer_restarts_unless_a_load_failed() -> None:
    bridge, transfer, state = transferring()
    transfer.give_up(state)
    transfer.give_up(state)
    assert bridge.ended == [(1, False)]
    transfer.begin(state)
    assert len(bridge.started) == 2
    transfer.give_up(state)
    state.lookup.load_failed = True
    transfer.begin(state)
    assert len(bridge.started) == 2
    assert transfer.finish(state) == 0


def test_expected_wait_is_limited_by_settings() -> None:
    transfer = kv_transfers(Bridge(), kv_transfer={"timeout": "1s"})
    keys = [ChunkKey(bytes(32))] * 2
    state = state_of(transfer, {"kvtier": {"expect": {"tokens": 100, "seconds": 1e9}}})
    expected = transfer.expected(state, keys)
    assert expected.chunks == 2
    assert 0 < expected.seconds <= 1
    shorter = state_of(transfer, {"kvtier": {"expect": {"tokens": 99, "seconds": 0.5}}})
    expected = transfer.expected(shorter, keys)
    assert expected.chunks == 1
    assert 0 < expected.seconds <= 0.5
    assert not transfer.wants_tail(shorter)
    shorter.transfer.expect_until = 0.0
    assert transfer.expected(shorter, keys) == (0, 0.0)
    assert transfer.expected(state_of(transfer, None), keys) == (0, 0.0)


def test_invalid_hints_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The request is served, and its answer names the address of this instance."""
    bridge = Bridge()
    transfer = kv_transfers(bridge)
    with caplog.at_level("WARNING"):
        for _ in range(3):
            state = state_of(transfer, {"kvtier": {"kv_transfer": {"to": "nonsense"}}})
            transfer.begin(state)
            assert transfer.answer(state.request, 0) == {"kvtier": {"peer": "0.0.0.0:8200"}}
    assert bridge.started == []
    assert len([record for record in caplog.records if "kv_transfer_params" in record.message]) == 1


@pytest.mark.parametrize(("role", "hint"), [("decode", TRANSFER), ("prefill", EXPECT)])
def test_role_ignores_hints_of_the_other_role(role: str, hint: dict[str, Any]) -> None:
    transfer = kv_transfers(Bridge(), role=role)
    assert transfer.hints(SimpleNamespace(request_id="a", kv_transfer_params={"kvtier": hint})) == Hints()
    both = SimpleNamespace(request_id="a", kv_transfer_params={"kvtier": {**hint, **CACHE}})
    assert transfer.hints(both).for_chunks("") == ChunkHints("a", -3, 600, 30.5, 0.25)


@pytest.mark.parametrize("cache", ["read", {"mode": "read"}])
def test_mode_is_no_hint_for_chunks(cache: Any) -> None:
    hints = read_hints({"kvtier": {"cache": cache}})
    assert hints.mode == "read"
    assert hints.for_chunks("") in (None, ChunkHints())
    assert Hints().mode == "both"


def test_invalid_mode_is_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    transfer = kv_transfers(Bridge())
    for _ in range(3):
        assert state_of(transfer, {"kvtier": {"cache": "none"}}).hints == Hints()
    (message,) = caplog.messages
    assert 'kv_transfer_params["kvtier"]' in message
    assert "'none' - at `$.cache`" in message


@pytest.mark.parametrize(
    ("mode", "kept"),
    [("off", ()), ("read", ("expect",)), ("write", ("kv_transfer",)), ("both", ("kv_transfer", "expect"))],
)
def test_mode_rules_out_kv_transfers(mode: str, kept: tuple[str, ...]) -> None:
    """What is not stored cannot be pushed, and what is not loaded need not be awaited."""
    both = {"kvtier": {**TRANSFER, **EXPECT, "cache": mode}}
    hints = kv_transfers(Bridge()).hints(
        SimpleNamespace(request_id="a", kv_transfer_params=both)  # type: ignore[arg-type]
    )
    assert tuple(name for name in ("kv_transfer", "expect") if getattr(hints, name) is not None) == kept


@pytest.mark.parametrize(
    ("hints", "salt", "expected"),
    [
        (Hints(), "", None),
        (Hints(), "a", ChunkHints("salt-17762fdd")),
        (Hints(cache="read"), "a", ChunkHints("salt-17762fdd")),
        (Hints(cache=CacheHint(priority=3)), "a", ChunkHints("salt-17762fdd", 3)),
        (Hints(cache=CacheHint("mine", 3)), "a", ChunkHints("mine", 3)),
        (Hints(cache=CacheHint(priority=3)), "", ChunkHints("", 3)),
    ],
)
def test_tenant_is_that_of_the_hints_or_else_of_the_salt(
    hints: Hints, salt: str, expected: ChunkHints | None
) -> None:
    assert hints.for_chunks(salt) == expected


@pytest.mark.parametrize(
    ("settings", "kv_role", "role"),
    [
        ({}, "kv_producer", "prefill"),
        ({}, "kv_consumer", "decode"),
        ({}, "kv_both", "both"),
        ({}, None, "both"),
        ({"role": "both"}, "kv_producer", "both"),
        ({"role": "decode"}, "kv_both", "decode"),
    ],
)
def test_role_of_settings_overrides_vllm(settings: dict[str, Any], kv_role: str | None, role: str) -> None:
    assert role_of(load_settings(settings), kv_role) == role


def test_requests_of_one_canary_share_their_keys_and_no_others() -> None:
    def root(salt: str | None, canary: str = "", adapter: str = "") -> ChunkKey:
        request: Any = SimpleNamespace(cache_salt=salt)
        return request_root(b"namespace", request, adapter, canary)

    assert root("a", "4f1e") == root("b", "4f1e") == root(None, "4f1e")
    others = [root(None), root("4f1e"), root("a"), root(None, "4f1f"), root(None, "4f1e", "adapter")]
    assert len({root("a", "4f1e"), *others}) == len(others) + 1
