"""Scheduler side of the connector with a scripted cache process: batching, short waits, late answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvtier import Settings
from kvtier.bridge.protocol import (
    Abandon,
    Cancel,
    Clear,
    Cleared,
    Found,
    Held,
    Lookup,
    Reserve,
    Reserved,
    UseWeights,
    Watch,
)
from kvtier.integrations.vllm import early, lookups
from kvtier.integrations.vllm import scheduler as scheduler_module
from kvtier.integrations.vllm.adapters import Adapter
from kvtier.integrations.vllm.early import MAX_EARLY_STATES
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.loading import LOST
from kvtier.integrations.vllm.metadata import Job
from kvtier.integrations.vllm.scheduler import SchedulerSide
from kvtier.integrations.vllm.weights import EngineWeights
from kvtier.memory.keys import BLOCK_HASH_BYTES, split_keys, state_key
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.rpc.client import UnixConnection
from kvtier.tiers.throughput import MIN_SAMPLES
from tests.rigs import stepping
from tests.rigs.scripted_server import ScriptedCache
from tests.rigs.stepping import CHUNK_TOKENS, Engine, make_request
from tests.rigs.waiting import wait_until

REQUESTS = 64


class Cache(ScriptedCache):
    """A scripted cache process with helpers for reservations."""

    def answer(self, reserve: Reserve, *, first: int = 1) -> list[int]:
        """Grant every chunk of a reservation, and return the lease numbers."""
        count = sum(len(run.keys) // 32 for run in reserve.runs)
        leases = list(range(first, first + count))
        self.send(Reserved(reserve.ticket, leases, [4096 * (at % 64) for at in range(count)]))
        return leases


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    instance = Cache(tmp_path / "socket")
    yield instance
    instance.close()


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


class Worker:
    """A worker side that copies nothing and records its jobs."""

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
    """A connected engine with a stand-in worker side, before any request."""
    monkeypatch.setattr(stepping.WorkerBridge, "connect", lambda _: None)
    monkeypatch.setattr(
        stepping.SchedulerBridge,
        "connect",
        lambda bridge: (bridge.ready(), cache.greet(), wait_until(bridge.ready)),
    )
    instance = Engine.open(tmp_path / "socket", REQUESTS, prefetch={"policy": "timeout"})
    instance.worker = Worker()  # type: ignore[assignment]
    waits.clear()
    yield instance
    instance.close()


def start(engine: Engine, cache: Cache, request: Any, *, hit: int = 0) -> Lookup:
    """Answer the lookup of a new request, and let the next step compute what is not hit."""
    engine.scheduler.on_new_request(request)
    look_up = cache.receive(Lookup)
    leases = list(range(101, 101 + hit))
    cache.send(Found(look_up.ticket, leases, [4096 * lease for lease in leases], [0] * hit, 0))
    expected = (hit * CHUNK_TOKENS, True) if hit else (0, False)
    wait_until(lambda: engine.scheduler.matched_tokens(request, 0) == expected)
    engine.admit(request)
    engine.scheduler.allocated(request, engine.blocks(engine.tables[request.request_id]), expected[0])
    request.num_computed_tokens = expected[0]
    return look_up


def run(engine: Engine, cache: Cache, count: int, tokens: int = 16 * CHUNK_TOKENS) -> list[Any]:
    """Start requests that miss, and are computed from their first token on."""
    requests = [make_request(tokens) for _ in range(count)]
    for request in requests:
        start(engine, cache, request)
    engine.step(0)  # The next step may wait again.
    return requests


def wait_for_replies(engine: Engine) -> None:
    """Wait until all replies of the scripted cache process have arrived."""
    bridge = engine.bridges[0]
    wait_until(lambda: (bridge.poll(), not bridge.calls)[1])


def grant(engine: Engine, cache: Cache, reserve: Reserve | None = None, *, first: int = 1) -> list[int]:
    """Grant every chunk of a reservation, by default the next one, and wait until the engine knows."""
    leases = cache.answer(reserve or cache.receive(Reserve), first=first)
    wait_for_replies(engine)
    return leases


def test_all_chunks_of_a_step_are_reserved_in_one_message(engine: Engine, cache: Cache) -> None:
    requests = run(engine, cache, REQUESTS)
    engine.step()
    reserve = cache.receive(Reserve)
    assert cache.nothing_received()
    assert len(reserve.runs) == REQUESTS
    assert {run.last_tokens for run in reserve.runs} == {CHUNK_TOKENS}
    grant(engine, cache, reserve)
    engine.step()
    assert len(cache.receive(Reserve).runs) == REQUESTS
    assert {job.request_id for job in engine.worker.saves} == {request.request_id for request in requests}  # type: ignore[attr-defined]


def test_step_waits_once_and_for_at_most_two_milliseconds(
    engine: Engine, cache: Cache, waits: list[float]
) -> None:
    run(engine, cache, REQUESTS)
    for _ in range(8):
        engine.arrive(make_request(4 * CHUNK_TOKENS))
    waits.clear()
    before = engine.bridges[0].waited
    engine.step()
    assert waits
    assert sum(waits) < 1.01 * scheduler_module.LOOKUP_WAIT_SECONDS
    assert engine.bridges[0].late
    count = len(waits)
    engine.step()
    engine.step()
    assert len(waits) == count, "no further wait after one missed answer"
    assert engine.bridges[0].waited - before < 1.0


def test_lookups_and_reservations_share_one_wait_budget(
    engine: Engine, cache: Cache, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages keep the cache process from counting as late, but the wait budget of the step still ends."""
    run(engine, cache, 2)
    receive = UnixConnection.receive
    tickets = iter(range(10**6, 10**7))

    def receive_with_message(connection: UnixConnection[Any], wait: float = 0.0) -> Any:
        if wait > 0:
            cache.send(Found(next(tickets), [], [], [], 0))
        return receive(connection, wait)

    monkeypatch.setattr(UnixConnection, "receive", receive_with_message)
    for _ in range(8):
        engine.arrive(make_request(4 * CHUNK_TOKENS))
    before = engine.bridges[0].waited
    for request in engine.waiting:
        engine.scheduler.matched_tokens(request, 0)
    assert engine.scheduler._wait_left(scheduler_module.LOOKUP_WAIT_SECONDS) == 0.0
    assert engine.bridges[0].waited > before
    assert not engine.bridges[0].late
    assert max(waits) < 1.01 * scheduler_module.LOOKUP_WAIT_SECONDS


def test_late_cache_process_is_sent_nothing_and_chunks_are_stored_later(engine: Engine, cache: Cache) -> None:
    run(engine, cache, REQUESTS)
    engine.step()
    reserve = cache.receive(Reserve)
    engine.step()
    engine.step()
    assert cache.nothing_received()
    grant(engine, cache, reserve)
    engine.step()
    second = cache.receive(Reserve)
    assert [len(run.keys) // 32 for run in second.runs] == [3] * REQUESTS, "no chunk is lost"
    assert [run.parent for run in second.runs] == [run.keys for run in reserve.runs]


def test_backlog_after_outage_is_stored_in_small_parts(engine: Engine, cache: Cache) -> None:
    """Storing the whole backlog at once would make one long step."""
    run(engine, cache, REQUESTS)
    engine.scheduler._saves.backlog = 10
    engine.step()
    reserve = cache.receive(Reserve)
    for _ in range(4):
        engine.step()
    grant(engine, cache, reserve)
    engine.step()
    catch_up = cache.receive(Reserve)
    assert sum(len(run.keys) // 32 for run in catch_up.runs) == REQUESTS + 10
    grant(engine, cache, catch_up, first=1000)
    engine.step()
    assert sum(len(run.keys) // 32 for run in cache.receive(Reserve).runs) == REQUESTS + 10


def test_backlog_of_one_request_does_not_displace_others(engine: Engine, cache: Cache) -> None:
    lagging, _ = run(engine, cache, 2)
    engine.scheduler._saves.backlog = 1
    lagging.num_computed_tokens = 8 * CHUNK_TOKENS  # As after a long hit in vLLM's prefix cache.
    engine.step()
    assert [len(run.keys) // 32 for run in cache.receive(Reserve).runs] == [2, 1]


def test_everything_computed_in_the_last_step_is_stored(engine: Engine, cache: Cache) -> None:
    """Also if the step could not reserve."""
    (request,) = run(engine, cache, 1)
    engine.scheduler._saves.backlog = 1
    engine.bridges[0]._health.late = True
    engine.step(6 * CHUNK_TOKENS)
    assert cache.nothing_received()
    request.num_tokens = 6 * CHUNK_TOKENS + 1
    assert engine.finish(request)
    engine.bridges[0]._health.late = False
    engine.step(0)
    (stored,) = cache.receive(Reserve).runs
    assert len(stored.keys) // 32 == 6


def know(request: Any, tokens: int) -> None:
    """Let a request have ``tokens`` tokens, the first of those that it was made with."""
    request.prompt_token_ids = request.prompt_token_ids or request.all_token_ids
    request.all_token_ids, request.num_tokens = request.prompt_token_ids[:tokens], tokens


def test_drafts_are_never_stored(engine: Engine, cache: Cache) -> None:
    """The step computes three drafts after the last known token. Two of them would complete a chunk."""
    (request,) = run(engine, cache, 1)
    know(request, 2 * CHUNK_TOKENS - 2)
    request.num_computed_tokens = 2 * CHUNK_TOKENS - 3
    engine.step(1 + 3)
    (stored,) = cache.receive(Reserve).runs
    assert len(stored.keys) // 32 == 1
    request.num_computed_tokens -= 3  # All of them are rejected, and the request ends.
    know(request, 2 * CHUNK_TOKENS - 1)
    engine.finish(request)
    engine.step(0)
    assert cache.nothing_received()


@pytest.mark.parametrize("lookahead", [1, 3])
def test_chunk_waits_for_the_tokens_that_its_drafts_read_ahead(
    engine: Engine, cache: Cache, lookahead: int
) -> None:
    """It is not backlog then: a step stores any number of such chunks."""
    engine.scheduler._lookahead = lookahead
    engine.scheduler._saves.backlog = 0
    (request,) = run(engine, cache, 1)
    know(request, 6 * CHUNK_TOKENS)
    engine.step(6 * CHUNK_TOKENS)
    first = cache.receive(Reserve)
    assert len(first.runs[0].keys) // 32 == 5
    cache.answer(first)
    know(request, 6 * CHUNK_TOKENS + lookahead)
    wait_for_replies(engine)
    engine.step(1)
    (stored,) = cache.receive(Reserve).runs
    assert len(stored.keys) // 32 == 1


def test_lookup_covers_chunks_with_known_lookahead(engine: Engine, cache: Cache) -> None:
    engine.scheduler._lookahead = 1
    engine.arrive(make_request(4 * CHUNK_TOKENS))
    assert cache.receive(Lookup).tokens == 3 * CHUNK_TOKENS
    engine.arrive(make_request(4 * CHUNK_TOKENS + 1))
    assert cache.receive(Lookup).tokens == 4 * CHUNK_TOKENS + 1


def test_late_answer_is_used_while_the_request_holds_its_blocks(engine: Engine, cache: Cache) -> None:
    kept, preempted, aborted, freed = run(engine, cache, 4)
    table = engine.table

    def table_without_freed(request: Any) -> tuple[list[int], ...]:
        return ([0] * 8,) if request is freed else table(request)

    engine.table = table_without_freed  # type: ignore[method-assign]
    engine.step()
    reserve = cache.receive(Reserve)
    preempted.num_preemptions = 1
    aborted.status = RequestStatus.FINISHED_ABORTED
    engine.running.remove(aborted)
    assert not engine.scheduler.finished(aborted, table(aborted))[0]
    grant(engine, cache, reserve)
    engine.step()
    (job,) = engine.worker.saves  # type: ignore[attr-defined]
    assert (job.request_id, job.leases, job.last) == (kept.request_id, [1], False)
    assert job.chunks[0].blocks == ([1, 2],)
    assert sorted(cache.receive(Abandon).leases) == [2, 3, 4]
    cache.receive(Reserve)


def test_step_does_not_wait_for_room(engine: Engine, cache: Cache, waits: list[float]) -> None:
    """The next step is soon enough for chunks whose blocks the request keeps."""
    run(engine, cache, 1)
    waits.clear()
    engine.step()
    assert waits == []
    grant(engine, cache)
    engine.step(1)
    assert waits == []
    assert [job.leases for job in engine.worker.saves] == [[1]]  # type: ignore[attr-defined]


def test_chunk_of_preempted_request_is_stored_when_computed_again(engine: Engine, cache: Cache) -> None:
    (request,) = run(engine, cache, 1)
    engine.step()
    first = cache.receive(Reserve)
    request.num_preemptions, request.num_computed_tokens = 1, 0
    grant(engine, cache, first)
    engine.step(0)
    assert cache.receive(Abandon).leases == [1]
    engine.step()
    assert [run.keys for run in cache.receive(Reserve).runs] == [run.keys for run in first.runs]


def test_unscheduled_request_keeps_its_reservation(engine: Engine, cache: Cache) -> None:
    (request,) = run(engine, cache, 1)
    engine.step()
    grant(engine, cache)
    engine.running.remove(request)
    engine.step()
    assert not engine.worker.saves  # type: ignore[attr-defined]
    engine.running.append(request)
    engine.step(0)
    assert [job.leases for job in engine.worker.saves] == [[1]]  # type: ignore[attr-defined]
    assert cache.nothing_received()


def test_blocks_of_finished_request_are_kept_until_its_answer_arrives(engine: Engine, cache: Cache) -> None:
    (request,) = run(engine, cache, 1)
    engine.step()
    reserve = cache.receive(Reserve)
    assert engine.finish(request)
    engine.step()
    assert not engine.freed
    grant(engine, cache, reserve)
    engine.step()
    assert [(job.leases, job.last) for job in engine.worker.saves] == [([1], False), ([], True)]  # type: ignore[attr-defined]
    assert engine.freed == {request.request_id}


def test_prompt_without_an_answer_is_stored_to_its_end(engine: Engine, cache: Cache) -> None:
    """It was pooled: there is no token without KV."""
    (request,) = run(engine, cache, 1, CHUNK_TOKENS)
    engine.step()
    reserve = cache.receive(Reserve)
    assert engine.finish(request)
    cache.answer(reserve)
    wait_for_replies(engine)
    engine.step()
    assert [(job.leases, job.last) for job in engine.worker.saves] == [([1], False), ([], True)]  # type: ignore[attr-defined]


def test_blocks_are_not_kept_for_unresponsive_cache_process(engine: Engine, cache: Cache) -> None:
    (request, late) = run(engine, cache, 2)
    engine.step()
    reserve = cache.receive(Reserve)
    assert engine.finish(request)
    wait_until(lambda: (engine.step(0), not engine.bridges[0].responsive)[1])
    assert engine.freed == {request.request_id}
    assert not engine.finish(late), "it is known to be unresponsive"
    grant(engine, cache, reserve)
    engine.step()
    assert cache.receive(Abandon) == Abandon([1, 2])


def test_lookups_end_when_cache_process_becomes_unresponsive(engine: Engine, cache: Cache) -> None:
    engine.arrive(make_request(4 * CHUNK_TOKENS))
    engine.step()
    assert len(engine.waiting) == 1
    wait_until(lambda: (engine.step(), not engine.waiting)[1])
    assert not engine.bridges[0].responsive
    ticket = cache.receive(Lookup).ticket
    engine.arrive(make_request(4 * CHUNK_TOKENS))
    engine.step()
    assert not engine.waiting, "later requests do not wait"
    cache.send(Found(ticket, [], [], [], 0))
    wait_until(lambda: (engine.step(), engine.bridges[0].responsive)[1])
    engine.arrive(make_request(4 * CHUNK_TOKENS))
    engine.step()
    assert engine.waiting


def test_request_waits_while_its_chunks_arrive(
    engine: Engine, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(4 * CHUNK_TOKENS)
    engine.scheduler.on_new_request(request)
    timeout = engine.scheduler._requests[request.request_id].lookup.timeout
    ticket = cache.receive(Lookup).ticket
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    bridge = engine.bridges[0]
    lookup = bridge._lookups[ticket]
    for remaining in (4, 3, 2, 1):
        cache.send(Found(ticket, [], [], [], remaining))
        wait_until(lambda remaining=remaining: (bridge.poll(), lookup.fetching == remaining)[1])
        clock[0] += 0.9 * timeout
        assert engine.scheduler.matched_tokens(request, 0) == (None, False)
    clock[0] += 0.2 * timeout
    assert engine.scheduler.matched_tokens(request, 0) == (0, False), "no chunk arrived within the timeout"


def test_lost_connection_discards_granted_leases(engine: Engine, cache: Cache) -> None:
    """Lease numbers of one process are meaningless to its successor."""
    (request,) = run(engine, cache, 1)
    engine.step()
    grant(engine, cache)
    engine.running.remove(request)
    cache.disconnect()
    cache._epoch = 8
    wait_until(lambda: (engine.step(), not engine.bridges[0].connected)[1])
    engine.bridges[0].ready()
    cache.greet()
    wait_until(engine.bridges[0].ready)
    request.num_preemptions = 1
    engine.running.append(request)
    engine.step(0)
    assert not engine.worker.saves  # type: ignore[attr-defined]
    assert cache.nothing_received()


def test_reset_waits_for_a_second_at_most_and_not_at_all_if_unresponsive(
    engine: Engine, cache: Cache, waits: list[float]
) -> None:
    run(engine, cache, 1)
    engine.scheduler.reset()
    assert max(waits) < 1.01 * scheduler_module.CLEAR_SECONDS
    assert sum(waits) < 10 * scheduler_module.CLEAR_SECONDS
    clear = cache.receive(Clear)
    wait_until(lambda: (engine.step(0), not engine.bridges[0].responsive)[1])
    waits.clear()
    engine.scheduler.reset()
    assert not waits
    cache.send(Cleared(clear.ticket, 5))
    wait_until(lambda: (engine.step(0), engine.bridges[0].responsive)[1])


def test_fewer_tokens_than_were_found(engine: Engine, cache: Cache) -> None:
    """Another part of the engine has fewer: the rest is neither loaded nor counted."""
    request = make_request(4 * CHUNK_TOKENS)
    engine.scheduler.on_new_request(request)
    look_up = cache.receive(Lookup)
    cache.send(Found(look_up.ticket, [1, 2, 3, 4], [0, 4096, 8192, 12288], [0] * 4, 0))
    found = 4 * CHUNK_TOKENS
    wait_until(lambda: engine.scheduler.matched_tokens(request, 0) == (found, True))
    engine.scheduler.allocated(request, engine.blocks([0] * 64), 2 * CHUNK_TOKENS)
    engine.step()
    [load] = engine.worker.loads  # type: ignore[attr-defined]
    assert load.leases == [1, 2]
    assert engine.scheduler.hits_by_medium(request) == {"cpu": 2 * CHUNK_TOKENS}


def test_later_lookups_of_a_request_are_marked(engine: Engine, cache: Cache) -> None:
    """A recording counts each request once: a preempted one is looked up again."""
    request = make_request(2 * CHUNK_TOKENS)
    engine.scheduler.on_new_request(request)
    first = cache.receive(Lookup)
    cache.send(Found(first.ticket, [], [], [], 0))
    wait_until(lambda: engine.scheduler.matched_tokens(request, 0) == (0, False))
    engine.scheduler.allocated(request, engine.blocks([]), 0)
    request.num_preemptions = 1
    engine.scheduler.matched_tokens(request, 0)
    again = cache.receive(Lookup)
    assert (first.keys, first.repeated, again.repeated) == (again.keys, False, True)


def test_load_that_lost_its_cache_process_fails(engine: Engine, cache: Cache) -> None:
    """The engine waits for a load that it was promised: the workers report it, as failed."""
    request = make_request(2 * CHUNK_TOKENS)
    engine.scheduler.on_new_request(request)
    look_up = cache.receive(Lookup)
    cache.send(Found(look_up.ticket, [1, 2], [0, 4096], [0] * 2, 0))
    wait_until(lambda: engine.scheduler.matched_tokens(request, 0) == (2 * CHUNK_TOKENS, True))
    engine.bridges[0]._drop()
    engine.scheduler.allocated(request, engine.blocks([0] * 64), 2 * CHUNK_TOKENS)
    engine.step()
    [load] = engine.worker.loads  # type: ignore[attr-defined]
    assert (load.request_id, load.failure, load.chunks) == (request.request_id, LOST, [])


def finish_load(engine: Engine, request: Any, *, failed: bool = False) -> None:
    """Report a load as the workers do."""
    done = {request.request_id}
    failures = done if failed else set()
    output = KVConnectorOutput(finished_recving=done, failed_recving=failures)
    engine.scheduler.update_from_output(output)


class Streamed:
    """A request of four chunks, whose first one is in memory."""

    def __init__(self, engine: Engine, cache: Cache) -> None:
        self.engine = engine
        self.cache = cache
        self.request = make_request(4 * CHUNK_TOKENS)
        engine.scheduler.on_new_request(self.request)
        self.ticket = cache.receive(Lookup).ticket
        self.lookup = engine.bridges[0]._lookups[self.ticket]

    def find(self, leases: list[int], fetching: int, **more: Any) -> None:
        """Receive an answer to the lookup; the other chunks of it are in flight from the disk."""
        known = len(self.lookup.leases) + len(leases)
        more = {"pending_sources": [(1, fetching)] if fetching else [], **more}
        offsets = [4096 * lease for lease in leases]
        self.cache.send(Found(self.ticket, leases, offsets, [0] * len(leases), fetching, **more))
        bridge = self.engine.bridges[0]
        wait_until(
            lambda: (bridge.poll(), (len(self.lookup.leases), self.lookup.fetching) == (known, fetching))[1]
        )

    def matched(self, local: int = 0) -> tuple[int | None, bool]:
        return self.engine.scheduler.matched_tokens(self.request, local)

    def begin(self, tokens: int = 4 * CHUNK_TOKENS) -> None:
        """Let vLLM allocate the blocks of a hit."""
        assert self.matched() == (tokens, True)
        self.allocate(tokens)

    def allocate(self, tokens: int) -> None:
        self.engine.scheduler.allocated(self.request, self.engine.blocks(list(range(1, 65))), tokens)

    def sent(self) -> list[tuple[list[int], bool]]:
        """Run a step, and return the jobs that the workers receive: their leases, and if more follow."""
        worker: Any = self.engine.worker
        worker.loads.clear()
        self.engine.step()
        return [(job.leases, job.more) for job in worker.loads]


@pytest.fixture
def streamed(engine: Engine, cache: Cache) -> Streamed:
    return Streamed(engine, cache)


def test_chunks_are_loaded_as_they_arrive(streamed: Streamed, cache: Cache) -> None:
    streamed.find([1], 3)
    streamed.begin()
    assert streamed.sent() == [([1], True)]
    assert streamed.sent() == []
    streamed.find([2, 3], 1)
    assert streamed.sent() == [([2, 3], True)]
    streamed.find([4], 0)
    assert streamed.sent() == [([4], False)]
    assert streamed.sent() == []
    assert cache.nothing_received(), "the leases are held until the workers have reported the load"
    finish_load(streamed.engine, streamed.request)
    assert cache.receive(Cancel).ticket == streamed.ticket
    assert streamed.engine.bridges[0]._in_use == set()


def test_blocks_of_each_job_are_those_of_its_chunks(streamed: Streamed) -> None:
    streamed.find([1], 3)
    streamed.begin()
    streamed.sent()
    streamed.find([2, 3, 4], 0)
    streamed.sent()
    worker: Any = streamed.engine.worker
    assert [(copy.offset, copy.blocks) for copy in worker.loads[0].chunks] == [
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


def test_missing_chunk_costs_only_the_rest(streamed: Streamed, cache: Cache) -> None:
    """The load fails, and what has arrived is loaded again, without another lookup."""
    streamed.find([1, 2], 2)
    streamed.begin()
    assert streamed.sent() == [([1, 2], True)]
    streamed.find([3], 0)
    assert streamed.sent() == [([], False)]
    worker: Any = streamed.engine.worker
    assert worker.loads[0].failure == "only 96 of 128 tokens have arrived"
    finish_load(streamed.engine, streamed.request, failed=True)
    streamed.begin(3 * CHUNK_TOKENS)
    assert streamed.sent() == [([1, 2, 3], False)]
    assert cache.nothing_received()
    finish_load(streamed.engine, streamed.request, failed=True)
    assert cache.receive(Cancel).ticket == streamed.ticket
    assert streamed.matched() == (0, False), "another failure is not retried"


def test_chunk_that_is_lost_before_the_allocation_fails_the_load(streamed: Streamed, cache: Cache) -> None:
    """vLLM takes what was reported for computed, unless the load fails."""
    streamed.find([1, 2], 2)
    assert streamed.matched() == (4 * CHUNK_TOKENS, True)
    streamed.find([], 0)
    streamed.allocate(4 * CHUNK_TOKENS)
    assert streamed.sent() == [([], False)]
    worker: Any = streamed.engine.worker
    assert worker.loads[0].failure == "only 64 of 128 tokens have arrived"
    finish_load(streamed.engine, streamed.request, failed=True)
    streamed.begin(2 * CHUNK_TOKENS)
    assert streamed.sent() == [([1, 2], False)]
    assert cache.nothing_received()
    finish_load(streamed.engine, streamed.request)
    stats = streamed.engine.scheduler.take_stats()
    assert stats is not None
    counts = stats.data
    assert counts["hit_tokens/ram"] == 2 * CHUNK_TOKENS, "of the load that has succeeded"
    assert "failed_loads" not in counts, "nothing that was found is computed"


def test_cancelled_request_stops_its_load(streamed: Streamed, cache: Cache) -> None:
    """vLLM frees its blocks once the workers have reported the load, and until then copies may run."""
    streamed.find([1], 3)
    streamed.begin()
    streamed.sent()
    streamed.find([2], 2)
    streamed.request.status = RequestStatus.FINISHED_ABORTED
    streamed.engine.scheduler.finished(streamed.request, ([],))
    assert streamed.sent() == [([], False)]
    worker: Any = streamed.engine.worker
    assert not worker.loads[0].failure
    assert cache.nothing_received()
    finish_load(streamed.engine, streamed.request)
    assert cache.receive(Cancel).ticket == streamed.ticket
    assert streamed.sent() == []


def test_connection_lost_during_a_load(streamed: Streamed) -> None:
    streamed.find([1], 3)
    streamed.begin()
    streamed.sent()
    streamed.engine.bridges[0]._drop()
    assert streamed.sent() == [([], False)]
    worker: Any = streamed.engine.worker
    assert worker.loads[0].failure == LOST
    finish_load(streamed.engine, streamed.request, failed=True)
    assert streamed.matched() == (0, False)


def test_stalled_load_fails(streamed: Streamed, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed.find([1], 3)
    streamed.begin()
    streamed.sent()
    timeout = streamed.engine.scheduler._requests[streamed.request.request_id].lookup.timeout
    clock = [time.monotonic() + 0.9 * timeout]
    monkeypatch.setattr(lookups.time, "monotonic", lambda: clock[0])
    assert streamed.sent() == []
    clock[0] += 0.2 * timeout
    assert streamed.sent() == [([], False)]
    finish_load(streamed.engine, streamed.request, failed=True)
    assert cache.receive(Cancel).ticket == streamed.ticket


@pytest.mark.parametrize("allocated", ["before", "after"])
@pytest.mark.parametrize("equal", [2, 1, 0])
def test_chunk_that_only_begins_like_the_prompt_is_compared_before_it_is_loaded(
    streamed: Streamed, equal: int, allocated: str
) -> None:
    """Until it has arrived, only one byte of each of its block hashes is known.

    If more blocks of it are equal than was reported, vLLM has allocated none for those.
    """
    state = streamed.engine.scheduler._requests[streamed.request.request_id]
    hashes = state.block_hashes(CHUNK_TOKENS, 2 * CHUNK_TOKENS)
    hashes = hashes[: equal * BLOCK_HASH_BYTES] + bytes(len(hashes) - equal * BLOCK_HASH_BYTES)
    parent = state.parent(1)
    found = CHUNK_TOKENS + stepping.BLOCK_TOKENS
    streamed.find([1], 1, last_tokens=CHUNK_TOKENS, likely_blocks=1)
    assert streamed.matched() == (found, True)
    if allocated == "before":
        streamed.allocate(found)
        assert streamed.sent() == [([1], True)]
    streamed.find([2], 0, last_tokens=CHUNK_TOKENS, block_hashes=hashes, parent=parent)
    if allocated == "after":
        streamed.allocate(found)
    first = [1] if allocated == "after" else []
    assert streamed.sent() == [([*first, 2] if equal == 1 else [], False)]
    finish_load(streamed.engine, streamed.request, failed=equal != 1)
    if equal != 1:
        streamed.begin(CHUNK_TOKENS + equal * stepping.BLOCK_TOKENS)
        assert streamed.sent() == [([1, 2] if equal else [1], False)]


@pytest.fixture
def with_states(engine: Engine) -> SchedulerSide:
    """The scheduler side of a model that keeps a state as well."""
    groups = GroupLayout(stepping.BLOCK_TOKENS, (1024,)), GroupLayout(CHUNK_TOKENS, (1024,), state=True)
    model = ModelLayout(ChunkLayout(CHUNK_TOKENS, groups), bytes(32), (), group_ids=(0, 1))
    settings = Settings(chunk_tokens=CHUNK_TOKENS)
    engine.scheduler = SchedulerSide(
        settings, model, engine.bridges[0], weights=EngineWeights("", lambda _: bytes(32))
    )
    return engine.scheduler


def test_room_for_states_is_requested_with_the_lookup(with_states: SchedulerSide, cache: Cache) -> None:
    """The first step may be the only one that leaves them."""
    request = make_request(4 * CHUNK_TOKENS + 1)
    with_states.on_new_request(request)
    look_up = cache.receive(Lookup)
    ends = split_keys(look_up.keys)[2:]
    assert {run.keys for run in cache.receive(Reserve).runs} == {state_key(key) for key in ends}


def test_no_room_for_states_is_requested_while_pools_are_asked(
    with_states: SchedulerSide, engine: Engine, cache: Cache
) -> None:
    """What has room to be stored would not be fetched from a pool. It is requested in the first step."""
    bridge = engine.bridges[0]
    assert bridge.welcome is not None
    bridge.welcome = msgspec.structs.replace(bridge.welcome, pools=True)
    request = make_request(4 * CHUNK_TOKENS + 1)
    with_states.on_new_request(request)
    look_up = cache.receive(Lookup)
    assert cache.nothing_received()
    cache.send(Found(look_up.ticket, [], [], [], 0))
    wait_until(lambda: with_states.matched_tokens(request, 0) == (0, False))
    engine.admit(request)
    engine.step(0)
    ends = split_keys(look_up.keys)[2:]
    assert {run.keys for run in cache.receive(Reserve).runs} == {state_key(key) for key in ends}


def test_prompt_that_is_not_looked_up_does_not_wait_for_pools(
    with_states: SchedulerSide, engine: Engine, cache: Cache
) -> None:
    bridge = engine.bridges[0]
    assert bridge.welcome is not None
    bridge.welcome = msgspec.structs.replace(bridge.welcome, pools=True)
    request = make_request(4 * CHUNK_TOKENS + 1, kv_transfer_params={"kvtier": {"cache": "write"}})
    with_states.on_new_request(request)
    assert len(cache.receive(Reserve).runs) == 2


def test_long_queue_reserves_room_for_few_states(with_states: SchedulerSide, cache: Cache) -> None:
    """One of 40 MB per request would evict the whole cache."""
    reserved = 0
    for _ in range(20):
        with_states.on_new_request(make_request(4 * CHUNK_TOKENS + 1))
        cache.receive(Lookup)
        if not cache.nothing_received():
            reserved += len(cache.answer(cache.receive(Reserve), first=reserved + 1))
            wait_until(lambda: (with_states._bridge.poll(), with_states._saves.possible)[1])
    assert MAX_EARLY_STATES <= reserved <= MAX_EARLY_STATES + 1


@pytest.fixture
def with_windows(engine: Engine) -> SchedulerSide:
    """The scheduler side of a model with a window, whose steps compute up to four chunks."""
    layout = ChunkLayout(CHUNK_TOKENS, (GroupLayout(stepping.BLOCK_TOKENS, (1024,), window=CHUNK_TOKENS),))
    engine.scheduler = SchedulerSide(
        Settings(chunk_tokens=CHUNK_TOKENS),
        ModelLayout(layout, bytes(32), (), group_ids=(0,)),
        engine.bridges[0],
        weights=EngineWeights("", lambda _: bytes(32)),
        step_tokens=4 * CHUNK_TOKENS,
    )
    return engine.scheduler


def saved(engine: Engine) -> list[int]:
    return [chunk.lease for job in engine.worker.saves for chunk in job.chunks]  # type: ignore[attr-defined]


def test_with_windows_room_is_requested_with_the_lookup(
    with_windows: SchedulerSide, engine: Engine, cache: Cache, waits: list[float]
) -> None:
    """Before the step after the prompt's, vLLM frees all blocks but those of the last chunk."""
    request = make_request(4 * CHUNK_TOKENS)
    start(engine, cache, request)
    leases = grant(engine, cache)
    waits.clear()
    engine.step(4 * CHUNK_TOKENS)
    assert saved(engine) == leases == [1, 2, 3, 4]
    assert not waits
    assert cache.nothing_received()
    assert len(engine.worker.saves) == 1, "one job for each request"  # type: ignore[attr-defined]


def test_with_windows_room_is_requested_a_step_ahead(
    with_windows: SchedulerSide, engine: Engine, cache: Cache
) -> None:
    request = make_request(12 * CHUNK_TOKENS)
    start(engine, cache, request)
    leases: list[int] = []
    for _ in range(3):
        leases += grant(engine, cache, first=len(leases) + 1)
        engine.step(4 * CHUNK_TOKENS)
    assert saved(engine) == leases == list(range(1, 13))
    assert cache.nothing_received()


def test_with_windows_room_before_a_hit_is_given_back(
    with_windows: SchedulerSide, engine: Engine, cache: Cache
) -> None:
    """It was granted although a chunk is held: on a disk, for instance."""
    request = make_request(4 * CHUNK_TOKENS)
    start(engine, cache, request, hit=2)
    grant(engine, cache)
    engine.step(2 * CHUNK_TOKENS)
    assert cache.receive(Abandon).leases == [1, 2]
    assert saved(engine) == [3, 4]


@pytest.mark.parametrize("seconds", [3600, 0])
def test_with_windows_a_request_waits_for_its_room(
    with_windows: SchedulerSide, cache: Cache, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """A busy cache process may answer the lookup before. Not for long, as the prompt can be computed."""
    monkeypatch.setattr(early, "ROOM_SECONDS", seconds)
    request = make_request(CHUNK_TOKENS)
    with_windows.on_new_request(request)
    cache.send(Found(cache.receive(Lookup).ticket, [], [], [], 0))
    state = with_windows._requests[request.request_id]
    wait_until(lambda: with_windows._bridge.found(state.lookup.ticket or 0).final)  # type: ignore[union-attr]
    if seconds:
        assert with_windows.matched_tokens(request, 0) == (None, False)
        cache.answer(cache.receive(Reserve))
        wait_until(lambda: with_windows.matched_tokens(request, 0) == (0, False))
    assert with_windows.matched_tokens(request, 0) == (0, False)


def test_with_windows_a_late_answer_is_read_before_room_is_requested(
    with_windows: SchedulerSide, cache: Cache
) -> None:
    """An idle engine has not read it, and nothing is reserved while an answer is late."""
    bridge = with_windows._bridge
    assert bridge.await_reply(bridge.reserve([]), 0.001) is None
    assert bridge.late
    cache.answer(cache.receive(Reserve))
    bridge._polled_at = 0.0
    with_windows.on_new_request(make_request(CHUNK_TOKENS))
    cache.receive(Lookup)
    assert len(cache.receive(Reserve).runs) == 1


def test_with_windows_no_room_is_requested_for_chunks_that_are_pushed_here(
    with_windows: SchedulerSide, engine: Engine, cache: Cache
) -> None:
    """A peer cannot push a chunk that has room to be stored, and the request would wait for it."""
    request = make_request(
        4 * CHUNK_TOKENS, kv_transfer_params={"kvtier": {"expect": {"tokens": 2 * CHUNK_TOKENS}}}
    )
    with_windows.on_new_request(request)
    look_up = cache.receive(Lookup)
    assert look_up.expect_chunks == 2
    assert cache.nothing_received()
    cache.send(Found(look_up.ticket, [], [], [], 0))
    wait_until(lambda: with_windows.matched_tokens(request, 0) == (0, False))
    engine.admit(request)
    engine.step(2 * CHUNK_TOKENS)
    assert len(split_keys(cache.receive(Reserve).runs[0].keys)) == 2, "once the lookup has ended"


@pytest.mark.parametrize("end", ["aborted", "adapter-loaded-again", "preempted"])
def test_with_windows_room_for_chunks_that_are_not_computed_is_given_back(
    with_windows: SchedulerSide, engine: Engine, cache: Cache, end: str
) -> None:
    request = make_request(4 * CHUNK_TOKENS)
    start(engine, cache, request)
    grant(engine, cache)
    engine.step(0)
    assert saved(engine) == []
    if end == "aborted":
        request.status = RequestStatus.FINISHED_ABORTED
        with_windows.finished(request, ([],))
    elif end == "adapter-loaded-again":
        with_windows._requests[request.request_id].adapter = Adapter("adapter", "", replaced=True)
        with_windows.finished(request, ([],))
    else:
        request.num_preemptions += 1
        engine.step(0)
    assert sorted(cache.receive(Abandon).leases) == [1, 2, 3, 4]


def test_with_windows_room_for_replaced_tokens_is_given_back(
    with_windows: SchedulerSide, engine: Engine, cache: Cache
) -> None:
    """A continued session: other tokens are not stored under the keys of those before them."""
    request = make_request(4 * CHUNK_TOKENS)
    start(engine, cache, request)
    grant(engine, cache)
    request.all_token_ids = [0, *request.all_token_ids]
    request.num_prompt_tokens = request.num_tokens = 4 * CHUNK_TOKENS + 1
    engine.step(4 * CHUNK_TOKENS)
    assert cache.receive(Abandon).leases == [1, 2, 3, 4]
    assert saved(engine) == []


def test_long_queue_reserves_no_more_room_than_a_step_needs(
    with_windows: SchedulerSide, cache: Cache
) -> None:
    reserved = 0
    for _ in range(20):
        with_windows.on_new_request(make_request(3 * CHUNK_TOKENS))
        cache.receive(Lookup)
        if not cache.nothing_received():
            reserved += len(cache.answer(cache.receive(Reserve), first=reserved + 1))
            wait_until(lambda: (with_windows._bridge.poll(), with_windows._saves.possible)[1])
    assert reserved == 4


def test_hit_is_counted_after_the_cache_process_was_replaced(streamed: Streamed) -> None:
    """The other one may have fewer tiers."""
    streamed.find([1, 2, 3, 4], 0)
    streamed.begin()
    streamed.sent()
    bridge = streamed.engine.bridges[0]
    assert bridge.welcome is not None
    bridge.welcome = msgspec.structs.replace(bridge.welcome, tiers=[], media=[])
    finish_load(streamed.engine, streamed.request)
    scheduler = streamed.engine.scheduler
    stats = scheduler.take_stats()
    assert stats is not None
    assert stats.data["hit_tokens/ram"] == 4 * CHUNK_TOKENS
    assert scheduler.hits_by_medium(streamed.request) == {"cpu": 4 * CHUNK_TOKENS}


def test_after_a_hit_room_is_requested_for_states_that_continue_it(
    with_states: SchedulerSide, engine: Engine, cache: Cache
) -> None:
    request = make_request(4 * CHUNK_TOKENS + 1)
    with_states.on_new_request(request)
    look_up = cache.receive(Lookup)
    early = cache.answer(cache.receive(Reserve))
    cache.send(Found(look_up.ticket, [11, 12, 13], [0, 4096, 8192], [0, 0, 0], 0))
    hit = 2 * CHUNK_TOKENS
    wait_until(lambda: with_states.matched_tokens(request, 0) == (hit, True))
    with_states.allocated(request, SimpleNamespace(get_block_ids=lambda: ([1] * 8, [2] * 8)), hit)
    engine.admit(request)
    engine.step(0)
    assert sorted(cache.receive(Abandon).leases) == early
    runs = cache.receive(Reserve).runs
    assert {run.extends for run in runs} == {split_keys(look_up.keys)[1]}


def test_lookup_reports_how_long_the_prompt_takes_to_compute(
    engine: Engine, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other prompts have taken, from their first step to their first token. Decoding does not count."""
    clock = [100.0]
    monkeypatch.setattr(lookups.time, "monotonic", lambda: clock[0])
    for _ in range(MIN_SAMPLES):
        request = make_request(4 * CHUNK_TOKENS, kv_transfer_params={"kvtier": {"cache": "read"}})
        assert start(engine, cache, request).compute_seconds == 0
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


def test_request_with_the_cache_off_is_not_even_hashed(engine: Engine, cache: Cache) -> None:
    request = switched("off", all_token_ids=None)
    engine.run(request)
    engine.step()
    assert not engine.finish(request)
    assert engine.scheduler._requests == {}
    assert cache.nothing_received()


def test_reading_request_stores_nothing(engine: Engine, cache: Cache) -> None:
    """Not when a step completes a chunk, and not at its end."""
    request = switched("read")
    engine.scheduler.on_new_request(request)
    look_up = cache.receive(Lookup)
    cache.send(Found(look_up.ticket, [1], [0], [0], 0))
    wait_until(lambda: engine.scheduler.matched_tokens(request, 0) == (CHUNK_TOKENS, True))
    engine.scheduler.allocated(request, engine.blocks([0] * 64), CHUNK_TOKENS)
    engine.admit(request)
    request.num_computed_tokens = CHUNK_TOKENS
    engine.step()
    assert [job.leases for job in engine.worker.loads] == [[1]]  # type: ignore[attr-defined]
    engine.step()
    finish_load(engine, request)
    assert cache.receive(Cancel).ticket == look_up.ticket
    assert not engine.finish(request)
    assert cache.nothing_received()


def test_writing_request_looks_nothing_up(engine: Engine, cache: Cache) -> None:
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
    pool = BlockPool(16, True, stepping.BLOCK_TOKENS, enable_kv_cache_events=True)
    manager: Any = SimpleNamespace(block_pool=pool, kv_cache_event_metadata=(("full_attention", None),))
    engine.scheduler.publish_events(manager)
    engine.scheduler.bind(pool)
    return engine


def test_chunks_of_a_prompt_are_published_before_they_are_stored_here(
    publishing: Engine, cache: Cache
) -> None:
    """They may be held already, from an earlier run or another engine."""
    publishing.scheduler.on_new_request(described_request(4))
    keys = cache.receive(Lookup).keys
    assert list(publishing.scheduler.events()) == []
    assert cache.receive(Watch).keys == keys
    cache.send(Held(keys, [1, 1, 2, 0]))
    bridge = publishing.bridges[0]
    wait_until(lambda: (bridge.poll(), len(bridge._held) == 4)[1])
    events = list(publishing.scheduler.events())
    assert [event.medium for event in events] == ["CPU", "CPU", "STORAGE"]


def test_stored_chunks_are_watched_once(publishing: Engine, cache: Cache) -> None:
    request = described_request(2)
    look_up = start(publishing, cache, request)
    publishing.scheduler.events()
    assert cache.receive(Watch).keys == look_up.keys
    publishing.step()
    cache.receive(Reserve)
    publishing.scheduler.events()
    assert cache.nothing_received()


def test_chunks_that_are_first_computed_here_are_watched(publishing: Engine, cache: Cache) -> None:
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


def test_chunks_of_earlier_weights_are_removed_and_not_watched(publishing: Engine, cache: Cache) -> None:
    """Before any of the new weights is published: they have the same blocks for a router."""
    bridge = publishing.bridges[0]
    request = described_request(2)
    publishing.scheduler.on_new_request(request)
    keys = cache.receive(Lookup).keys
    publishing.scheduler.events()
    cache.receive(Watch)
    cache.send(Held(keys, [1, 1]))
    wait_until(lambda: (bridge.poll(), len(bridge._held) == 2)[1])
    stored = list(publishing.scheduler.events())
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
    wait_until(lambda: (bridge.poll(), len(bridge._held) == 4)[1])
    assert [event.block_hashes for event in publishing.scheduler.events()] == [
        event.block_hashes for event in stored
    ]


def test_change_in_vllms_internals_disables_events_only(
    publishing: Engine, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    publishing.scheduler.on_new_request(make_request(CHUNK_TOKENS))  # Without hashes.
    cache.receive(Lookup)
    assert list(publishing.scheduler.events()) == []
    assert "KV events of the tiers are disabled" in caplog.text
    caplog.clear()
    run(publishing, cache, 1)
    publishing.step()
    cache.receive(Reserve)
    assert list(publishing.scheduler.events()) == []
    assert caplog.text == ""
