"""The scheduler's side against a scripted cache process: one message a step, no waits, late answers.

See ``test_with_vllm.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from benchmarks import stepping
from benchmarks.stepping import CHUNK_TOKENS, Engine, make_request
from kvtier.bridge.connection import Connection
from kvtier.bridge.protocol import (
    Abandon,
    Clear,
    Cleared,
    Found,
    LookUp,
    Reserve,
    Reserved,
)
from kvtier.integrations.vllm import scheduler as scheduler_module
from kvtier.integrations.vllm.metadata import Job
from tests.bridge.conftest import wait_until
from tests.bridge.scripted_cache import ScriptedCache

REQUESTS = 64


class Cache(ScriptedCache):
    """Answers the scheduler, where the test says so."""

    def answer(self, reserve: Reserve, *, first: int = 1) -> list[int]:
        """Grant every chunk of a reservation; the numbers of the leases."""
        count = sum(len(run.keys) // 32 for run in reserve.runs)
        leases = list(range(first, first + count))
        self.say(Reserved(reserve.ticket, leases, [4096 * (at % 64) for at in range(count)]))
        return leases


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    made = Cache(tmp_path / "socket")
    yield made
    made.close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every wait of a bridge, in seconds."""
    taken: list[float] = []
    receive = Connection.receive

    def counted(self: Connection, wait: float = 0.0) -> Any:
        if wait > 0:
            taken.append(wait)
        return receive(self, wait)

    monkeypatch.setattr(Connection, "receive", counted)
    return taken


class Worker:
    """A worker's side that copies nothing: what it is given is written down."""

    def __init__(self) -> None:
        self.saves: list[Job] = []
        self.loads: list[Job] = []

    def load(self, jobs: list[Job]) -> None:
        self.loads += jobs

    def save(self, jobs: list[Job]) -> None:
        self.saves += jobs

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        saved = {job.request_id for job in self.saves if job.last}
        return saved, set(), set()

    def close(self) -> None:
        pass


@pytest.fixture
def engine(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> Iterator[Engine]:
    """Connected, its worker's side a stand-in; nothing has been asked."""
    monkeypatch.setattr(stepping.WorkerBridge, "connect", lambda _: None)
    monkeypatch.setattr(
        stepping.SchedulerBridge,
        "connect",
        lambda bridge: (bridge.ready(), cache.greet(), wait_until(bridge.ready)),
    )
    made = Engine.open(tmp_path / "socket", REQUESTS, prefetch={"policy": "timeout"})
    made.worker = Worker()  # type: ignore[assignment]
    waits.clear()
    yield made
    made.close()


def run(engine: Engine, cache: Cache, count: int) -> list[Any]:
    """Requests that are computed from their first token on; none of them hits."""
    requests = [make_request(16 * CHUNK_TOKENS) for _ in range(count)]
    for request in requests:
        engine.scheduler.on_new_request(request)
        look_up = cache.hear(LookUp)
        cache.say(Found(look_up.ticket, [], [], [], 0))
        wait_until(lambda request=request: engine.scheduler.matched_tokens(request, 0) == (0, False))
        engine.scheduler.allocated(request, engine._blocks([]), 0)
        engine.admit(request)
    engine.step(0)  # A step may wait anew.
    return requests


def heard(engine: Engine) -> None:
    """Wait until what the scripted cache process has said has arrived."""
    bridge = engine.bridges[0]
    wait_until(lambda: (bridge.poll(), not bridge._questions)[1])


def test_all_chunks_of_a_step_are_reserved_in_one_message(engine: Engine, cache: Cache) -> None:
    requests = run(engine, cache, REQUESTS)
    engine.step()
    reserve = cache.hear(Reserve)
    assert cache.nothing()
    assert len(reserve.runs) == REQUESTS
    assert {run.last_tokens for run in reserve.runs} == {CHUNK_TOKENS}
    cache.answer(reserve)
    heard(engine)
    engine.step()
    assert len(cache.hear(Reserve).runs) == REQUESTS
    assert {job.request_id for job in engine.worker.saves} == {request.request_id for request in requests}  # type: ignore[attr-defined]


def test_a_step_waits_once_and_for_two_milliseconds_at_most(
    engine: Engine, cache: Cache, waits: list[float]
) -> None:
    run(engine, cache, REQUESTS)
    for _ in range(8):
        engine.arrive(make_request(4 * CHUNK_TOKENS))
    waits.clear()
    before = engine.bridges[0].waited
    engine.step()
    assert waits
    assert sum(waits) < 1.01 * scheduler_module.LOOK_UP_WAIT_SECONDS
    assert engine.bridges[0].late
    taken = len(waits)
    engine.step()
    engine.step()
    assert len(waits) == taken, "after one missed answer there is no further wait"
    assert engine.bridges[0].waited - before < 1.0


def test_look_ups_and_reservations_share_the_time_to_wait(
    engine: Engine, cache: Cache, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message that comes keeps the cache process from being late; still the step's time ends."""
    run(engine, cache, 2)
    receive = Connection.receive
    others = iter(range(10**6, 10**7))

    def chatter(connection: Connection, wait: float = 0.0) -> Any:
        if wait > 0:
            cache.say(Found(next(others), [], [], [], 0))
        return receive(connection, wait)

    monkeypatch.setattr(Connection, "receive", chatter)
    for _ in range(8):
        engine.arrive(make_request(4 * CHUNK_TOKENS))
    before = engine.bridges[0].waited
    for request in engine.waiting:
        engine.scheduler.matched_tokens(request, 0)
    assert engine.scheduler._wait_left(scheduler_module.LOOK_UP_WAIT_SECONDS) == 0.0
    assert engine.bridges[0].waited > before
    assert not engine.bridges[0].late
    assert max(waits) < 1.01 * scheduler_module.LOOK_UP_WAIT_SECONDS


def test_a_cache_process_that_is_late_is_sent_nothing_and_its_chunks_are_stored_later(
    engine: Engine, cache: Cache
) -> None:
    run(engine, cache, REQUESTS)
    engine.step()
    reserve = cache.hear(Reserve)
    engine.step()
    engine.step()
    assert cache.nothing()
    cache.answer(reserve)
    heard(engine)
    engine.step()
    later = cache.hear(Reserve)
    assert [len(run.keys) // 32 for run in later.runs] == [3] * REQUESTS, "no chunk is lost"
    assert [run.parent for run in later.runs] == [run.keys for run in reserve.runs]


def test_an_outage_is_caught_up_with_in_small_parts(engine: Engine, cache: Cache) -> None:
    """All that was computed meanwhile at once would be a long step."""
    run(engine, cache, REQUESTS)
    engine.scheduler._saves.backlog = 10
    engine.step()
    reserve = cache.hear(Reserve)
    for _ in range(4):
        engine.step()
    cache.answer(reserve)
    heard(engine)
    engine.step()
    parts = cache.hear(Reserve)
    assert sum(len(run.keys) // 32 for run in parts.runs) == REQUESTS + 10
    cache.answer(parts, first=1000)
    heard(engine)
    engine.step()
    assert sum(len(run.keys) // 32 for run in cache.hear(Reserve).runs) == REQUESTS + 10


def test_what_one_request_catches_up_with_takes_no_room_from_others(engine: Engine, cache: Cache) -> None:
    behind, _ = run(engine, cache, 2)
    engine.scheduler._saves.backlog = 1
    behind.num_computed_tokens = 8 * CHUNK_TOKENS  # As after a long hit in vLLM's own cache.
    engine.step()
    assert [len(run.keys) // 32 for run in cache.hear(Reserve).runs] == [2, 1]


@pytest.mark.parametrize("late", [False, True])
def test_all_that_the_last_step_computed_is_stored(engine: Engine, cache: Cache, late: bool) -> None:
    """Also where the step could not ask, or drafts make its chunks due only when the request has ended."""
    (request,) = run(engine, cache, 1)
    engine.scheduler._saves.backlog = 1
    engine.scheduler._speculative = not late
    if late:
        engine.bridges[0]._health.late = True
    engine.step(6 * CHUNK_TOKENS)
    assert cache.nothing()
    request.num_tokens = 6 * CHUNK_TOKENS + 1
    assert engine.finish(request)
    engine.bridges[0]._health.late = False
    engine.step(0)
    (stored,) = cache.hear(Reserve).runs
    assert len(stored.keys) // 32 == 6


def test_drafts_do_not_make_a_prompt_backlog(engine: Engine, cache: Cache) -> None:
    (request,) = run(engine, cache, 1)
    engine.scheduler._saves.backlog = 1
    engine.scheduler._speculative = True
    engine.step(6 * CHUNK_TOKENS)
    engine.step(3)
    (stored,) = cache.hear(Reserve).runs
    assert len(stored.keys) // 32 == 6
    assert request.num_computed_tokens == 6 * CHUNK_TOKENS + 3


def test_a_late_answer_is_used_while_the_request_has_its_blocks(engine: Engine, cache: Cache) -> None:
    kept, preempted, aborted, freed = run(engine, cache, 4)
    table = engine.table

    def lost(request: Any) -> tuple[list[int], ...]:
        return ([0] * 8,) if request is freed else table(request)

    engine.table = lost  # type: ignore[method-assign]
    engine.step()
    reserve = cache.hear(Reserve)
    preempted.num_preemptions = 1
    aborted.status = RequestStatus.FINISHED_ABORTED
    engine.running.remove(aborted)
    assert not engine.scheduler.finished(aborted, table(aborted))[0]
    cache.answer(reserve)
    heard(engine)
    engine.step()
    (job,) = engine.worker.saves  # type: ignore[attr-defined]
    assert (job.request_id, job.leases, job.last) == (kept.request_id, [1], False)
    assert job.chunks[0].blocks == ([1, 2],)
    assert sorted(cache.hear(Abandon).leases) == [2, 3, 4]
    cache.hear(Reserve)


def test_a_request_that_is_not_scheduled_keeps_its_room_until_it_is(engine: Engine, cache: Cache) -> None:
    (request,) = run(engine, cache, 1)
    engine.step()
    cache.answer(cache.hear(Reserve))
    heard(engine)
    engine.running.remove(request)
    engine.step()
    assert not engine.worker.saves  # type: ignore[attr-defined]
    engine.running.append(request)
    engine.step(0)
    assert [job.leases for job in engine.worker.saves] == [[1]]  # type: ignore[attr-defined]
    assert cache.nothing()


def test_blocks_of_a_finished_request_are_kept_until_its_answer_is_there(
    engine: Engine, cache: Cache
) -> None:
    (request,) = run(engine, cache, 1)
    engine.step()
    reserve = cache.hear(Reserve)
    assert engine.finish(request)
    engine.step()
    assert not engine.freed
    cache.answer(reserve)
    heard(engine)
    engine.step()
    assert [(job.leases, job.last) for job in engine.worker.saves] == [([1], False), ([], True)]  # type: ignore[attr-defined]
    assert engine.freed == {request.request_id}


def test_blocks_are_not_kept_for_a_cache_process_that_is_silent(engine: Engine, cache: Cache) -> None:
    (request, late) = run(engine, cache, 2)
    engine.step()
    reserve = cache.hear(Reserve)
    assert engine.finish(request)
    wait_until(lambda: (engine.step(0), not engine.bridges[0].responsive)[1])
    assert engine.freed == {request.request_id}
    assert not engine.finish(late), "it is known to be silent"
    cache.answer(reserve)
    heard(engine)
    engine.step()
    assert cache.hear(Abandon) == Abandon([1, 2])


def test_look_ups_are_given_up_when_the_cache_process_falls_silent(engine: Engine, cache: Cache) -> None:
    engine.arrive(make_request(4 * CHUNK_TOKENS))
    engine.step()
    assert len(engine.waiting) == 1
    wait_until(lambda: (engine.step(), not engine.waiting)[1])
    assert not engine.bridges[0].responsive
    ticket = cache.hear(LookUp).ticket
    engine.arrive(make_request(4 * CHUNK_TOKENS))
    engine.step()
    assert not engine.waiting, "later requests do not wait at all"
    cache.say(Found(ticket, [], [], [], 0))
    wait_until(lambda: (engine.step(), engine.bridges[0].responsive)[1])
    engine.arrive(make_request(4 * CHUNK_TOKENS))
    engine.step()
    assert engine.waiting


def test_a_request_waits_as_long_as_its_chunks_arrive(
    engine: Engine, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(4 * CHUNK_TOKENS)
    engine.scheduler.on_new_request(request)
    patience = engine.scheduler._requests[request.request_id].patience
    ticket = cache.hear(LookUp).ticket
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    bridge = engine.bridges[0]
    finding = bridge._findings[ticket]
    for left in (4, 3, 2, 1):
        cache.say(Found(ticket, [], [], [], left))
        wait_until(lambda left=left: (bridge.poll(), finding.fetching == left)[1])
        clock[0] += 0.9 * patience
        assert engine.scheduler.matched_tokens(request, 0) == (None, False)
    clock[0] += 0.2 * patience
    assert engine.scheduler.matched_tokens(request, 0) == (0, False), "nothing has arrived for too long"


def test_a_lost_connection_forgets_what_was_granted(engine: Engine, cache: Cache) -> None:
    """Another process numbers its leases anew: those of the first mean others there."""
    (request,) = run(engine, cache, 1)
    engine.step()
    cache.answer(cache.hear(Reserve))
    heard(engine)
    engine.running.remove(request)
    cache.hang_up()
    cache._epoch = 8
    wait_until(lambda: (engine.step(), not engine.bridges[0].connected)[1])
    engine.bridges[0].ready()
    cache.greet()
    wait_until(engine.bridges[0].ready)
    request.num_preemptions = 1
    engine.running.append(request)
    engine.step(0)
    assert not engine.worker.saves  # type: ignore[attr-defined]
    assert cache.nothing()


def test_a_clear_takes_a_second_at_most_and_none_where_nothing_answers(
    engine: Engine, cache: Cache, waits: list[float]
) -> None:
    run(engine, cache, 1)
    assert not engine.scheduler.clear()
    assert max(waits) < 1.01 * scheduler_module.CLEAR_SECONDS
    assert sum(waits) < 10 * scheduler_module.CLEAR_SECONDS
    clear = cache.hear(Clear)
    wait_until(lambda: (engine.step(0), not engine.bridges[0].responsive)[1])
    waits.clear()
    assert not engine.scheduler.clear()
    assert not waits
    cache.say(Cleared(clear.ticket, 5))
    wait_until(lambda: (engine.step(0), engine.bridges[0].responsive)[1])
