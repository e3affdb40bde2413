"""The engine's end: a cache process that is slow, stopped, killed or replaced is never in the way."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.bridge import bridge, client
from kvtier.bridge.bridge import FIRST_RETRY_SECONDS
from kvtier.bridge.client import SchedulerBridge, WorkerBridge, status
from kvtier.bridge.connection import Connection
from kvtier.bridge.protocol import (
    Abandon,
    Cancel,
    Confirm,
    Confirmed,
    Found,
    Hello,
    LookUp,
    Reserve,
    Reserved,
    Run,
)
from kvtier.errors import ChannelError
from kvtier.header import HEADER_BYTES
from kvtier.keys import KEY_BYTES, ChunkKey, join_keys

from .conftest import (
    CHUNK_TOKENS,
    KEYS,
    LAYOUT,
    ROOT,
    answer,
    answers,
    confirm,
    hello,
    reserve,
    store,
    wait_until,
)
from .scripted_cache import ScriptedCache, scheduler_of, worker_of

Start = Callable[..., subprocess.Popen[str]]
TOKENS = CHUNK_TOKENS * len(KEYS)


@pytest.fixture
def running(tmp_path: Path, start: Start) -> subprocess.Popen[str]:
    process = start()
    wait_until(lambda: answers(tmp_path / "socket"))
    return process


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


def engine(path: Path) -> dict[str, int]:
    """What the only engine holds."""
    (held,) = status(path)["engines"]
    return {name: held[name] for name in ("leases", "reservations", "tickets")}


NOTHING_HELD = {"leases": 0, "reservations": 0, "tickets": 0}


@pytest.mark.usefixtures("running")
def test_found_chunks_are_leased_until_released(path: Path) -> None:
    scheduler, worker = store(path, KEYS)
    ticket = scheduler.look_up(KEYS, TOKENS)
    assert ticket is not None
    finding = scheduler.found(ticket, wait=60)
    assert finding is not None
    assert (len(finding.leases), finding.final, set(finding.sources)) == (len(KEYS), True, {0})
    assert worker.arena is not None
    payload = worker.arena.view(finding.offsets[3] + HEADER_BYTES, KEY_BYTES)
    assert payload == KEYS[3]
    assert confirm(worker, finding.leases)
    assert engine(path)["leases"] == len(KEYS)
    scheduler.take(ticket)
    scheduler.release(finding.leases)
    assert not confirm(worker, finding.leases)
    wait_until(lambda: engine(path) == NOTHING_HELD)


@pytest.mark.usefixtures("running")
def test_a_cancelled_look_up_gives_everything_back(path: Path) -> None:
    scheduler, _ = store(path, KEYS)
    asked = scheduler.look_up(KEYS, TOKENS)
    answered = scheduler.look_up(KEYS, TOKENS)
    assert asked is not None
    assert answered is not None
    assert scheduler.found(answered, wait=60) is not None
    scheduler.cancel(asked)
    scheduler.cancel(answered)
    assert scheduler.found(answered) is None
    wait_until(lambda: engine(path) == NOTHING_HELD)


def test_a_stopped_cache_process_costs_a_moment_and_leaves_nothing_behind(
    path: Path, running: subprocess.Popen[str]
) -> None:
    scheduler, worker = store(path, KEYS[:4])
    run = Run(KEYS[3], join_keys(KEYS[4:8]), CHUNK_TOKENS)
    running.send_signal(signal.SIGSTOP)
    try:
        late = scheduler.reserve([run])
        assert late is not None
        assert scheduler.await_answer(late, 0.05) is None
        assert scheduler.late
        assert scheduler.reserve([run]) is None, "nothing is asked of one that is late"
        ticket = scheduler.look_up(KEYS, TOKENS)
        assert ticket is not None
        waited = scheduler.waited
        finding = scheduler.found(ticket, wait=5)
        assert finding is not None
        assert not finding.answered
        assert scheduler.waited == waited, "it is not waited for again"
        assert worker.await_answer(worker.confirm([1]), 0.05) is None
    finally:
        running.send_signal(signal.SIGCONT)
    wait_until(lambda: bool((late := scheduler.found(ticket)) and late.final))
    assert not scheduler.late
    slots = answer(scheduler, late)[0]
    assert all(slots), "a late answer finds its question"
    scheduler.abandon([slot.lease for slot in slots if slot is not None])
    scheduler.cancel(ticket)
    wait_until(lambda: engine(path) == NOTHING_HELD)
    assert all(reserve(scheduler, KEYS[3], KEYS[4:8])), "they were given back"


def test_a_cache_process_that_is_silent_for_long_is_asked_nothing_until_it_answers(
    path: Path, running: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scheduler, _ = store(path, KEYS[:4])
    running.send_signal(signal.SIGSTOP)
    try:
        ticket = scheduler.look_up(KEYS, TOKENS)
        assert ticket is not None
        wait_until(lambda: (scheduler.update(), not scheduler.responsive)[1])
        assert scheduler.look_up(KEYS, TOKENS) is None
        assert scheduler.reserve([Run(ROOT, KEYS[9], CHUNK_TOKENS)]) is None
        started = time.monotonic()
        assert scheduler.clear(60) is None
        assert time.monotonic() < started + 30
        scheduler.cancel(ticket)
    finally:
        running.send_signal(signal.SIGCONT)
    wait_until(lambda: (scheduler.update(), scheduler.responsive)[1])
    wait_until(lambda: engine(path) == NOTHING_HELD)
    again = scheduler.look_up(KEYS, TOKENS)
    assert again is not None
    scheduler.cancel(again)
    warnings = [record.message for record in caplog.records if "has not answered" in record.message]
    assert len(warnings) == 1
    assert "1 lookups" in warnings[0]
    assert caplog.text.count("answers again") == 1


def test_a_fetch_that_stands_still_is_noticed(path: Path) -> None:
    """While chunks are fetched nothing is outstanding: a probe shows that the process is alive."""
    with scheduler_of(path) as (there, scheduler):
        ticket = scheduler.look_up(KEYS, TOKENS)
        assert ticket is not None
        there.hear(LookUp)
        there.say(Found(ticket, [], [], [], 40))
        wait_until(lambda: bool((finding := scheduler.found(ticket)) and finding.answered))
        assert there.nothing()
        wait_until(lambda: (scheduler.update(), scheduler.probe(), not there.nothing())[2])
        probe = there.hear(Reserve)
        assert probe == Reserve(probe.ticket, [])
        there.say(Reserved(probe.ticket, [], []))
        wait_until(lambda: (scheduler.update(), not scheduler._questions)[1])
        assert scheduler.responsive
        wait_until(lambda: (scheduler.update(), scheduler.probe(), not scheduler.responsive)[2])


def test_a_cache_process_that_never_reads_again_is_given_up(
    path: Path, running: subprocess.Popen[str]
) -> None:
    scheduler, _ = store(path, KEYS[:1])
    running.send_signal(signal.SIGSTOP)
    try:
        keys = [ChunkKey(os.urandom(KEY_BYTES)) for _ in range(4096)]
        refused = False
        for _ in range(20):
            refused = refused or scheduler.look_up(keys, CHUNK_TOKENS * len(keys)) is None
        assert refused, "look-ups are not piled up"
        for _ in range(200):
            scheduler.release(list(range(1, 50_000)))
        assert not scheduler.connected
    finally:
        running.send_signal(signal.SIGCONT)


def test_a_killed_cache_process_is_a_miss_and_its_successor_is_found(
    path: Path, running: subprocess.Popen[str], start: Start
) -> None:
    scheduler, worker = store(path, KEYS)
    ticket = scheduler.look_up(KEYS, TOKENS)
    assert ticket is not None
    finding = scheduler.found(ticket, wait=60)
    assert finding is not None
    old_epoch, arena = worker.epoch, worker.arena
    assert arena is not None
    running.kill()
    running.wait()
    assert not worker.await_answer(worker.confirm(finding.leases), 5), "a load in flight does not count"
    assert bytes(arena.view(finding.offsets[0] + HEADER_BYTES, KEY_BYTES)) == KEYS[0], "memory stays mapped"
    scheduler.poll()
    assert not scheduler.connected
    assert scheduler.found(ticket) is None
    assert scheduler.reserve([Run(ROOT, KEYS[0], CHUNK_TOKENS)]) is None
    start()
    wait_until(lambda: answers(path))
    wait_until(lambda: scheduler.ready() and worker.ready(), seconds=4 * FIRST_RETRY_SECONDS + 10)
    assert worker.epoch == scheduler.epoch != old_epoch
    again = scheduler.look_up(KEYS, TOKENS)
    assert again is not None


def test_nobody_there_is_told_and_tried_again_rarely(path: Path) -> None:
    scheduler = SchedulerBridge(hello("scheduler"), path)
    with pytest.raises(ChannelError, match="no cache process answers"):
        scheduler.connect()
    started = time.monotonic()
    tries = 0

    def start_one() -> None:
        nonlocal tries
        tries += 1

    scheduler = SchedulerBridge(hello("scheduler"), path, start_one)
    while time.monotonic() < started + 0.3:
        assert scheduler.look_up(KEYS, TOKENS) is None
    assert tries == 1


@pytest.mark.usefixtures("running")
def test_an_engine_of_another_version_is_told_why(path: Path) -> None:
    old = hello("scheduler")
    stranger = type(old)(999, old.engine, old.role, old.rank, old.layout, old.namespace)
    with pytest.raises(ChannelError, match="restart both with the same kvtier"):
        SchedulerBridge(stranger, path).connect()


@pytest.mark.usefixtures("running")
def test_clear_and_changes(path: Path) -> None:
    watching = hello("scheduler")
    told = type(watching)(
        watching.version, "watcher", "scheduler", 0, LAYOUT, watching.namespace, changes=True
    )
    watcher = SchedulerBridge(told, path)
    watcher.connect()
    try:
        store(path, KEYS)
        stored: dict[int, bytes] = {}

        def all_told() -> bool:
            watcher.poll()
            for change in watcher.changes():
                stored[change.tier] = stored.get(change.tier, b"") + change.stored
            return {tier: len(keys) for tier, keys in stored.items()} == dict.fromkeys(
                (0, 1), len(KEYS) * KEY_BYTES
            )

        wait_until(all_told)
        assert watcher.clear(5) == len(KEYS)
        wait_until(lambda: not status(path)["tiers"][1]["chunks"])
    finally:
        watcher.close()


@pytest.mark.usefixtures("running")
def test_a_worker_that_reconnects_maps_the_new_arena_and_does_not_wait_for_the_old_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may get no processor for 0.2 s, and unmapping holds a lock that mapping waits for."""
    threads: list[Callable[[], None]] = []
    monkeypatch.setattr(client, "run_in_background", threads.append)
    worker = WorkerBridge(hello("worker"), path)
    worker.connect()
    first = worker.arena
    assert first is not None
    worker._give_up(ChannelError("cut"))  # A cut that the cache process does not see cannot be had otherwise.
    wait_until(worker.ready)
    assert worker.arena is not None
    assert worker.arena is not first
    assert len(first.view(0, 1)) == 1, "still mapped"
    (unmap,) = threads
    unmap()
    with pytest.raises(ValueError, match="released"):
        first.view(0, 1)
    worker.close()


def test_an_answer_that_does_not_fit_the_question_ends_the_connection(path: Path) -> None:
    with scheduler_of(path) as (there, scheduler):
        question = scheduler.reserve([Run(ROOT, KEYS[0], 1), Run(ROOT, join_keys(KEYS[1:3]), 1)])
        assert question is not None
        there.hear(Reserve)
        there.say(Reserved(question.ticket, [1, 2], [0, 4096]))
        wait_until(lambda: (scheduler.poll(), not scheduler.connected)[1])
        assert question.lost


def test_each_run_gets_its_slots(path: Path) -> None:
    with scheduler_of(path) as (there, scheduler):
        runs = [
            Run(ROOT, KEYS[0], 1, hand_over=5),
            Run(ROOT, KEYS[0], 1),
            Run(KEYS[0], join_keys(KEYS[1:3]), 1),
        ]
        question = scheduler.reserve(runs)
        assert question is not None
        assert there.hear(Reserve) == Reserve(question.ticket, runs)
        there.say(Reserved(question.ticket, [4, 5, 0, 7], [0, 64, 0, 128], staging=3))
        assert answer(scheduler, question) == [[(4, 0, 3)], [(5, 64, 0)], [None, (7, 128, 0)]]
        assert not scheduler._reserving


def test_waiting_for_a_greeting_ends_and_leaves_no_connection(path: Path) -> None:
    there = ScriptedCache(path)
    connection = Connection(path, hello("scheduler"))
    with pytest.raises(ChannelError, match=r"no cache process answers on .*: no welcome within 0.05 s"):
        connection.await_welcome(0.05)
    there.accept()
    assert there.hear(Hello)
    assert there.is_left()
    there.close()


def test_a_listener_that_never_greets_costs_no_time_and_is_left(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "GREETING_SECONDS", 0.05)
    there = ScriptedCache(path)
    scheduler = SchedulerBridge(hello("scheduler"), path)
    monkeypatch.setattr(scheduler, "_wait", lambda *_: pytest.fail("it waits"))
    assert not scheduler.ready()
    there.accept()
    greeting = scheduler._greeting
    assert greeting is not None
    assert not scheduler.ready()
    assert scheduler._greeting is greeting, "one attempt at a time"
    wait_until(lambda: (scheduler.ready(), scheduler._greeting is not greeting)[1])
    assert there.hear(Hello)
    assert scheduler.look_up(KEYS, TOKENS) is None
    scheduler._retry_at = 0.0
    assert not scheduler.ready()
    there.greet()
    wait_until(scheduler.ready)
    scheduler.close()
    there.close()


def test_a_backlog_that_is_full_costs_no_time(path: Path) -> None:
    """connect(2) would wait for a place in it."""
    there = socket.socket(socket.AF_UNIX)
    there.bind(str(path))
    there.listen(0)
    schedulers = [SchedulerBridge(hello("scheduler"), path) for _ in range(8)]
    assert not any(scheduler.ready() for scheduler in schedulers)
    assert any(scheduler._greeting is None for scheduler in schedulers), "the backlog is not full"
    for scheduler in schedulers:
        scheduler.close()
    there.close()


@pytest.mark.usefixtures("running")
def test_descriptors_beyond_a_thousand(path: Path) -> None:
    """select(2) refuses them with a ``ValueError``, in a hook."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    taken = [os.dup(0)]
    try:
        while taken[-1] < 1024:
            taken.append(os.dup(0))
        scheduler, worker = store(path, KEYS[:2])
        ticket = scheduler.look_up(KEYS[:2], 2 * CHUNK_TOKENS)
        assert ticket is not None
        finding = scheduler.found(ticket, wait=5)
        assert finding is not None
        assert len(finding.leases) == 2
        assert worker.await_answer(worker.confirm(finding.leases), 5)
        scheduler.cancel(ticket)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_reservations_of_a_process_that_is_not_yet_connected_are_given_back_to_it(path: Path) -> None:
    """Scheduler and worker reconnect at different times, and numbers mean nothing to another process."""
    with worker_of(path) as (there, worker):
        worker.abandon([1, 2], epoch=8)
        worker.abandon([3], epoch=7)
        worker.abandon([4], epoch=9)
        assert there.hear(Abandon) == Abandon([3])
        there.hang_up()
        wait_until(lambda: (worker.poll(), not worker.connected)[1])
        there._epoch = 8
        worker.retry_now()
        assert not worker.ready()
        there.greet()
        wait_until(worker.ready)
        assert there.hear(Abandon) == Abandon([1, 2])


def test_a_cancelled_look_up_that_is_answered_late_holds_nothing(path: Path) -> None:
    with scheduler_of(path) as (there, scheduler):
        ticket = scheduler.look_up(KEYS, TOKENS)
        assert ticket is not None
        scheduler.cancel(ticket)
        there.hear(LookUp)
        there.hear(Cancel)
        there.say(Found(ticket, [1, 2], [0, 0], [0, 0], 0))
        wait_until(lambda: (scheduler.poll(), not scheduler._questions)[1])
        assert scheduler.found(ticket) is None
        assert not scheduler._in_use


def test_a_confirmation_that_comes_late_is_still_an_answer(path: Path) -> None:
    with worker_of(path) as (there, worker):
        question = worker.confirm([1])
        assert question is not None
        assert worker.await_answer(question, 0.002) is None
        assert worker.late
        assert there.hear(Confirm) == Confirm(question.ticket, [1])
        there.say(Confirmed(question.ticket, held=True))
        assert answer(worker, question) is True
        assert not worker.late
