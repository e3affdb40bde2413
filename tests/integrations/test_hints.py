"""What a request may tell an engine, and what becomes of everything else."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.bridge.protocol import HandedOver
from kvtier.integrations.vllm.handing import HandOvers, role_of
from kvtier.integrations.vllm.hints import ExpectHint, HandOverHint, Hints, has_hints, read_hints
from kvtier.integrations.vllm.request import RequestState, request_root
from kvtier.keys import ChunkKey
from kvtier.settings import load_settings

TOKENS = list(range(100))
TO = {"hand_over": {"to": "10.0.0.2:8200"}}
EXPECT = {"expect": {"tokens": 100, "seconds": 2.5}}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({}, Hints()),
        (TO, Hints(hand_over=HandOverHint("10.0.0.2:8200"))),
        ({"hand_over": {"to": "[::1]:8200"}}, Hints(hand_over=HandOverHint("[::1]:8200"))),
        (EXPECT, Hints(expect=ExpectHint(100, 2.5))),
        ({"expect": {"tokens": 1, "seconds": 3}}, Hints(expect=ExpectHint(1, 3))),
        ({"expect": {"tokens": 1}}, Hints(expect=ExpectHint(1))),
        ({"hand_over": None, "expect": None}, Hints()),
    ],
)
def test_what_is_right_is_understood(written: object, meant: Hints) -> None:
    assert has_hints({"kvtier": written})
    assert read_hints({"kvtier": written, "other": 1}) == meant


@pytest.mark.parametrize(
    "written",
    [
        None,
        [],
        "x",
        7,
        {"hand-over": {}},
        {"hand_over": {}},
        {"hand_over": {"to": 8200}},
        {"hand_over": {"to": "8200"}},
        {"hand_over": {"to": "host:0"}},
        {"hand_over": {"to": "host:99999"}},
        {"hand_over": {"to": "::1:8200"}},
        {"hand_over": {"to": "a\nb:8200"}},
        {"hand_over": {"to": "a" * 400 + ":8200"}},
        {"hand_over": {"to": "host:8200", "more": 1}},
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
    ],
)
def test_what_is_wrong_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_hints({"kvtier": written})


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, ["kvtier"], "kvtier"])
def test_others_parameters_are_not_ours(params: Any) -> None:
    assert not has_hints(params)


class Bridge:
    """What is used of a bridge, without a cache process."""

    def __init__(self) -> None:
        self.welcome = SimpleNamespace(peer="0.0.0.0:8200")
        self.told: HandedOver | None = None
        self.begun: list[tuple[str, int, int]] = []
        self.ended: list[tuple[int, bool]] = []

    def hand_over(self, to: str, root: bytes, keys: list[bytes], tokens: int) -> int:
        self.begun.append((to, len(keys), tokens))
        return len(self.begun)

    def handed_over(self, ticket: int) -> HandedOver | None:
        return self.told

    def end_hand_over(self, ticket: int, *, complete: bool) -> None:
        self.ended.append((ticket, complete))


class Stats(Counter[str]):
    """What is used of vLLM's counters."""

    def add(self, name: str, amount: float) -> None:
        self[name] += int(amount)


def hand_overs(bridge: Bridge, **settings: Any) -> HandOvers:
    return HandOvers(load_settings(settings), 64, bridge, Stats())  # type: ignore[arg-type]


def state_of(handing: HandOvers, params: object) -> RequestState:
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
    state.hints = handing.hints(request)
    return state


def test_a_prompt_is_handed_over_with_its_tail_and_the_answer_says_so() -> None:
    bridge = Bridge()
    handing = hand_overs(bridge)
    state = state_of(handing, {"kvtier": TO})
    handing.begin(state)
    handing.begin(state)
    assert bridge.begun == [("10.0.0.2:8200", 2, 100)]
    assert handing.wants_tail(state)
    assert handing.finish(state) == 100
    assert bridge.ended == [], "room for its last chunks may still have to be asked for"
    handing.end_finished()
    assert bridge.ended == [(1, True)]
    assert handing.answer(state.request, 100) == {
        "kvtier": {"peer": "0.0.0.0:8200", "handed_over": {"tokens": 100, "from": "0.0.0.0:8200"}}
    }


def test_only_what_found_room_is_promised() -> None:
    bridge = Bridge()
    handing = hand_overs(bridge)
    state = state_of(handing, {"kvtier": TO})
    handing.begin(state)
    bridge.told = HandedOver(1, 64, "no room")
    assert handing.finish(state) == 64
    assert handing.answer(state.request, 0) == {"kvtier": {"peer": "0.0.0.0:8200"}}


def test_one_that_was_given_up_begins_anew_unless_a_load_has_failed() -> None:
    bridge = Bridge()
    handing = hand_overs(bridge)
    state = state_of(handing, {"kvtier": TO})
    handing.begin(state)
    handing.give_up(state)
    handing.give_up(state)
    assert bridge.ended == [(1, False)]
    handing.begin(state)
    assert len(bridge.begun) == 2
    handing.give_up(state)
    state.load_failed = True
    handing.begin(state)
    assert len(bridge.begun) == 2
    assert handing.finish(state) == 0


def test_a_request_waits_no_longer_than_the_settings_allow() -> None:
    handing = hand_overs(Bridge(), hand_over={"patience": "1s"})
    keys = [ChunkKey(bytes(32))] * 2
    patient = state_of(handing, {"kvtier": {"expect": {"tokens": 100, "seconds": 1e9}}})
    expected = handing.expected(patient, keys)
    assert expected.chunks == 2
    assert 0 < expected.seconds <= 1
    part = state_of(handing, {"kvtier": {"expect": {"tokens": 99, "seconds": 0.5}}})
    expected = handing.expected(part, keys)
    assert expected.chunks == 1
    assert 0 < expected.seconds <= 0.5
    assert not handing.wants_tail(part)
    part.expect_until = 0.0
    assert handing.expected(part, keys) == (0, 0.0)
    assert handing.expected(state_of(handing, None), keys) == (0, 0.0)


def test_hints_that_are_of_no_use_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """And the request is served, and told where this instance listens, as if they had been right."""
    bridge = Bridge()
    handing = hand_overs(bridge)
    with caplog.at_level("WARNING"):
        for _ in range(3):
            state = state_of(handing, {"kvtier": {"hand_over": {"to": "nonsense"}}})
            handing.begin(state)
            assert handing.answer(state.request, 0) == {"kvtier": {"peer": "0.0.0.0:8200"}}
    assert bridge.begun == []
    assert len([record for record in caplog.records if "kv_transfer_params" in record.message]) == 1


@pytest.mark.parametrize(("role", "hint"), [("decode", TO), ("prefill", EXPECT)])
def test_a_role_does_its_half_alone(role: str, hint: dict[str, Any]) -> None:
    handing = hand_overs(Bridge(), role=role)
    assert handing.hints(SimpleNamespace(request_id="a", kv_transfer_params={"kvtier": hint})) == Hints()


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
def test_the_role_is_what_the_settings_say_or_else_vllm(
    settings: dict[str, Any], kv_role: str | None, role: str
) -> None:
    assert role_of(load_settings(settings), kv_role) == role
