"""The end of an answer: reported before chunks are offered, and the prompt's chunks are offered again."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvtier.bridge.protocol import Abandon, AnswerEnded, Lookup, Outcomes, Reserve, Reserved
from kvtier.catalog.endings import signature
from kvtier.integrations.vllm import saves
from kvtier.memory.keys import KEY_BYTES, join_keys, split_keys
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.rpc.client import UnixConnection
from tests.rigs.scripted_scheduling import BLOCKS, Engine, chunk_counts
from tests.rigs.scripted_server import ScriptedCache
from tests.rigs.stepping import BLOCK_TOKENS, CHUNK_TOKENS, Request, make_request
from tests.rigs.waiting import wait_until

CHUNKS = 4
PROMPT = CHUNKS * CHUNK_TOKENS + BLOCK_TOKENS + 5
"""What follows its last whole block is stored only while there is room."""
KEY = b"k" * 32
ANSWER = (11, 12, 13, 14)


@pytest.fixture(autouse=True)
def _key(engine: Engine) -> None:
    engine.change_welcome(signature_key=KEY)


def compute(engine: Engine, *, again: bool = True, **fields: Any) -> tuple[Request, list[Any]]:
    """Compute and store a prompt and begin its answer; return the request, and its keys."""
    request = make_request(PROMPT, **fields)
    look_up = engine.start(request)
    engine.step(PROMPT)
    engine.grant(again=again)
    request.all_token_ids = [*request.all_token_ids, *ANSWER]
    request.num_tokens = len(request.all_token_ids)
    engine.step(0)
    return request, split_keys(look_up.keys)


def end(engine: Engine, request: Request, status: RequestStatus = RequestStatus.FINISHED_STOPPED) -> bool:
    """End a request; return whether its blocks are kept."""
    engine.running.remove(request)
    request.status = status
    table = engine.tables[request.request_id][: -(-request.num_computed_tokens // BLOCK_TOKENS)]
    return engine.scheduler.finished(request, (table,))[0]


def ended(cache: ScriptedCache) -> list[AnswerEnded]:
    """Return the ends that have arrived."""
    cache.nothing_received()
    return cache.ended


@pytest.fixture
def other(engine: Engine) -> Request:
    """A request that goes on."""
    return engine.start_misses(1)[0]


def test_idle_engine_reports_an_end_at_once(engine: Engine, cache: ScriptedCache) -> None:
    request, keys = compute(engine)
    assert len(keys) == CHUNKS + 1
    end(engine, request)
    [last] = ended(cache)
    assert (last.prompt, last.signature) == (join_keys(keys[-2:]), signature(KEY, "stop", ANSWER[-3:]))
    assert 0 <= last.seconds < 1


@pytest.mark.usefixtures("other")
def test_end_is_reported_before_chunks_are_offered(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the policy knows of it when it judges them."""
    request, keys = compute(engine)
    sent: list[Any] = []
    monkeypatch.setattr(UnixConnection, "send", lambda _, message: sent.append(message))
    assert end(engine, request)
    assert not sent, "another request goes on, so there will be a step"
    engine.step(0)
    [outcomes, reserve] = sent
    assert isinstance(outcomes, Outcomes)
    assert [last.prompt for last in outcomes.ended] == [join_keys(keys[-2:])]
    assert reserve.runs[0].keys == join_keys(keys)


@pytest.mark.usefixtures("other")
def test_end_is_reported_before_the_next_lookup(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be that of the prompt that follows: the policy learns from the time between the two."""
    request, _ = compute(engine, again=False)
    sent: list[Any] = []
    monkeypatch.setattr(UnixConnection, "send", lambda _, message: sent.append(message))
    end(engine, request)
    assert not sent
    engine.scheduler.on_new_request(make_request(PROMPT, request_id="next"))
    assert [type(message) for message in sent[:2]] == [Outcomes, Lookup]
    assert sent[0].ended


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (RequestStatus.FINISHED_LENGTH_CAPPED, "length"),
        (RequestStatus.FINISHED_ABORTED, "abort"),
        (RequestStatus.FINISHED_ERROR, ""),
        (RequestStatus.FINISHED_IGNORED, ""),
    ],
)
@pytest.mark.parametrize("structured", [False, True])
def test_how_an_answer_has_ended(
    engine: Engine, cache: ScriptedCache, status: RequestStatus, how: str, *, structured: bool
) -> None:
    request, _ = compute(engine, structured_output_request=object() if structured else None)
    end(engine, request, status)
    expected = [signature(KEY, how + "+structured" * structured, ANSWER[-3:])] if how else []
    assert [last.signature for last in ended(cache)] == expected


def test_answer_that_has_not_begun_does_not_end(engine: Engine, cache: ScriptedCache) -> None:
    request = make_request(PROMPT)
    engine.start(request)
    engine.step(CHUNK_TOKENS)
    end(engine, request, RequestStatus.FINISHED_ABORTED)
    assert not ended(cache)


@pytest.mark.parametrize("hint", [{"cache": "read"}, {"cache": "write", "canary": {"id": "a"}}])
def test_some_requests_report_no_end(engine: Engine, cache: ScriptedCache, hint: dict[str, Any]) -> None:
    request = make_request(PROMPT, kv_transfer_params={"kvtier": hint})
    engine.scheduler.on_new_request(request)
    engine.admit(request)
    engine.step(PROMPT)
    end(engine, request)
    assert not ended(cache)


@pytest.mark.parametrize(
    ("answer", "stored"),
    [(3, 0), (BLOCK_TOKENS, 1), (CHUNK_TOKENS, 2), (CHUNK_TOKENS + BLOCK_TOKENS, 2)],
    ids=["less than a block", "a block", "two blocks", "three blocks"],
)
def test_end_is_that_of_what_is_stored(
    engine: Engine, cache: ScriptedCache, answer: int, stored: int
) -> None:
    """Of the answer, too, if it fills a block: its last token has no KV."""
    request, keys = compute(engine, again=False)
    asked, added = keys[-2:], list[bytes]()
    request.all_token_ids = [*request.all_token_ids[:PROMPT], *range(answer)]
    request.num_tokens = PROMPT + answer
    request.num_computed_tokens = PROMPT + answer - 1
    assert end(engine, request) == (stored > 0)
    if stored:
        engine.step(0)
        added = split_keys(cache.receive(Reserve).runs[0].keys)
        assert len(added) == stored
    [last] = ended(cache)
    assert last.prompt == join_keys(asked), "recordings and policies know the request by it"
    assert last.answer == join_keys(added)


def test_chunks_are_offered_again_and_stored_in_small_parts(
    engine: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "MAX_BACKLOG_CHUNKS", 2)
    engine.replace_scheduler()
    request, keys = compute(engine)
    assert end(engine, request)
    engine.step()
    reserve = cache.receive(Reserve)
    [run] = reserve.runs
    assert (run.keys, run.last_tokens, len(run.block_hashes) > 0) == (join_keys(keys), BLOCK_TOKENS + 5, True)
    engine.saves.clear()
    engine.counts()
    # The second chunk is held.
    cache.send(Reserved(reserve.ticket, [11, 0, 13, 14, 15], [0, 0, 4096, 8192, 12288], offer_again=True))
    engine.settle()
    table = engine.tables[request.request_id]
    engine.step()
    assert engine.saved() == [11, 13]
    assert [chunk.blocks for chunk in engine.saves[0].chunks] == [(table[:2],), (table[4:6],)]
    assert not engine.freed
    engine.step()
    assert engine.saved() == [11, 13, 14, 15]
    assert [chunk.tokens for chunk in engine.saves[-2].chunks] == [CHUNK_TOKENS, BLOCK_TOKENS + 5]
    assert engine.saves[-1].last
    assert engine.freed == {request.request_id}
    assert engine.counts() == {"stored_again_chunks": 4}


def test_chunks_that_are_held_or_declined_are_not_counted(engine: Engine, cache: ScriptedCache) -> None:
    request, _ = compute(engine)
    assert end(engine, request)
    engine.step()
    reserve = cache.receive(Reserve)
    engine.counts()
    cache.send(Reserved(reserve.ticket, [0] * (CHUNKS + 1), [0] * (CHUNKS + 1)))
    engine.settle()
    engine.step()
    assert engine.freed == {request.request_id}
    assert engine.counts() == {"stored_again_chunks": 0}
    later, _ = compute(engine, again=False)
    assert not end(engine, later), "nothing has left the tier any more: it is another process"
    assert cache.nothing_received()


@pytest.mark.parametrize("reason", ["not wanted", "aborted", "window", "hint", "blocks", "late"])
def test_chunks_are_not_offered_again(engine: Engine, cache: ScriptedCache, reason: str) -> None:
    fields: dict[str, Any] = {}
    if reason == "window":
        engine.replace_scheduler(
            ChunkLayout(CHUNK_TOKENS, (GroupLayout(BLOCK_TOKENS, (1024,), window=4096),))
        )
    if reason == "hint":
        expect = {"expect": {"tokens": PROMPT, "seconds": 0.001}}
        fields["kv_transfer_params"] = {"kvtier": expect}
    request, _ = compute(engine, again=reason != "not wanted", **fields)
    if reason == "blocks":
        engine.scheduler._saves._kept["other"] = BLOCKS // 4 - 5
    if reason == "late":  # Its blocks would be kept until the cache process answers.
        assert engine.bridge.await_reply(engine.bridge.reserve([]), 0.001) is None
        assert engine.bridge.late
        cache.receive(Reserve)
    aborted, stopped = RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED
    assert not end(engine, request, aborted if reason == "aborted" else stopped)
    engine.step()
    assert cache.nothing_received()


def test_prompt_is_offered_up_to_the_most_that_one_message_may_reserve(
    engine: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, keys = compute(engine)
    monkeypatch.setattr(saves, "MAX_RESERVED_CHUNKS", 6)
    assert end(engine, request)
    engine.step()
    reserve = cache.receive(Reserve)
    assert chunk_counts(reserve) == [2]
    assert reserve.runs[0].keys == join_keys(keys[:2])
    assert len(reserve.runs[0].keys) == 2 * KEY_BYTES
    assert reserve.runs[0].last_tokens == CHUNK_TOKENS


@pytest.mark.parametrize(
    ("cause", "granted"),
    [*product(["weights", "connection", "restart"], [False, True]), ("unresponsive", False)],
)
def test_nothing_is_kept_if_chunks_cannot_be_stored_again(
    engine: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch, cause: str, *, granted: bool
) -> None:
    monkeypatch.setattr(saves, "MAX_BACKLOG_CHUNKS", 1)
    engine.replace_scheduler()
    request, _ = compute(engine)
    assert end(engine, request)
    engine.step()
    reserve = cache.receive(Reserve)
    engine.saves.clear()
    if granted:
        engine.grant(reserve, first=11, again=True)
        engine.step()
        assert engine.saved() == [11]
    if cause == "weights":
        engine.scheduler.set_weight_version("2")
    elif cause == "unresponsive":
        wait_until(lambda: (engine.step(0), not engine.bridge.responsive)[1])
    else:
        engine.lose_connection()
        cache.epoch += cause == "restart"
    if cause == "weights" and not granted:
        engine.grant(reserve, first=11)
    engine.step(0)
    assert engine.freed == {request.request_id}
    assert not engine.scheduler._saves._pending()
    assert engine.saved() == ([11] if granted else [])
    if cause in ("connection", "restart"):
        engine.bridge.ready()
        cache.greet()
        wait_until(engine.bridge.ready)
    abandoned = list(range(12 if granted else 11, 11 + CHUNKS + 1))
    if cause == "restart" or (cause == "connection" and not granted):
        assert cache.nothing_received()
    elif cause == "unresponsive":
        engine.grant(reserve, first=11)
        engine.step(0)
        assert cache.receive(Abandon).leases == abandoned
    else:
        wait_until(lambda: not cache.nothing_received())
        leases = [message.leases for message in cache._received if isinstance(message, Abandon)]
        assert leases[-1:] == [abandoned]
