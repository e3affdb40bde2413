"""Scheduler side of the connector with a scripted cache process: batching, short waits, late answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvtier import Settings
from kvtier.bridge.protocol import (
    Abandon,
    Cancel,
    Clear,
    Cleared,
    Explained,
    Explanation,
    Found,
    Held,
    Lookup,
    Reserve,
    UseWeights,
    Watch,
)
from kvtier.catalog.misses import Miss, MissReason
from kvtier.integrations.vllm import early, lookups, saves
from kvtier.integrations.vllm import scheduler as scheduler_module
from kvtier.integrations.vllm.early import MAX_EARLY_STATES
from kvtier.integrations.vllm.loading import LOST
from kvtier.memory.keys import BLOCK_HASH_BYTES, KEY_BYTES, block_hashes, split_keys, state_key
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.rpc import client
from kvtier.rpc.client import MIN_POLL_INTERVAL_SECONDS, UnixConnection
from kvtier.tiers.throughput import MIN_SAMPLES
from tests.integrations.test_request import image
from tests.rigs import stepping
from tests.rigs.scripted_scheduling import Engine, chunk_counts
from tests.rigs.scripted_server import ScriptedCache
from tests.rigs.stepping import BLOCK_TOKENS, CHUNK_TOKENS, make_request
from tests.rigs.waiting import wait_until

REQUESTS = 64
TIMEOUT = Settings().prefetch.deadline + lookups.TIMEOUT_SECONDS
"""How long a lookup may make no progress."""


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The duration of every wait of a bridge, in seconds."""
    seconds: list[float] = []
    receive = UnixConnection.receive

    def recording_receive(self: UnixConnection[Any], wait: float = 0.0) -> Any:
        if wait > 0:
            seconds.append(wait)
        return receive(self, wait)

    monkeypatch.setattr(UnixConnection, "receive", recording_receive)
    return seconds


def limit_backlog(engine: Engine, monkeypatch: pytest.MonkeyPatch, chunks: int, **options: Any) -> None:
    """Let each step store so many chunks of earlier steps."""
    monkeypatch.setattr(saves, "MAX_BACKLOG_CHUNKS", chunks)
    engine.replace_scheduler(**options)


def test_all_chunks_of_a_step_are_reserved_in_one_message(engine: Engine, cache: ScriptedCache) -> None:
    requests = engine.start_misses(REQUESTS)
    engine.step()
    reserve = cache.receive(Reserve)
    assert cache.nothing_received()
    assert len(reserve.runs) == REQUESTS
    assert {run.last_tokens for run in reserve.runs} == {CHUNK_TOKENS}
    engine.grant(reserve)
    engine.step()
    assert len(cache.receive(Reserve).runs) == REQUESTS
    assert {job.request_id for job in engine.saves} == {request.request_id for request in requests}


def test_what_became_of_requests_is_reported_after_room_is_requested_in_one_message(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache process handles messages in order, and an answer may be waited for."""
    requests = [make_request(4 * CHUNK_TOKENS) for _ in range(3)]
    for request in requests:
        engine.start(request)
    sent: list[Any] = []
    monkeypatch.setattr(UnixConnection, "send", lambda _, message: sent.append(message))
    engine.step()
    [reserve, outcomes] = sent
    assert isinstance(reserve, Reserve)
    assert [outcome.request for outcome in outcomes.requests] == [request.request_id for request in requests]


def test_busy_engine_reports_what_became_of_requests_in_few_messages(
    engine: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "OUTCOMES_SECONDS", float("inf"))
    requests = [make_request(4 * CHUNK_TOKENS) for _ in range(3)]
    for request in requests:
        engine.start(request)
        engine.step(0)
    assert cache.nothing_received()
    assert cache.outcomes == []
    monkeypatch.setattr(scheduler_module, "OUTCOMES_SECONDS", 0)
    engine.step(0)
    assert cache.nothing_received()
    assert [outcome.request for outcome in cache.outcomes] == [request.request_id for request in requests]


def test_name_that_cannot_be_encoded_does_not_end_the_step(engine: Engine, cache: ScriptedCache) -> None:
    """A client may have chosen it. What is reported of it is sent by a hook of all requests."""
    request = make_request(4 * CHUNK_TOKENS, request_id="\ud800")
    engine.start(request)
    engine.step()
    cache.receive(Reserve)
    assert cache.nothing_received()
    assert [outcome.request for outcome in cache.outcomes] == ["?"]


def test_request_of_one_step_is_logged_at_its_end(
    engine: Engine, cache: ScriptedCache, caplog: pytest.LogCaptureFixture
) -> None:
    """An idle engine takes no further step in which an explanation would be read."""
    caplog.set_level("INFO", "vllm.kvtier")
    request = make_request(CHUNK_TOKENS)
    look_up = engine.start(request)
    engine.step()
    assert not caplog.messages
    misses = [Miss(MissReason.NEVER_STORED, CHUNK_TOKENS)]
    cache.send(Explained([Explanation(look_up.ticket, 0, misses)]))
    time.sleep(MIN_POLL_INTERVAL_SECONDS)
    engine.finish(request)
    [line] = caplog.messages
    assert line.endswith(f"missed: {CHUNK_TOKENS} never_stored")


def test_explanation_that_arrived_before_the_connection_was_lost_counts(
    engine: Engine, cache: ScriptedCache, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm.kvtier")
    look_up = engine.start(make_request(CHUNK_TOKENS))
    engine.step()
    cache.send(Explained([Explanation(look_up.ticket, 0, [Miss(MissReason.NEVER_STORED, CHUNK_TOKENS)])]))
    engine.lose_connection()
    engine.step()
    [line] = [message for message in caplog.messages if message.startswith("request")]
    assert line.endswith(f"missed: {CHUNK_TOKENS} never_stored")


def test_step_waits_once_and_for_at_most_two_milliseconds(engine: Engine, waits: list[float]) -> None:
    engine.start_misses(REQUESTS)
    for _ in range(8):
        engine.arrive(make_request(4 * CHUNK_TOKENS))
    waits.clear()
    before = engine.bridge.waited
    engine.step()
    assert waits
    assert sum(waits) < 1.01 * scheduler_module.LOOKUP_WAIT_SECONDS
    assert engine.bridge.late
    count = len(waits)
    engine.step()
    engine.step()
    assert len(waits) == count, "no further wait after one missed answer"
    assert engine.bridge.waited - before < 1.0


def test_lookups_and_reservations_share_one_wait_budget(
    engine: Engine, cache: ScriptedCache, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages keep the cache process from counting as late, but the wait budget of the step still ends."""
    engine.start_misses(2)
    receive = UnixConnection.receive
    tickets = iter(range(10**6, 10**7))

    def receive_with_message(connection: UnixConnection[Any], wait: float = 0.0) -> Any:
        if wait > 0:
            cache.send(Found(next(tickets), [], [], [], 0))
        return receive(connection, wait)

    monkeypatch.setattr(UnixConnection, "receive", receive_with_message)
    for _ in range(9):
        engine.arrive(make_request(4 * CHUNK_TOKENS))
    *requests, last = engine.waiting
    before = engine.bridge.waited
    for request in requests:
        engine.scheduler.matched_tokens(request, 0)
    count = len(waits)
    engine.scheduler.matched_tokens(last, 0)
    assert len(waits) == count, "the budget is used up"
    assert engine.bridge.waited > before
    assert not engine.bridge.late
    assert max(waits) < 1.01 * scheduler_module.LOOKUP_WAIT_SECONDS


def test_late_cache_process_is_sent_nothing_and_chunks_are_stored_later(
    engine: Engine, cache: ScriptedCache
) -> None:
    engine.start_misses(REQUESTS)
    engine.step()
    reserve = cache.receive(Reserve)
    engine.step()
    engine.step()
    assert cache.nothing_received()
    engine.grant(reserve)
    engine.step()
    second = cache.receive(Reserve)
    assert chunk_counts(second) == [3] * REQUESTS, "no chunk is lost"
    assert [run.parent for run in second.runs] == [run.keys for run in reserve.runs]


def test_backlog_after_outage_is_stored_in_small_parts(
    engine: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storing the whole backlog at once would make one long step."""
    limit_backlog(engine, monkeypatch, 10)
    engine.start_misses(REQUESTS)
    engine.step()
    reserve = cache.receive(Reserve)
    for _ in range(4):
        engine.step()
    engine.grant(reserve)
    engine.step()
    catch_up = cache.receive(Reserve)
    assert sum(chunk_counts(catch_up)) == REQUESTS + 10
    engine.grant(catch_up, first=1000)
    engine.step()
    assert sum(chunk_counts(cache.receive(Reserve))) == REQUESTS + 10


def test_backlog_of_one_request_does_not_displace_others(
    engine: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_backlog(engine, monkeypatch, 1)
    lagging, _ = engine.start_misses(2)
    lagging.num_computed_tokens = 8 * CHUNK_TOKENS  # As after a long hit in vLLM's prefix cache.
    engine.step()
    assert chunk_counts(cache.receive(Reserve)) == [2, 1]


def test_everything_computed_in_the_last_step_is_stored(
    engine: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the step could not reserve."""
    limit_backlog(engine, monkeypatch, 1)
    (request,) = engine.start_misses(1)
    engine.bridge.reserve([])
    unanswered = cache.receive(Reserve)
    engine.step(6 * CHUNK_TOKENS)
    assert cache.nothing_received()
    request.num_tokens = 6 * CHUNK_TOKENS + 1
    assert engine.finish(request)
    engine.grant(unanswered)
    engine.step(0)
    assert chunk_counts(cache.receive(Reserve)) == [6]


def know(request: Any, tokens: int) -> None:
    """Let a request have ``tokens`` tokens, the first of those that it was made with."""
    request.prompt_token_ids = request.prompt_token_ids or request.all_token_ids
    request.all_token_ids, request.num_tokens = request.prompt_token_ids[:tokens], tokens


def test_drafts_are_never_stored(engine: Engine, cache: ScriptedCache) -> None:
    """The step computes three drafts after the last known token. Two of them would complete a chunk."""
    (request,) = engine.start_misses(1)
    know(request, 2 * CHUNK_TOKENS - 2)
    request.num_computed_tokens = 2 * CHUNK_TOKENS - 3
    engine.step(1 + 3)
    assert chunk_counts(cache.receive(Reserve)) == [1]
    request.num_computed_tokens -= 3  # All of them are rejected, and the request ends.
    know(request, 2 * CHUNK_TOKENS - 1)
    engine.finish(request)
    engine.step(0)
    assert cache.nothing_received()


@pytest.mark.parametrize("lookahead", [1, 3])
def test_chunk_waits_for_the_tokens_that_its_drafts_read_ahead(
    engine: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch, lookahead: int
) -> None:
    """It is not backlog then: a step stores any number of such chunks."""
    limit_backlog(engine, monkeypatch, 0, lookahead=lookahead)
    (request,) = engine.start_misses(1)
    know(request, 6 * CHUNK_TOKENS)
    engine.step(6 * CHUNK_TOKENS)
    first = cache.receive(Reserve)
    assert chunk_counts(first) == [5]
    know(request, 6 * CHUNK_TOKENS + lookahead)
    engine.grant(first)
    engine.step(1)
    assert chunk_counts(cache.receive(Reserve)) == [1]


def test_lookup_covers_chunks_with_known_lookahead(engine: Engine) -> None:
    engine.replace_scheduler(lookahead=1)
    assert engine.ask(make_request(4 * CHUNK_TOKENS)).tokens == 3 * CHUNK_TOKENS
    assert engine.ask(make_request(4 * CHUNK_TOKENS + 1)).tokens == 4 * CHUNK_TOKENS + 1


def test_prompt_is_stored_and_hit_up_to_its_end_while_there_is_room(
    engine: Engine, cache: ScriptedCache
) -> None:
    prompt = make_request(4 * CHUNK_TOKENS + BLOCK_TOKENS + 5)
    again = make_request(prompt.num_tokens, all_token_ids=prompt.all_token_ids)
    look_up = engine.start(prompt)
    engine.step(prompt.num_tokens)
    reserve = cache.receive(Reserve)
    assert (chunk_counts(reserve), reserve.runs[0].last_tokens) == ([5], BLOCK_TOKENS + 5)
    assert reserve.runs[0].keys == look_up.keys
    engine.grant(reserve, again=True)
    assert engine.bridge.lacks_room
    assert engine.ask(again).tokens == 4 * CHUNK_TOKENS + BLOCK_TOKENS


@pytest.mark.parametrize("blocks", [1, 0])
def test_rest_of_a_prompt_is_not_stored_if_all_its_blocks_are_held(
    engine: Engine, cache: ScriptedCache, blocks: int
) -> None:
    """In a chunk of another prompt, which begins like it. Without a whole block, nothing of the rest is."""
    held = CHUNK_TOKENS + blocks * BLOCK_TOKENS
    prompt = make_request(held + 5)
    look_up = engine.ask(prompt)
    hashes = block_hashes(prompt.all_token_ids[CHUNK_TOKENS:held], BLOCK_TOKENS) + bytes(BLOCK_HASH_BYTES)
    like = {"last_tokens": CHUNK_TOKENS, "block_hashes": hashes, "parent": split_keys(look_up.keys)[0]}
    leases = [1, 2] if blocks else [1]
    zeros = [0] * len(leases)
    cache.send(Found(look_up.ticket, leases, zeros, zeros, 0, **(like if blocks else {})))
    engine.wait_for_hit(prompt, held)
    engine.admit(prompt)
    engine.scheduler.allocated(prompt, engine.blocks(engine.tables[prompt.request_id]), held)
    prompt.num_computed_tokens = held
    engine.step(5)
    if blocks:
        assert cache.nothing_received()
    else:
        assert cache.receive(Reserve).runs[0].last_tokens == 5


def test_canary_asks_for_all_of_its_prompt_whatever_room_there_is(engine: Engine) -> None:
    """It reports how much of it is a hit, and is removed soon."""
    engine.bridge.lacks_room = True
    tokens = 4 * CHUNK_TOKENS + BLOCK_TOKENS + 5
    hint = {"kvtier": {"cache": "both", "canary": {"id": "a"}}}
    assert engine.ask(make_request(tokens, kv_transfer_params=hint)).tokens == tokens


def room_is_short(engine: Engine, cache: ScriptedCache) -> None:
    """Let the answer to an earlier request have the flag for it."""
    earlier = make_request(CHUNK_TOKENS)
    engine.start(earlier)
    engine.step(CHUNK_TOKENS)
    engine.grant(cache.receive(Reserve), again=True)
    engine.running.remove(earlier)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_prompt_is_stored_and_hit_up_to_its_last_whole_block_if_room_is_short(
    engine: Engine, cache: ScriptedCache, lookahead: int
) -> None:
    """What follows would take the room of a block, and the next turn of a chat cannot begin there."""
    engine.replace_scheduler(lookahead=lookahead)
    engine.bridge.lacks_room = lookahead < 2  # Beyond that, there is no key of the end.
    prompt = 4 * CHUNK_TOKENS + BLOCK_TOKENS + 5
    first = make_request(prompt + lookahead, num_prompt_tokens=prompt)
    again = make_request(prompt, all_token_ids=first.all_token_ids[:prompt])
    know(first, prompt)
    look_up = engine.start(first)
    engine.step(prompt)
    reserve = cache.receive(Reserve)
    runs = list(reserve.runs)
    if lookahead:  # The KV of the tail is final once so many tokens of the answer are known.
        engine.grant(reserve, again=lookahead < 2)
        know(first, prompt + lookahead)
        engine.step(lookahead)
        runs += cache.receive(Reserve).runs
    assert b"".join(run.keys for run in runs) == look_up.keys
    assert runs[-1].last_tokens == BLOCK_TOKENS

    look_up = engine.ask(again)
    assert (len(look_up.keys), look_up.tokens) == (5 * KEY_BYTES, 4 * CHUNK_TOKENS + BLOCK_TOKENS)
    assert look_up.keys == b"".join(run.keys for run in runs)
    engine.answer(look_up, 11, 12, 13, 14, 15)
    engine.wait_for_hit(again, look_up.tokens)


@pytest.mark.parametrize("lookahead", [2, 20])
def test_prompt_without_a_chunk_up_to_its_end_ends_with_a_block(engine: Engine, lookahead: int) -> None:
    """The prompt is expected from a prefill instance, but its KV would depend on the answer."""
    engine.replace_scheduler(lookahead=lookahead)
    tokens = 4 * CHUNK_TOKENS + BLOCK_TOKENS + 5
    hint = {"expect": {"tokens": tokens, "seconds": 1.0}}
    prompt = make_request(tokens, kv_transfer_params={"kvtier": hint})
    chunks = (tokens - lookahead) // CHUNK_TOKENS
    last = BLOCK_TOKENS if chunks == 4 else 0
    assert engine.ask(prompt).tokens == chunks * CHUNK_TOKENS + last


def test_prompt_that_ends_within_a_block_of_its_last_chunk_has_no_tail_if_room_is_short(
    engine: Engine, cache: ScriptedCache
) -> None:
    room_is_short(engine, cache)
    prompt = make_request(4 * CHUNK_TOKENS + BLOCK_TOKENS - 1)
    assert engine.start(prompt).tokens == 4 * CHUNK_TOKENS
    engine.step(prompt.num_tokens)
    assert chunk_counts(cache.receive(Reserve)) == [4]


def test_late_answer_is_used_while_the_request_holds_its_blocks(engine: Engine, cache: ScriptedCache) -> None:
    kept, preempted, aborted, freed = engine.start_misses(4)
    table = engine.table

    def table_without_freed(request: Any) -> tuple[list[int], ...]:
        return ([0] * 8,) if request is freed else table(request)

    engine.table = table_without_freed  # type: ignore[method-assign]
    engine.step()
    reserve = cache.receive(Reserve)
    preempted.num_preemptions = 1
    aborted.status = RequestStatus.FINISHED_ABORTED
    engine.running.remove(aborted)
    assert engine.scheduler.finished(aborted, table(aborted))[0], (
        "otherwise an idle engine takes no further step"
    )
    engine.grant(reserve)
    engine.step()
    job, last = engine.saves
    assert (last.request_id, last.leases, last.last) == (aborted.request_id, [], True)
    assert (job.request_id, job.leases, job.last) == (kept.request_id, [1], False)
    assert job.chunks[0].blocks == ([1, 2],)
    assert sorted(cache.receive(Abandon).leases) == [2, 3, 4]
    cache.receive(Reserve)


def test_step_does_not_wait_for_room(engine: Engine, cache: ScriptedCache, waits: list[float]) -> None:
    """The next step is soon enough for chunks whose blocks the request keeps."""
    engine.start_misses(1)
    waits.clear()
    engine.step()
    assert waits == []
    engine.grant()
    engine.step(1)
    assert waits == []
    assert [job.leases for job in engine.saves] == [[1]]


def test_chunk_of_preempted_request_is_stored_when_computed_again(
    engine: Engine, cache: ScriptedCache
) -> None:
    (request,) = engine.start_misses(1)
    engine.step()
    first = cache.receive(Reserve)
    request.num_preemptions, request.num_computed_tokens = 1, 0
    engine.grant(first)
    engine.step(0)
    assert cache.receive(Abandon).leases == [1]
    engine.step()
    assert [run.keys for run in cache.receive(Reserve).runs] == [run.keys for run in first.runs]


def test_unscheduled_request_keeps_its_reservation(engine: Engine, cache: ScriptedCache) -> None:
    (request,) = engine.start_misses(1)
    engine.step()
    engine.grant()
    engine.running.remove(request)
    engine.step()
    assert not engine.saves
    engine.running.append(request)
    engine.step(0)
    assert [job.leases for job in engine.saves] == [[1]]
    assert cache.nothing_received()


def test_blocks_of_finished_request_are_kept_until_its_answer_arrives(
    engine: Engine, cache: ScriptedCache
) -> None:
    (request,) = engine.start_misses(1)
    engine.step()
    reserve = cache.receive(Reserve)
    assert engine.finish(request)
    engine.step()
    assert not engine.freed
    engine.grant(reserve)
    engine.step()
    assert [(job.leases, job.last) for job in engine.saves] == [([1], False), ([], True)]
    assert engine.freed == {request.request_id}


def test_prompt_without_an_answer_is_stored_to_its_end(engine: Engine, cache: ScriptedCache) -> None:
    """It was pooled: there is no token without KV."""
    (request,) = engine.start_misses(1, CHUNK_TOKENS)
    engine.step()
    reserve = cache.receive(Reserve)
    assert engine.finish(request)
    engine.grant(reserve)
    engine.step()
    assert [(job.leases, job.last) for job in engine.saves] == [([1], False), ([], True)]


def test_blocks_are_not_kept_for_unresponsive_cache_process(engine: Engine, cache: ScriptedCache) -> None:
    (request, late) = engine.start_misses(2)
    engine.step()
    reserve = cache.receive(Reserve)
    assert engine.finish(request)
    wait_until(lambda: (engine.step(0), not engine.bridge.responsive)[1])
    assert engine.freed == {request.request_id}
    assert not engine.finish(late), "it is known to be unresponsive"
    engine.grant(reserve)
    engine.step()
    assert cache.receive(Abandon) == Abandon([1, 2])


def test_lookups_end_when_cache_process_becomes_unresponsive(engine: Engine, cache: ScriptedCache) -> None:
    engine.arrive(make_request(4 * CHUNK_TOKENS))
    engine.step()
    assert len(engine.waiting) == 1
    wait_until(lambda: (engine.step(), not engine.waiting)[1])
    assert not engine.bridge.responsive
    look_up = cache.receive(Lookup)
    engine.arrive(make_request(4 * CHUNK_TOKENS))
    engine.step()
    assert not engine.waiting, "later requests do not wait"
    engine.answer(look_up)
    wait_until(lambda: (engine.step(), engine.bridge.responsive)[1])
    engine.arrive(make_request(4 * CHUNK_TOKENS))
    engine.step()
    assert engine.waiting


def test_request_waits_while_its_chunks_arrive(
    engine: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(4 * CHUNK_TOKENS)
    ticket = engine.ask(request).ticket
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for remaining in (4, 3, 2, 1):
        cache.send(Found(ticket, [], [], [], remaining))
        wait_until(lambda remaining=remaining: engine.known(ticket).found.fetching == remaining)
        clock[0] += 0.9 * TIMEOUT
        assert engine.scheduler.matched_tokens(request, 0) == (None, False)
    clock[0] += 0.2 * TIMEOUT
    assert engine.scheduler.matched_tokens(request, 0) == (0, False), "no chunk arrived within the timeout"


def test_lost_connection_discards_granted_leases(engine: Engine, cache: ScriptedCache) -> None:
    """Lease numbers of one process are meaningless to its successor."""
    (request,) = engine.start_misses(1)
    engine.step()
    engine.grant()
    engine.running.remove(request)
    engine.lose_connection()
    cache.epoch = 8
    engine.bridge.ready()
    cache.greet()
    wait_until(engine.bridge.ready)
    request.num_preemptions = 1
    engine.running.append(request)
    engine.step(0)
    assert not engine.saves
    assert cache.nothing_received()


def test_request_waits_while_a_restarted_cache_process_is_connected(
    engine: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one of an engine that was idle meanwhile is a hit, if there is a welcome in time."""
    monkeypatch.setattr(lookups, "CONNECT_SECONDS", 60.0)
    engine.lose_connection()
    hit, late = (make_request(4 * CHUNK_TOKENS) for _ in range(2))
    for request in (hit, late):
        engine.scheduler.on_new_request(request)
        assert engine.scheduler.matched_tokens(request, 0) == lookups.ASK_AGAIN
    unread = make_request(4 * CHUNK_TOKENS)
    unread.skip_reading_prefix_cache = True
    engine.scheduler.on_new_request(unread)
    assert engine.scheduler.matched_tokens(unread, 0) == lookups.NOTHING, "it has nothing to wait for"
    monkeypatch.setattr(lookups, "CONNECT_SECONDS", 0.0)
    assert engine.scheduler.matched_tokens(late, 0) == lookups.NOTHING, "no longer than that"
    cache.greet()
    wait_until(engine.bridge.ready)
    assert engine.scheduler.matched_tokens(hit, 0) == lookups.ASK_AGAIN
    engine.answer(cache.receive(Lookup), 1)
    engine.wait_for_hit(hit, CHUNK_TOKENS)


def test_reset_waits_for_a_second_at_most_and_not_at_all_if_unresponsive(
    engine: Engine, cache: ScriptedCache, waits: list[float]
) -> None:
    engine.start_misses(1)
    engine.scheduler.reset()
    assert max(waits) < 1.01 * scheduler_module.CLEAR_SECONDS
    assert sum(waits) < 10 * scheduler_module.CLEAR_SECONDS
    clear = cache.receive(Clear)
    wait_until(lambda: (engine.step(0), not engine.bridge.responsive)[1])
    waits.clear()
    engine.scheduler.reset()
    assert not waits
    cache.send(Cleared(clear.ticket, 5))
    wait_until(lambda: (engine.step(0), engine.bridge.responsive)[1])


def test_fewer_tokens_than_were_found(engine: Engine) -> None:
    """Another part of the engine has fewer: the rest is neither loaded nor counted."""
    request = make_request(4 * CHUNK_TOKENS)
    engine.find(request, 1, 2, 3, 4)
    engine.scheduler.allocated(request, engine.blocks([0] * 64), 2 * CHUNK_TOKENS)
    engine.step()
    [load] = engine.loads
    assert load.leases == [1, 2]
    assert engine.scheduler.hits_by_medium(request) == {"cpu": 2 * CHUNK_TOKENS}


def test_later_lookups_of_a_request_are_marked(engine: Engine, cache: ScriptedCache) -> None:
    """A recording counts each request once: a preempted one is looked up again."""
    request = make_request(2 * CHUNK_TOKENS)
    first = engine.find(request)
    engine.scheduler.allocated(request, engine.blocks([]), 0)
    request.num_preemptions = 1
    engine.scheduler.matched_tokens(request, 0)
    again = cache.receive(Lookup)
    assert (first.keys, first.repeated, again.repeated) == (again.keys, False, True)


def test_queued_requests_ask_again(
    engine: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they were queued, the turns before them were computed and stored."""
    requests = [make_request(4 * CHUNK_TOKENS + 1) for _ in range(lookups.RENEWED + 1)]
    first = [engine.find(request, 1) for request in requests]
    monkeypatch.setattr(lookups, "RENEW_SECONDS", 1000.0)
    engine.step()
    assert cache.nothing_received(), "the answers are new"
    monkeypatch.setattr(lookups, "RENEW_SECONDS", 0.0)
    engine.step()
    again = [cache.receive(Lookup) for _ in range(lookups.RENEWED)]
    assert [(each.keys, each.renews) for each in again] == [(each.keys, each.ticket) for each in first[:-1]]
    assert all(each.repeated for each in again)
    engine.step()
    assert cache.nothing_received(), "the head of the queue waits for its answers"
    found = engine.scheduler.matched_tokens(requests[0], 0)
    assert found == (CHUNK_TOKENS, True), "until then, a request has what it has found before"
    engine.answer(again[0], 2, 3, 4)
    engine.wait_for_hit(requests[0], 3 * CHUNK_TOKENS)
    assert cache.receive(Cancel).ticket == first[0].ticket
    engine.scheduler.allocated(requests[0], engine.blocks(list(range(1, 65))), 3 * CHUNK_TOKENS)
    engine.step()
    [load] = engine.loads
    assert load.leases == [2, 3, 4]
    assert cache.receive(Lookup).renews == first[-1].ticket, "it has moved up"


@pytest.fixture
def asks_again(
    engine: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, Lookup]]:
    """Let a request arrive, whose first chunks are found; return it, and its second lookup."""

    def ask_again(*leases: int) -> tuple[Any, Lookup]:
        request = make_request(4 * CHUNK_TOKENS + 1)
        engine.find(request, *leases)
        monkeypatch.setattr(lookups, "RENEW_SECONDS", 0.0)
        engine.step()
        return request, cache.receive(Lookup)

    return ask_again


def test_request_that_is_scheduled_drops_its_second_lookup(
    engine: Engine, cache: ScriptedCache, asks_again: Callable[..., tuple[Any, Lookup]]
) -> None:
    request, again = asks_again(1)
    engine.scheduler.allocated(request, engine.blocks(list(range(1, 65))), CHUNK_TOKENS)
    engine.step()
    [load] = engine.loads
    assert load.leases == [1]
    assert cache.receive(Cancel).ticket == again.ticket


def test_worse_second_answer_is_not_used(
    engine: Engine,
    cache: ScriptedCache,
    asks_again: Callable[..., tuple[Any, Lookup]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request, again = asks_again(1, 2)
    engine.answer(again, 3)
    wait_until(lambda: engine.known(again.ticket).final)
    monkeypatch.setattr(lookups, "RENEW_SECONDS", 1000.0)
    assert engine.scheduler.matched_tokens(request, 0) == (2 * CHUNK_TOKENS, True)
    assert cache.receive(Cancel).ticket == again.ticket


def test_request_whose_prompt_is_hit_does_not_ask_again(
    engine: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(2 * CHUNK_TOKENS + 1)
    engine.find(request, 1, 2)
    monkeypatch.setattr(lookups, "RENEW_SECONDS", 0.0)
    engine.step()
    assert cache.nothing_received()


def test_load_that_lost_its_cache_process_fails(engine: Engine) -> None:
    """The engine waits for a load that it was promised: the workers report it, as failed."""
    request = make_request(2 * CHUNK_TOKENS)
    engine.find(request, 1, 2)
    engine.lose_connection()
    engine.scheduler.allocated(request, engine.blocks([0] * 64), 2 * CHUNK_TOKENS)
    engine.step()
    [load] = engine.loads
    assert (load.request_id, load.failure, load.chunks) == (request.request_id, LOST, [])


def finish_load(engine: Engine, request: Any, *, failed: bool = False) -> None:
    """Report a load as the workers do."""
    done = {request.request_id}
    failures = done if failed else set()
    output = KVConnectorOutput(finished_recving=done, failed_recving=failures)
    engine.scheduler.update_from_output(output)


class Streamed:
    """A request of four chunks, whose first one is in memory."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.request = make_request(4 * CHUNK_TOKENS)
        self.look_up = engine.ask(self.request)

    def find(self, leases: list[int], fetching: int, **more: Any) -> None:
        """Receive an answer to the lookup; the other chunks of it are in flight from the disk."""
        ticket, engine = self.look_up.ticket, self.engine
        known = len(engine.known(ticket).leases) + len(leases)
        more = {"pending_sources": [(1, fetching)] if fetching else [], **more}
        offsets = [4096 * lease for lease in leases]
        engine.cache.send(Found(ticket, leases, offsets, [0] * len(leases), fetching, **more))
        wait_until(
            lambda: (
                (len(engine.known(ticket).leases), engine.known(ticket).found.fetching) == (known, fetching)
            )
        )

    def matched(self, local: int = 0) -> tuple[int | None, bool]:
        return self.engine.scheduler.matched_tokens(self.request, local)

    def begin(self, tokens: int = 4 * CHUNK_TOKENS) -> None:
        """Let vLLM allocate the blocks of a hit."""
        assert self.matched() == (tokens, True)
        self.allocate(tokens)

    def allocate(self, tokens: int) -> None:
        self.engine.scheduler.allocated(self.request, self.engine.blocks(list(range(1, 65))), tokens)

    def step(self) -> list[tuple[list[int], bool]]:
        """Run a step, and return the jobs that the workers receive: their leases, and if more follow."""
        self.engine.loads.clear()
        self.engine.step()
        return [(job.leases, job.more) for job in self.engine.loads]

    def failure(self) -> str:
        """Return why the only job of the last step is to fail."""
        (job,) = self.engine.loads
        return job.failure

    def finish(self, *, failed: bool = False) -> None:
        """Report the load as the workers do."""
        finish_load(self.engine, self.request, failed=failed)

    def is_released(self) -> bool:
        """Wait for the next message: whether it releases what was found."""
        return self.engine.cache.receive(Cancel).ticket == self.look_up.ticket


@pytest.fixture
def streamed(engine: Engine) -> Streamed:
    return Streamed(engine)


def test_chunks_are_loaded_as_they_arrive(streamed: Streamed, cache: ScriptedCache) -> None:
    streamed.find([1], 3)
    streamed.begin()
    assert streamed.step() == [([1], True)]
    assert streamed.step() == []
    streamed.find([2, 3], 1)
    assert streamed.step() == [([2, 3], True)]
    streamed.find([4], 0)
    assert streamed.step() == [([4], False)]
    assert streamed.step() == []
    assert cache.nothing_received(), "the leases are held until the workers have reported the load"
    streamed.finish()
    assert streamed.is_released()


def test_blocks_of_each_job_are_those_of_its_chunks(streamed: Streamed) -> None:
    streamed.find([1], 3)
    streamed.begin()
    streamed.step()
    streamed.find([2, 3, 4], 0)
    streamed.step()
    assert [(copy.offset, copy.blocks) for copy in streamed.engine.loads[0].chunks] == [
        (4096 * index, ([2 * index - 1, 2 * index],)) for index in (2, 3, 4)
    ]


@pytest.mark.parametrize(
    ("leases", "pending_sources"), [([], [(1, 4)]), ([1], [(1, 2)])], ids=["nothing arrived", "not located"]
)
def test_load_does_not_begin(
    streamed: Streamed, leases: list[int], pending_sources: list[tuple[int, int]]
) -> None:
    """Before a chunk can be copied, or before it is known how many are held."""
    streamed.find(leases, 4 - len(leases), pending_sources=pending_sources)
    assert streamed.matched() == (None, False)
    streamed.find([2], 2)
    assert streamed.matched() == ((len(leases) + 3) * CHUNK_TOKENS, True)


def test_load_does_not_begin_while_vllm_has_all_that_has_arrived(streamed: Streamed) -> None:
    streamed.find([1], 3)
    assert streamed.matched(CHUNK_TOKENS) == (None, False)
    streamed.find([2], 2)
    assert streamed.matched(CHUNK_TOKENS) == (3 * CHUNK_TOKENS, True)


def test_missing_chunk_costs_only_the_rest(streamed: Streamed, cache: ScriptedCache) -> None:
    """The load fails, and what has arrived is loaded again, without another lookup."""
    streamed.find([1, 2], 2)
    streamed.begin()
    assert streamed.step() == [([1, 2], True)]
    streamed.find([3], 0)
    assert streamed.step() == [([], False)]
    assert streamed.failure() == "only 96 of 128 tokens have arrived"
    streamed.finish(failed=True)
    streamed.begin(3 * CHUNK_TOKENS)
    assert streamed.step() == [([1, 2, 3], False)]
    assert cache.nothing_received()
    streamed.finish(failed=True)
    assert streamed.is_released()
    assert streamed.matched() == (0, False), "another failure is not retried"


def test_chunk_that_is_lost_before_the_allocation_fails_the_load(
    streamed: Streamed, cache: ScriptedCache
) -> None:
    """vLLM takes what was reported for computed, unless the load fails."""
    streamed.find([1, 2], 2)
    assert streamed.matched() == (4 * CHUNK_TOKENS, True)
    streamed.find([], 0)
    streamed.allocate(4 * CHUNK_TOKENS)
    assert streamed.step() == [([], False)]
    assert streamed.failure() == "only 64 of 128 tokens have arrived"
    streamed.finish(failed=True)
    streamed.begin(2 * CHUNK_TOKENS)
    assert streamed.step() == [([1, 2], False)]
    assert cache.nothing_received()
    streamed.finish()
    counts = streamed.engine.counts()
    assert counts["hit_tokens/ram"] == 2 * CHUNK_TOKENS, "of the load that has succeeded"
    assert "failed_loads" not in counts, "nothing that was found is computed"


def test_cancelled_request_stops_its_load(streamed: Streamed, cache: ScriptedCache) -> None:
    """vLLM frees its blocks once the workers have reported the load, and until then copies may run."""
    streamed.find([1], 3)
    streamed.begin()
    streamed.step()
    streamed.find([2], 2)
    streamed.request.status = RequestStatus.FINISHED_ABORTED
    streamed.engine.scheduler.finished(streamed.request, ([],))
    assert streamed.step() == [([], False)]
    assert not streamed.failure()
    assert cache.nothing_received()
    streamed.finish()
    assert streamed.is_released()
    assert streamed.step() == []


def test_connection_lost_during_a_load(streamed: Streamed) -> None:
    streamed.find([1], 3)
    streamed.begin()
    streamed.step()
    streamed.engine.lose_connection()
    assert streamed.step() == [([], False)]
    assert streamed.failure() == LOST
    streamed.finish(failed=True)
    assert streamed.matched() == (0, False)


def test_stalled_load_fails(streamed: Streamed, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed.find([1], 3)
    streamed.begin()
    streamed.step()
    clock = [time.monotonic() + 0.9 * TIMEOUT]
    monkeypatch.setattr(lookups.time, "monotonic", lambda: clock[0])
    assert streamed.step() == []
    clock[0] += 0.2 * TIMEOUT
    assert streamed.step() == [([], False)]
    streamed.finish(failed=True)
    assert streamed.is_released()


@pytest.mark.parametrize("allocated", ["before", "after"])
@pytest.mark.parametrize("equal", [2, 1, 0])
def test_chunk_that_only_begins_like_the_prompt_is_compared_before_it_is_loaded(
    streamed: Streamed, equal: int, allocated: str
) -> None:
    """Until it has arrived, only one byte of each of its block hashes is known.

    If more blocks of it are equal than was reported, vLLM has allocated none for those.
    """
    hashes = block_hashes(streamed.request.all_token_ids[CHUNK_TOKENS : 2 * CHUNK_TOKENS], BLOCK_TOKENS)
    hashes = hashes[: equal * BLOCK_HASH_BYTES] + bytes(len(hashes) - equal * BLOCK_HASH_BYTES)
    parent = split_keys(streamed.look_up.keys)[0]
    found = CHUNK_TOKENS + BLOCK_TOKENS
    streamed.find([1], 1, last_tokens=CHUNK_TOKENS, likely_blocks=1)
    assert streamed.matched() == (found, True)
    if allocated == "before":
        streamed.allocate(found)
        assert streamed.step() == [([1], True)]
    streamed.find([2], 0, last_tokens=CHUNK_TOKENS, block_hashes=hashes, parent=parent)
    if allocated == "after":
        streamed.allocate(found)
    first = [1] if allocated == "after" else []
    assert streamed.step() == [([*first, 2] if equal == 1 else [], False)]
    streamed.finish(failed=equal != 1)
    if equal != 1:
        streamed.begin(CHUNK_TOKENS + equal * BLOCK_TOKENS)
        assert streamed.step() == [([1, 2] if equal else [1], False)]


@pytest.fixture
def with_states(engine: Engine) -> Engine:
    """An engine whose model keeps a state as well."""
    groups = GroupLayout(BLOCK_TOKENS, (1024,)), GroupLayout(CHUNK_TOKENS, (1024,), state=True)
    engine.replace_scheduler(ChunkLayout(CHUNK_TOKENS, groups))
    return engine


def needed(look_up: Lookup) -> set[bytes]:
    """Return the keys of what is stored of a prompt: chunks, and the states at its last two boundaries."""
    keys = split_keys(look_up.keys)
    return {*keys, *map(state_key, keys[-2:])}


def keys_of(reserve: Reserve) -> set[bytes]:
    return {key for run in reserve.runs for key in split_keys(run.keys)}


@pytest.mark.parametrize("step_chunks", [1, 5])
def test_room_for_states_is_requested_with_the_lookup(
    with_states: Engine, cache: ScriptedCache, step_chunks: int
) -> None:
    """The first step may be the only one that leaves them.

    Room for chunks as well, but only if that step computes all: who waits must not keep others from storing.
    """
    with_states.replace_scheduler(with_states.layout, step_tokens=step_chunks * CHUNK_TOKENS)
    look_up = with_states.ask(make_request(4 * CHUNK_TOKENS + 1))
    chunks = set(split_keys(look_up.keys)) if step_chunks == 1 else set()
    assert keys_of(cache.receive(Reserve)) == needed(look_up) - chunks


def test_no_room_for_states_is_requested_while_pools_are_asked(
    with_states: Engine, cache: ScriptedCache
) -> None:
    """What has room to be stored would not be fetched from a pool. It is requested in the first step."""
    with_states.change_welcome(pools=True)
    request = make_request(4 * CHUNK_TOKENS + 1)
    look_up = with_states.ask(request)
    assert cache.nothing_received()
    with_states.answer(look_up)
    with_states.wait_for_hit(request, 0)
    with_states.admit(request)
    with_states.step(0)
    assert keys_of(cache.receive(Reserve)) == needed(look_up)


def test_prompt_that_is_not_looked_up_does_not_wait_for_pools(
    with_states: Engine, cache: ScriptedCache
) -> None:
    with_states.change_welcome(pools=True)
    request = make_request(4 * CHUNK_TOKENS + 1, kv_transfer_params={"kvtier": {"cache": "write"}})
    with_states.scheduler.on_new_request(request)
    assert chunk_counts(cache.receive(Reserve)) == [1, 1]


@pytest.mark.parametrize("chunks", [1, 4])
def test_prompt_waits_for_room_only_if_its_first_step_may_need_it(engine: Engine, chunks: int) -> None:
    groups = GroupLayout(BLOCK_TOKENS, (1024,)), GroupLayout(CHUNK_TOKENS, (1024,), state=True)
    engine.replace_scheduler(ChunkLayout(CHUNK_TOKENS, groups), step_tokens=CHUNK_TOKENS)
    request = make_request(chunks * CHUNK_TOKENS + 1)
    engine.answer(engine.ask(request))
    wait_until(lambda: (engine.bridge.poll(), len(engine.bridge.calls) == 1)[1])
    awaits = engine.scheduler.matched_tokens(request, 0) == lookups.ASK_AGAIN
    assert awaits == (chunks == 1)
    engine.grant()
    assert engine.scheduler.matched_tokens(request, 0) == lookups.NOTHING


def test_one_message_requests_the_room_of_all_chunks(
    with_states: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are of no use before the state at their end is stored."""
    monkeypatch.setattr(with_states, "table", lambda _: (list(range(1, 9)), list(range(9, 17))))
    with_states.start(make_request(4 * CHUNK_TOKENS + 1))
    with_states.grant()
    with_states.step()
    with_states.grant(first=3)
    for _ in range(2):
        with_states.step()
    assert with_states.saved() == [3], "the first two are states, and the first chunk is of the first step"
    with_states.step()
    assert with_states.saved() == [3, 4, 5, 6]
    with_states.step(1)
    assert cache.nothing_received()


def test_long_queue_reserves_room_for_few_states(with_states: Engine) -> None:
    """One of 40 MB per request would evict the whole cache."""
    reserved = room_of_a_queue(with_states, 4 * CHUNK_TOKENS + 1)
    assert MAX_EARLY_STATES <= reserved <= MAX_EARLY_STATES + 1


def room_of_a_queue(engine: Engine, tokens: int) -> int:
    """Let requests arrive that are not scheduled; return for how many states or chunks room is reserved."""
    reserved = 0
    for _ in range(20):
        engine.ask(make_request(tokens))
        if not engine.cache.nothing_received():
            reserved += len(engine.grant(first=reserved + 1, settle=False))
            wait_until(lambda: (engine.bridge.poll(), engine.bridge.reserves)[1])
    return reserved


@pytest.fixture
def with_windows(engine: Engine) -> Engine:
    """An engine whose model has a window, and whose steps compute up to four chunks."""
    layout = ChunkLayout(CHUNK_TOKENS, (GroupLayout(BLOCK_TOKENS, (1024,), window=CHUNK_TOKENS),))
    engine.replace_scheduler(layout, step_tokens=4 * CHUNK_TOKENS)
    return engine


def test_with_windows_room_is_requested_with_the_lookup(
    with_windows: Engine, cache: ScriptedCache, waits: list[float]
) -> None:
    """Before the step after the prompt's, vLLM frees all blocks but those of the last chunk."""
    with_windows.start(make_request(4 * CHUNK_TOKENS))
    leases = with_windows.grant()
    waits.clear()
    with_windows.step(4 * CHUNK_TOKENS)
    assert with_windows.saved() == leases == [1, 2, 3, 4]
    assert not waits
    assert cache.nothing_received()
    assert len(with_windows.saves) == 1, "one job for each request"


def test_with_windows_room_is_requested_a_step_ahead(with_windows: Engine, cache: ScriptedCache) -> None:
    with_windows.start(make_request(12 * CHUNK_TOKENS))
    leases: list[int] = []
    for _ in range(3):
        leases += with_windows.grant(first=len(leases) + 1)
        with_windows.step(4 * CHUNK_TOKENS)
    assert with_windows.saved() == leases == list(range(1, 13))
    assert cache.nothing_received()


def test_with_windows_room_before_a_hit_is_given_back(with_windows: Engine, cache: ScriptedCache) -> None:
    """It was granted although a chunk is held: on a disk, for instance."""
    with_windows.start(make_request(4 * CHUNK_TOKENS), 101, 102)
    with_windows.grant()
    with_windows.step(2 * CHUNK_TOKENS)
    assert cache.receive(Abandon).leases == [1, 2]
    assert with_windows.saved() == [3, 4]


@pytest.mark.parametrize("seconds", [3600, 0])
def test_with_windows_a_request_waits_for_its_room(
    with_windows: Engine, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """A busy cache process may answer the lookup before. Not for long, as the prompt can be computed."""
    monkeypatch.setattr(early, "ROOM_SECONDS", seconds)
    request = make_request(CHUNK_TOKENS)
    look_up = with_windows.ask(request)
    with_windows.answer(look_up)
    wait_until(lambda: with_windows.known(look_up.ticket).final)
    if seconds:
        assert with_windows.scheduler.matched_tokens(request, 0) == (None, False)
        with_windows.grant(settle=False)
        with_windows.wait_for_hit(request, 0)
    assert with_windows.scheduler.matched_tokens(request, 0) == (0, False)


def test_with_windows_a_late_answer_is_read_before_room_is_requested(
    with_windows: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle engine has not read it, and nothing is reserved while an answer is late."""
    monkeypatch.setattr(client, "MIN_POLL_INTERVAL_SECONDS", 0.0)
    bridge = with_windows.bridge
    assert bridge.await_reply(bridge.reserve([]), 0.001) is None
    assert bridge.late
    with_windows.grant(settle=False)
    with_windows.ask(make_request(CHUNK_TOKENS))
    assert len(cache.receive(Reserve).runs) == 1


def test_with_windows_no_room_is_requested_for_chunks_that_are_pushed_here(
    with_windows: Engine, cache: ScriptedCache
) -> None:
    """A peer cannot push a chunk that has room to be stored, and the request would wait for it."""
    expected = {"kvtier": {"expect": {"tokens": 2 * CHUNK_TOKENS}}}
    request = make_request(4 * CHUNK_TOKENS, kv_transfer_params=expected)
    look_up = with_windows.ask(request)
    assert look_up.expect_chunks == 2
    assert cache.nothing_received()
    with_windows.answer(look_up)
    with_windows.wait_for_hit(request, 0)
    with_windows.admit(request)
    with_windows.step(2 * CHUNK_TOKENS)
    assert chunk_counts(cache.receive(Reserve))[0] == 2, "once the lookup has ended"


@pytest.mark.parametrize("end", ["aborted", "preempted"])
def test_with_windows_room_for_chunks_that_are_not_computed_is_given_back(
    with_windows: Engine, cache: ScriptedCache, end: str
) -> None:
    request = make_request(4 * CHUNK_TOKENS)
    with_windows.start(request)
    with_windows.grant()
    with_windows.step(0)
    assert with_windows.saved() == []
    if end == "aborted":
        request.status = RequestStatus.FINISHED_ABORTED
        with_windows.scheduler.finished(request, ([],))
    else:
        request.num_preemptions += 1
        with_windows.step(0)
    assert sorted(cache.receive(Abandon).leases) == [1, 2, 3, 4]


def test_with_windows_room_for_replaced_tokens_is_given_back(
    with_windows: Engine, cache: ScriptedCache
) -> None:
    """A continued session: other tokens are not stored under the keys of those before them."""
    request = make_request(4 * CHUNK_TOKENS)
    with_windows.start(request)
    with_windows.grant()
    request.all_token_ids = [0, *request.all_token_ids]
    request.num_prompt_tokens = request.num_tokens = 4 * CHUNK_TOKENS + 1
    with_windows.step(4 * CHUNK_TOKENS)
    assert cache.receive(Abandon).leases == [1, 2, 3, 4]
    assert with_windows.saved() == []


def test_long_queue_reserves_no_more_room_than_a_step_needs(with_windows: Engine) -> None:
    assert room_of_a_queue(with_windows, 3 * CHUNK_TOKENS) == 4


def test_hit_is_counted_after_the_cache_process_was_replaced(streamed: Streamed) -> None:
    """The other one may have fewer tiers."""
    streamed.find([1, 2, 3, 4], 0)
    streamed.begin()
    streamed.step()
    engine = streamed.engine
    engine.change_welcome(tiers=[], media=[])
    streamed.finish()
    assert engine.counts()["hit_tokens/ram"] == 4 * CHUNK_TOKENS
    assert engine.scheduler.hits_by_medium(streamed.request) == {"cpu": 4 * CHUNK_TOKENS}


def test_after_a_hit_room_is_requested_for_states_that_continue_it(
    with_states: Engine, cache: ScriptedCache
) -> None:
    request = make_request(4 * CHUNK_TOKENS + 1)
    look_up = with_states.ask(request)
    early = with_states.grant(settle=False)
    with_states.answer(look_up, 11, 12, 13)  # The last lease is that of the state.
    hit = 2 * CHUNK_TOKENS
    with_states.wait_for_hit(request, hit)
    blocks = SimpleNamespace(get_block_ids=lambda: ([1] * 8, [2] * 8))
    with_states.scheduler.allocated(request, blocks, hit)  # type: ignore[arg-type]
    with_states.admit(request)
    with_states.step(0)
    assert sorted(cache.receive(Abandon).leases) == early
    *states, chunks = cache.receive(Reserve).runs
    assert {run.extends for run in states} == {split_keys(look_up.keys)[1]}
    assert split_keys(chunks.keys) == split_keys(look_up.keys)[2:]


def test_lookup_reports_how_long_the_prompt_takes_to_compute(
    engine: Engine, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other prompts have taken, from their first step to their first token. Decoding does not count."""
    clock = [100.0]
    monkeypatch.setattr(lookups.time, "monotonic", lambda: clock[0])
    for _ in range(MIN_SAMPLES):
        request = make_request(4 * CHUNK_TOKENS, kv_transfer_params={"kvtier": {"cache": "read"}})
        assert engine.start(request).compute_seconds == 0
        for _ in range(4):
            engine.step()
            clock[0] += 0.5
        request.num_tokens += 1
        for _ in range(2):
            engine.step(1)
            clock[0] += 10
        engine.finish(request)
    engine.scheduler.on_new_request(make_request(8 * CHUNK_TOKENS))
    assert cache.receive(Lookup).compute_seconds == pytest.approx(4.0)


def switched(mode: str, **fields: Any) -> Any:
    """Return a request that uses the cache only as ``mode`` says."""
    return make_request(4 * CHUNK_TOKENS, kv_transfer_params={"kvtier": {"cache": mode}}, **fields)


def test_request_with_the_cache_off_is_not_even_hashed(engine: Engine, cache: ScriptedCache) -> None:
    request = switched("off", all_token_ids=None)
    engine.run(request)
    engine.step()
    assert not engine.finish(request)
    assert cache.nothing_received()


def test_reading_request_stores_nothing(engine: Engine, cache: ScriptedCache) -> None:
    """Not when a step completes a chunk, and not at its end."""
    request = switched("read")
    look_up = engine.load(request, 1)
    engine.admit(request)
    request.num_computed_tokens = CHUNK_TOKENS
    engine.step()
    assert [job.leases for job in engine.loads] == [[1]]
    engine.step()
    finish_load(engine, request)
    assert cache.receive(Cancel).ticket == look_up.ticket
    assert not engine.finish(request)
    assert cache.nothing_received()


def test_writing_request_looks_nothing_up(engine: Engine, cache: ScriptedCache) -> None:
    request = switched("write")
    engine.run(request)
    assert cache.nothing_received()
    engine.step()
    assert len(cache.receive(Reserve).runs) == 1


def described_request(chunks: int) -> Any:
    """Return a request with what vLLM's events need."""
    hashes = [bytes([number]) * 32 for number in range(chunks * stepping.CHUNK_BLOCKS)]
    request = make_request(chunks * CHUNK_TOKENS, block_hashes=hashes, session_id=None)
    request.all_token_ids = list(request.all_token_ids)
    return request


@pytest.fixture
def publishing(engine: Engine) -> Engine:
    """An engine that publishes KV events."""
    pool = BlockPool(16, True, BLOCK_TOKENS, enable_kv_cache_events=True)
    manager: Any = SimpleNamespace(block_pool=pool, kv_cache_event_metadata=(("full_attention", None),))
    engine.scheduler.publish_events(manager)
    engine.scheduler.bind(pool)
    return engine


def events(engine: Engine, count: int) -> list[KVCacheEvent]:
    """Return the events of what the cache process has just reported."""
    found: list[KVCacheEvent] = []
    while len(found) < count:
        engine.bridge.poll(1.0)
        found += engine.scheduler.events()
    return found


def test_chunks_of_a_prompt_are_published_before_they_are_stored_here(
    publishing: Engine, cache: ScriptedCache
) -> None:
    """They may be held already, from an earlier run or another engine."""
    keys = publishing.ask(described_request(4)).keys
    assert list(publishing.scheduler.events()) == []
    assert cache.receive(Watch).keys == keys
    cache.send(Held(keys, [1, 1, 2, 0]))
    assert [event.medium for event in events(publishing, 3)] == ["CPU", "CPU", "STORAGE"]


def test_stored_chunks_are_watched_once(publishing: Engine, cache: ScriptedCache) -> None:
    request = described_request(2)
    look_up = publishing.start(request)
    publishing.scheduler.events()
    assert cache.receive(Watch).keys == look_up.keys
    publishing.step()
    cache.receive(Reserve)
    publishing.scheduler.events()
    assert cache.nothing_received()


def test_chunks_that_are_first_computed_here_are_watched(publishing: Engine, cache: ScriptedCache) -> None:
    """Such as an answer, which no lookup has covered."""
    request = described_request(3)
    request.skip_reading_prefix_cache = True
    publishing.scheduler.on_new_request(request)
    publishing.admit(request)
    publishing.step(0)
    publishing.step()
    (run,) = cache.receive(Reserve).runs
    publishing.scheduler.events()
    assert cache.receive(Watch).keys == run.keys


def test_chunks_of_earlier_weights_are_removed_and_not_watched(
    publishing: Engine, cache: ScriptedCache
) -> None:
    """Before any of the new weights is published: they have the same blocks for a router."""
    request = described_request(2)
    keys = publishing.ask(request).keys
    publishing.scheduler.events()
    cache.receive(Watch)
    cache.send(Held(keys, [1, 1]))
    stored = events(publishing, 2)
    assert [type(event) for event in stored] == [BlockStored] * 2
    publishing.scheduler.set_weight_version("step-2")
    cache.receive(Cancel)
    cache.receive(UseWeights)
    [removed] = publishing.scheduler.events()
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [block for event in stored for block in event.block_hashes]
    assert list(publishing.scheduler.events()) == []
    forget = cache.receive(Watch)
    assert (forget.keys, sorted(split_keys(forget.forget))) == (b"", sorted(split_keys(keys)))
    publishing.scheduler.matched_tokens(request, 0)
    others = cache.receive(Lookup).keys
    publishing.scheduler.events()
    assert others != keys
    assert cache.receive(Watch).keys == others
    cache.send(Held(keys + others, [1] * 4))
    again = events(publishing, 2)
    assert [event.block_hashes for event in again] == [event.block_hashes for event in stored]


def test_change_in_vllms_internals_disables_events_only(
    publishing: Engine, cache: ScriptedCache, caplog: pytest.LogCaptureFixture
) -> None:
    publishing.scheduler.on_new_request(make_request(CHUNK_TOKENS))  # Without hashes.
    cache.receive(Lookup)
    assert list(publishing.scheduler.events()) == []
    assert "KV events of the tiers are disabled" in caplog.text
    caplog.clear()
    publishing.start_misses(1)
    publishing.step()
    cache.receive(Reserve)
    assert list(publishing.scheduler.events()) == []
    assert caplog.text == ""


def test_a_prompt_with_an_image_is_not_verified(engine: Engine, cache: ScriptedCache) -> None:
    """Clients may name two images alike, which would put what is sound in quarantine."""
    engine.replace_scheduler(verify=1.0, kv_dtype="float32")
    engine.find(make_request(4 * CHUNK_TOKENS, mm_features=[image("cat", 2, 3)]), 1, 2)
    engine.replace_scheduler(verify=1.0, kv_dtype="float32")
    request = make_request(4 * CHUNK_TOKENS)
    engine.answer(engine.ask(request), 3, 4)
    engine.wait_for_hit(request, 0)


@pytest.mark.parametrize("verify", [0.0, 1.0])
def test_what_a_canary_stores_is_compared_if_it_is_held(
    engine: Engine, cache: ScriptedCache, verify: float
) -> None:
    engine.replace_scheduler(verify=verify, kv_dtype="float32")
    hints = {"kvtier": {"cache": "write", "canary": {"id": "a"}}}
    requests = [make_request(2 * CHUNK_TOKENS, kv_transfer_params=hints) for _ in range(2)]
    requests[1].mm_features = [image("cat", 2, 3)]
    for request in requests:
        engine.scheduler.on_new_request(request)
        engine.admit(request)
    engine.step()
    runs = cache.receive(Reserve).runs
    assert [run.recomputes is not None for run in runs] == [verify > 0, False]
    assert all(run.canary for run in runs)
