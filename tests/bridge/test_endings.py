"""What a cache process does with the ends of answers, and when it wants chunks again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from kvtier.bridge.protocol import AnswerEnded, Found, Lookup, Outcomes, Reserve, Run
from kvtier.bridge.session import EngineSession
from kvtier.catalog.endings import MAX_SIGNATURE
from kvtier.catalog.eviction import EvictionPolicy
from kvtier.events import AnswerEnd
from kvtier.memory.header import object_bytes
from kvtier.memory.keys import chunk_keys, join_keys
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.rpc.frames import Refused
from tests.rigs.engine_sessions import ROOT, engine_of
from tests.rigs.scripted_engine import KEYS, NAMESPACE, open_host

pytestmark = pytest.mark.anyio

CHUNK_TOKENS = 64
LAYOUT = ChunkLayout(CHUNK_TOKENS, (GroupLayout(16, (65_536,)),))
OBJECT_BYTES = object_bytes(LAYOUT.payload_bytes(CHUNK_TOKENS))
OTHERS = chunk_keys(ROOT, range(1 << 20, (1 << 20) + 4 * CHUNK_TOKENS), CHUNK_TOKENS)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The ends that are reported to eviction policies: the number of rows, the keys and the signature."""
    ends: list[tuple[Any, ...]] = []

    def ended(
        _: EvictionPolicy, rows: Sequence[int], keys: Sequence[bytes], now: float, signature: Sequence[int]
    ) -> None:
        ends.append((len(rows), list(keys), tuple(signature)))

    monkeypatch.setattr(EvictionPolicy, "answer_ended", ended)
    return ends


async def test_ends_are_reported_to_policies_and_recorded(reported: list[tuple[Any, ...]]) -> None:
    async with engine_of(LAYOUT, eviction="lru") as (engine, cache):
        recorded: list[tuple[Any, ...]] = []
        recorder: Any = SimpleNamespace(answer_ended=lambda *end: recorded.append(end))
        engine._recorder = recorder
        observed: list[AnswerEnd] = []
        cache.observe_answer_end = observed.append
        end = AnswerEnded(join_keys(KEYS[:2]), (1, (1 << 64) - 1), 2.0)
        engine.answer_ended(end)
        engine.answer_ended(AnswerEnded(KEYS[0], (), 1e9))
        engine.answer_ended(AnswerEnded(join_keys(KEYS[:2]), (7,), 0.0, join_keys(KEYS[2:4])))
        engine._recorder = cache.observe_answer_end = None
        now = time.monotonic()
        engine.answer_ended(end)
    assert [(last.key, last.signature) for last in observed] == [
        (KEYS[1], end.signature),
        (KEYS[0], ()),
        (KEYS[1], (7,)),
    ]
    assert [now - last.time for last in observed] == pytest.approx([2.0, 60.0, 0.0], abs=1.0)
    prompt = join_keys(KEYS[:2])
    assert recorded == [(prompt, end.signature, 2.0), (KEYS[0], (), 60.0), (prompt, (7,), 0.0)]
    assert reported == [
        (0, KEYS[:2], end.signature),
        (0, KEYS[:1], ()),
        (0, KEYS[:4], (7,)),
        (0, KEYS[:2], end.signature),
    ]


@pytest.mark.parametrize(
    "end",
    [
        AnswerEnded(b"", (), 0.0),
        AnswerEnded(KEYS[0][:-1], (), 0.0),
        AnswerEnded(join_keys(KEYS[:3]), (), 0.0),
        AnswerEnded(KEYS[0], (1,) * (MAX_SIGNATURE + 1), 0.0),
        AnswerEnded(KEYS[0], (-1,), 0.0),
        AnswerEnded(KEYS[0], (), -1.0),
        AnswerEnded(KEYS[0], (), float("nan")),
        AnswerEnded(KEYS[0], (), float("inf")),
        AnswerEnded(KEYS[0], (), 0.0, KEYS[1][:-1]),
        AnswerEnded(KEYS[0], (), 0.0, join_keys(KEYS[1:4])),
    ],
)
async def test_invalid_end_is_refused(tmp_path: Path, end: AnswerEnded) -> None:
    async with open_host(tmp_path) as host, host.peer("scheduler") as scheduler:
        await scheduler.send(Outcomes([], [end]))
        await scheduler.receive(Refused)


async def test_key_of_signatures_is_that_of_the_process_and_the_model(tmp_path: Path) -> None:
    """Replicas learn together. Equal tokens of two models are different endings."""
    async with open_host(tmp_path) as host:
        keys = []
        for engine, model in (("a", NAMESPACE), ("b", NAMESPACE), ("c", bytes(32))):
            async with host.peer() as peer:
                keys.append((await peer.greet(engine=engine, namespace=model)).signature_key)
        secret = host.server.signature_key
    assert keys[0] == keys[1] != keys[2]
    assert [len(key) for key in keys] == [32] * 3
    assert not {bytes(32), secret}.intersection(keys)


async def test_ended_answers_reach_the_engine_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[AnswerEnded] = []
    monkeypatch.setattr(EngineSession, "answer_ended", lambda _, end: ends.append(end))
    async with open_host(tmp_path) as host, host.peer("scheduler") as scheduler:
        await scheduler.send(Outcomes([], [AnswerEnded(KEYS[0], (5, 7), 0.25)]))
        await scheduler.status()
    assert ends == [AnswerEnded(KEYS[0], (5, 7), 0.25)]


def fail(*_: object) -> None:
    raise ZeroDivisionError("as a plugin's may")


async def test_policy_that_fails_at_a_lookup_fails_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed_policies: list[str]
) -> None:
    """It learns of it when that has been answered."""
    async with open_host(tmp_path) as host:
        monkeypatch.setattr(host.server.cache.catalog.policies[0], "missed", fail)
        async with host.peer("scheduler") as scheduler:
            for ticket in (1, 2):
                await scheduler.send(Lookup(ticket, join_keys(KEYS[:2]), 2 * CHUNK_TOKENS))
                assert (await scheduler.receive(Found)).ticket == ticket
                assert host.server.cache.catalog.policies
            await scheduler.status()
    assert failed_policies.pop()
    failed_policies.clear()


async def test_policy_that_fails_ends_only_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does if it fails at anything else that an engine asks for."""
    async with open_host(tmp_path) as host:
        with monkeypatch.context() as failing:
            failing.setattr(host.server.cache.catalog.policies[0], "answer_ended", fail)
            async with host.peer("scheduler") as scheduler:
                await scheduler.send(Outcomes([], [AnswerEnded(KEYS[0], (5, 7), 0.25)]))
                with pytest.raises(anyio.EndOfStream):
                    await scheduler.receive(Refused)
        async with host.peer("scheduler") as scheduler:
            await scheduler.status()


@pytest.mark.parametrize("eviction", ["resume", "lru"])
async def test_chunks_are_wanted_again_once_some_have_left(eviction: str) -> None:
    """Only by a policy that may decline: others store all that is new."""
    async with engine_of(LAYOUT, f"{10 * OBJECT_BYTES}B", eviction=eviction) as (engine, cache):
        again, lacks_room = [], []
        for prompt in range(4):
            keys = chunk_keys(ROOT, range(prompt << 10, (prompt << 10) + 4 * CHUNK_TOKENS), CHUNK_TOKENS)
            reserved = engine.reserve(Reserve(1, [Run(ROOT, join_keys(keys), CHUNK_TOKENS)]))
            engine.commit(reserved.granted, 0)
            again.append(reserved.offer_again)
            lacks_room.append(reserved.lacks_room)
        assert cache.counts["evicted"] + cache.counts["store_declined"] > 0
    assert lacks_room == [False, False, True, True]
    assert again == [False, False, eviction == "resume", eviction == "resume"]


async def test_chunks_that_are_offered_again_are_within_the_share(caplog: pytest.LogCaptureFixture) -> None:
    """Of the engine, together with new ones, which come first. What exceeds it is no loss to be reported."""
    async with engine_of(LAYOUT, f"{16 * OBJECT_BYTES}B", reserve_share=0.25) as (engine, cache):
        runs = [
            Run(ROOT, join_keys(KEYS[:6]), CHUNK_TOKENS, offered_again=True),
            Run(ROOT, join_keys(OTHERS[:3]), CHUNK_TOKENS),
        ]
        reserved = engine.reserve(Reserve(1, runs))
        assert [bool(lease) for lease in reserved.leases] == [True] + [False] * 5 + [True] * 3
        assert engine.writes.reserved_bytes == 4 * OBJECT_BYTES
        assert cache.counts["store_dropped"] == 0
        assert not caplog.records
        engine.writes.void_all()
