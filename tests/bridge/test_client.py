"""Bridge clients: a slow, stopped, killed or replaced cache process never blocks the engine."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.bridge import client
from kvtier.bridge.client import SchedulerBridge, status
from kvtier.bridge.protocol import (
    VERSION,
    Abandon,
    Cancel,
    Confirm,
    Confirmed,
    Found,
    Held,
    Lookup,
    Notice,
    Reserve,
    Reserved,
    Run,
)
from kvtier.errors import ChannelError, ProtocolError
from kvtier.memory.header import HEADER_BYTES
from kvtier.memory.keys import KEY_BYTES, ChunkKey, join_keys
from kvtier.pipeline.query import Query
from kvtier.rpc.client import MIN_RETRY_SECONDS
from kvtier.rpc.frames import Ping, Pong
from tests.rigs.bridges import (
    CHUNK_TOKENS,
    KEYS,
    ROOT,
    Start,
    confirm,
    connect,
    hello,
    lose_connection,
    reserve,
    store,
    wait_for_reply,
)
from tests.rigs.scripted_server import scheduler_of, worker_of
from tests.rigs.waiting import wait_until

TOKENS = CHUNK_TOKENS * len(KEYS)


@pytest.fixture
def running(tmp_path: Path, start: Start) -> subprocess.Popen[str]:
    return start()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


def held_by_engine(path: Path) -> dict[str, int]:
    """Return what the only engine holds."""
    (engine,) = status(path)["engines"]
    return {name: engine[name] for name in ("leases", "reservations", "tickets")}


NOTHING_HELD = {"leases": 0, "reservations": 0, "tickets": 0}


@pytest.mark.usefixtures("running")
def test_found_chunks_are_leased_until_released(path: Path) -> None:
    scheduler, worker = store(path, KEYS)
    ticket = scheduler.look_up(Query(KEYS, TOKENS))
    assert ticket is not None
    lookup = scheduler.found(ticket, wait=60)
    assert lookup is not None
    assert (len(lookup.leases), lookup.final, set(lookup.sources)) == (len(KEYS), True, {0})
    assert worker.arena is not None
    payload = worker.arena.view(lookup.offsets[3] + HEADER_BYTES, KEY_BYTES)
    assert payload == KEYS[3]
    assert confirm(worker, lookup.leases)
    assert held_by_engine(path)["leases"] == len(KEYS)
    scheduler.cancel(ticket)
    assert not confirm(worker, lookup.leases)
    wait_until(lambda: held_by_engine(path) == NOTHING_HELD)


@pytest.mark.usefixtures("running")
def test_cancelled_lookup_releases_everything(path: Path) -> None:
    scheduler, _ = store(path, KEYS)
    unanswered = scheduler.look_up(Query(KEYS, TOKENS))
    answered = scheduler.look_up(Query(KEYS, TOKENS))
    assert unanswered is not None
    assert answered is not None
    assert scheduler.found(answered, wait=60) is not None
    scheduler.cancel(unanswered)
    scheduler.cancel(answered)
    assert scheduler.found(answered) is None
    wait_until(lambda: held_by_engine(path) == NOTHING_HELD)


def test_stopped_cache_process_delays_only_once_and_leaks_nothing(
    path: Path, running: subprocess.Popen[str]
) -> None:
    scheduler, worker = store(path, KEYS[:4])
    run = Run(KEYS[3], join_keys(KEYS[4:8]), CHUNK_TOKENS)
    running.send_signal(signal.SIGSTOP)
    try:
        late = scheduler.reserve([run])
        assert late is not None
        assert scheduler.await_reply(late, 0.05) is None
        assert scheduler.late
        assert scheduler.reserve([run]) is None, "no request is sent while one is late"
        ticket = scheduler.look_up(Query(KEYS, TOKENS))
        assert ticket is not None
        waited = scheduler.waited
        lookup = scheduler.found(ticket, wait=5)
        assert lookup is not None
        assert not lookup.answered
        assert scheduler.waited == waited, "no second wait"
        assert worker.await_reply(worker.confirm([1]), 0.05) is None
    finally:
        running.send_signal(signal.SIGCONT)
    wait_until(lambda: bool((late := scheduler.found(ticket)) and late.final))
    assert not scheduler.late
    reserved = wait_for_reply(scheduler, late)
    assert all(reserved.leases), "a late reply is matched to its request"
    scheduler.abandon(reserved.leases)
    scheduler.cancel(ticket)
    wait_until(lambda: held_by_engine(path) == NOTHING_HELD)
    assert all(reserve(scheduler, KEYS[3], KEYS[4:8]).leases), "the late reservations were released"


def test_unresponsive_cache_process_gets_no_requests_until_it_answers(
    path: Path, running: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scheduler, _ = store(path, KEYS[:4])
    running.send_signal(signal.SIGSTOP)
    try:
        ticket = scheduler.look_up(Query(KEYS, TOKENS))
        assert ticket is not None
        wait_until(lambda: (scheduler.update(), not scheduler.responsive)[1])
        assert scheduler.look_up(Query(KEYS, TOKENS)) is None
        assert scheduler.reserve([Run(ROOT, KEYS[9], CHUNK_TOKENS)]) is None
        started = time.monotonic()
        assert scheduler.clear(60) is None
        assert time.monotonic() < started + 30
        scheduler.cancel(ticket)
    finally:
        running.send_signal(signal.SIGCONT)
    wait_until(lambda: (scheduler.update(), scheduler.responsive)[1])
    wait_until(lambda: held_by_engine(path) == NOTHING_HELD)
    ticket_after = scheduler.look_up(Query(KEYS, TOKENS))
    assert ticket_after is not None
    scheduler.cancel(ticket_after)
    warnings = [record.message for record in caplog.records if "has not answered" in record.message]
    assert len(warnings) == 1
    assert "1 lookups" in warnings[0]
    assert caplog.text.count("answers again") == 1


def test_stalled_fetch_is_detected_by_probe(path: Path) -> None:
    """During a fetch no request is pending, so a probe checks that the process is alive."""
    with scheduler_of(path) as (cache, scheduler):
        ticket = scheduler.look_up(Query(KEYS, TOKENS))
        assert ticket is not None
        cache.receive(Lookup)
        cache.send(Found(ticket, [], [], [], 40))
        wait_until(lambda: bool((lookup := scheduler.found(ticket)) and lookup.answered))
        assert cache.nothing_received()
        wait_until(lambda: (scheduler.update(), scheduler.probe(), not cache.nothing_received())[2])
        assert scheduler.reserves, "a probe is no reservation"
        cache.send(Pong(cache.receive(Ping).ticket))
        wait_until(lambda: (scheduler.update(), not scheduler.calls)[1])
        assert scheduler.responsive
        wait_until(lambda: (scheduler.update(), scheduler.probe(), not scheduler.responsive)[2])


def test_cache_process_that_never_reads_is_disconnected(path: Path, running: subprocess.Popen[str]) -> None:
    scheduler, _ = store(path, KEYS[:1])
    running.send_signal(signal.SIGSTOP)
    try:
        keys = [ChunkKey(os.urandom(KEY_BYTES)) for _ in range(4096)]
        refused = False
        for _ in range(20):
            refused = refused or scheduler.look_up(Query(keys, CHUNK_TOKENS * len(keys))) is None
        assert refused, "lookups are not queued without limit"
        for _ in range(200):
            scheduler.abandon(list(range(1, 50_000)))
        assert not scheduler.connected
    finally:
        running.send_signal(signal.SIGCONT)


def test_killed_cache_process_is_a_miss_and_successor_is_connected(
    path: Path, running: subprocess.Popen[str], start: Start
) -> None:
    scheduler, worker = store(path, KEYS)
    ticket = scheduler.look_up(Query(KEYS, TOKENS))
    assert ticket is not None
    lookup = scheduler.found(ticket, wait=60)
    assert lookup is not None
    old_epoch, arena = worker.epoch, worker.arena
    assert arena is not None
    running.kill()
    running.wait()
    assert not worker.await_reply(worker.confirm(lookup.leases), 5), "a load in flight is not confirmed"
    assert bytes(arena.view(lookup.offsets[0] + HEADER_BYTES, KEY_BYTES)) == KEYS[0], "memory stays mapped"
    scheduler.poll()
    assert not scheduler.connected
    assert scheduler.found(ticket) is None
    assert scheduler.reserve([Run(ROOT, KEYS[0], CHUNK_TOKENS)]) is None
    start()
    wait_until(lambda: scheduler.ready() and worker.ready(), seconds=4 * MIN_RETRY_SECONDS + 10)
    assert worker.epoch == scheduler.epoch != old_epoch
    ticket_after = scheduler.look_up(Query(KEYS, TOKENS))
    assert ticket_after is not None


def test_missing_cache_process_is_reported_and_retried_rarely(path: Path) -> None:
    scheduler = SchedulerBridge(hello("scheduler"), path)
    with pytest.raises(ChannelError, match="the cache process does not answer on"):
        scheduler.connect()
    started = time.monotonic()
    starts = 0

    def start_one() -> None:
        nonlocal starts
        starts += 1

    scheduler = SchedulerBridge(hello("scheduler"), path, start_one)
    while time.monotonic() < started + 0.3:
        assert scheduler.look_up(Query(KEYS, TOKENS)) is None
    assert starts == 1


@pytest.mark.usefixtures("running")
def test_version_mismatch_is_reported(path: Path) -> None:
    old = hello("scheduler")
    mismatched = type(old)(999, old.engine, old.role, old.rank, old.layout, old.namespace)
    text = f"the client speaks protocol version 999 and the server version {VERSION}: install"
    with pytest.raises(ChannelError, match=text):
        SchedulerBridge(mismatched, path).connect()


@pytest.mark.usefixtures("running")
def test_clear_and_watched_chunks(path: Path) -> None:
    watcher, _ = connect(path, "watcher")
    held: dict[ChunkKey, int] = {}

    def all_are_in(tiers: int) -> bool:
        watcher.poll()
        held.update(watcher.take_held())
        return held == dict.fromkeys(KEYS, tiers)

    assert watcher.watch(KEYS)
    store(path, KEYS)
    wait_until(lambda: all_are_in(0b11))
    assert watcher.clear(5) == len(KEYS)
    wait_until(lambda: all_are_in(0))
    assert watcher.connections == 1


def test_lost_connection_forgets_what_it_reported(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with scheduler_of(path) as (cache, bridge):
        cache.send(Held(join_keys(KEYS[:2]), [1, 2]), Notice("what comes after it"))
        wait_until(lambda: (bridge.poll(), "what comes after it" in caplog.text)[1])
        cache.close()
        wait_until(lambda: (bridge.poll(), not bridge.connected)[1])
        assert bridge.take_held() == {}


def test_malformed_report_ends_the_connection(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with scheduler_of(path) as (cache, bridge):
        cache.send(Held(join_keys(KEYS[:2]), [1]))
        wait_until(lambda: (bridge.poll(), not bridge.connected)[1])
        assert bridge.take_held() == {}
    assert "the tiers of 1 chunks for 2 keys" in caplog.text


@pytest.mark.usefixtures("running")
def test_worker_maps_new_arena_after_reconnect_without_waiting_for_the_old_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may wait 0.2 s for a processor, and unmapping holds the lock that mapping waits for."""
    threads: list[Callable[[], None]] = []
    monkeypatch.setattr(client, "run_in_background", threads.append)
    _, worker = connect(path)
    first = worker.arena
    assert first is not None
    lose_connection(worker)
    wait_until(worker.ready)
    assert worker.arena is not None
    assert worker.arena is not first
    assert len(first.view(0, 1)) == 1, "still mapped"
    (unmap,) = threads
    unmap()
    with pytest.raises(ValueError, match="released"):
        first.view(0, 1)


def test_mismatched_answer_closes_connection(path: Path) -> None:
    with scheduler_of(path) as (cache, scheduler):
        call = scheduler.reserve([Run(ROOT, KEYS[0], 1), Run(ROOT, join_keys(KEYS[1:3]), 1)])
        assert call is not None
        cache.receive(Reserve)
        cache.send(Reserved(call.ticket, [1, 2], [0, 4096]))
        wait_until(lambda: (scheduler.poll(), not scheduler.connected)[1])
        assert isinstance(call.error, ProtocolError)


def test_the_answer_has_room_for_each_chunk_of_each_run(path: Path) -> None:
    with scheduler_of(path) as (cache, scheduler):
        runs = [
            Run(ROOT, KEYS[0], 1, kv_transfer=5),
            Run(ROOT, KEYS[0], 1),
            Run(KEYS[0], join_keys(KEYS[1:3]), 1),
        ]
        call = scheduler.reserve(runs)
        assert call is not None
        assert not scheduler.reserves, "one request at a time"
        assert cache.receive(Reserve) == Reserve(call.ticket, runs)
        answer = Reserved(call.ticket, [4, 5, 0, 7], [0, 64, 0, 128], staging=3)
        cache.send(answer)
        assert wait_for_reply(scheduler, call) == answer
        assert answer.granted == [4, 5, 7]
        assert scheduler.reserves


def test_abandoned_leases_are_sent_to_the_process_of_their_epoch(path: Path) -> None:
    """Scheduler and worker reconnect at different times, and lease numbers are valid in one process only."""
    with worker_of(path) as (cache, worker):
        assert worker.fill([1, 2, 3]) == [True] * 3
        worker.abandon([1, 2], epoch=8)
        worker.abandon([3], epoch=7)
        assert cache.receive(Abandon) == Abandon([3])
        cache.disconnect()
        wait_until(lambda: (worker.poll(), not worker.connected)[1])
        worker.abandon([1], epoch=7)
        for epoch, holding in ((7, [2]), (8, [])):
            cache.epoch = 8
            worker.retry_now()
            assert not worker.ready()
            greeting = cache.greet()
            assert (greeting.epoch, greeting.holding) == (epoch, holding)
            wait_until(worker.ready)
            cache.disconnect()
            wait_until(lambda: (worker.poll(), not worker.connected)[1])


def test_abandoned_leases_are_sent_again_until_it_is_known_that_they_were_handled(path: Path) -> None:
    """Messages keep their order: the answer to a reservation shows that those before it were handled."""

    def reconnect() -> None:
        cache.disconnect()
        wait_until(lambda: (scheduler.poll(), not scheduler.connected)[1])
        scheduler.retry_now()
        assert not scheduler.ready()
        cache.greet()
        wait_until(scheduler.ready)

    with scheduler_of(path) as (cache, scheduler):
        scheduler.abandon([1, 2])
        reconnect()
        assert cache.receive(Abandon) == Abandon([1, 2])
        call = scheduler.reserve([Run(ROOT, KEYS[0], 1)])
        assert call is not None
        scheduler.abandon([3])
        assert cache.receive(Reserve)
        assert cache.receive(Abandon) == Abandon([3])
        cache.send(Reserved(call.ticket, [4], [0]))
        wait_for_reply(scheduler, call)
        reconnect()
        assert cache.receive(Abandon) == Abandon([3])


def test_late_answer_to_cancelled_lookup_holds_nothing(path: Path) -> None:
    with scheduler_of(path) as (cache, scheduler):
        ticket = scheduler.look_up(Query(KEYS, TOKENS))
        assert ticket is not None
        scheduler.cancel(ticket)
        cache.receive(Lookup)
        cache.receive(Cancel)
        cache.send(Found(ticket, [1, 2], [0, 0], [0, 0], 0))
        wait_until(lambda: (scheduler.poll(), not scheduler.calls)[1])
        assert scheduler.found(ticket) is None


def test_late_confirmation_is_used(path: Path) -> None:
    with worker_of(path) as (cache, worker):
        call = worker.confirm([1])
        assert call is not None
        assert worker.await_reply(call, 0.002) is None
        assert worker.late
        assert cache.receive(Confirm) == Confirm(call.ticket, [1])
        cache.send(Confirmed(call.ticket, held=True))
        assert wait_for_reply(worker, call) is True
        assert not worker.late
