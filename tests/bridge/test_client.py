"""The engine's end: a cache process that is slow, stopped, killed or replaced is never in the way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.bridge.client import SchedulerBridge, WorkerBridge, status
from kvtier.bridge.connection import FIRST_RETRY_SECONDS
from kvtier.errors import ChannelError
from kvtier.header import HEADER_BYTES
from kvtier.keys import KEY_BYTES, ChunkKey

from .conftest import CHUNK_TOKENS, KEYS, LAYOUT, ROOT, answers, confirm, hello, store, wait_until

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
    assert not worker.confirm(finding.leases)
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
    running.send_signal(signal.SIGSTOP)
    try:
        assert scheduler.reserve(KEYS[3], KEYS[4:8], CHUNK_TOKENS, seconds=0.05) == [None] * 4
        ticket = scheduler.look_up(KEYS, TOKENS)
        assert ticket is not None
        finding = scheduler.found(ticket, wait=0.01)
        assert finding is not None
        assert not finding.answered
        assert not worker.confirm([1], seconds=0.05)
    finally:
        running.send_signal(signal.SIGCONT)
    wait_until(lambda: bool((late := scheduler.found(ticket)) and late.final))
    scheduler.cancel(ticket)
    scheduler.poll()
    wait_until(lambda: (scheduler.poll(), engine(path))[1] == NOTHING_HELD)
    assert all(scheduler.reserve(KEYS[3], KEYS[4:8], CHUNK_TOKENS, seconds=5)), "they were given back"


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
    assert not worker.confirm(finding.leases), "a load that was under way does not count"
    assert bytes(arena.view(finding.offsets[0] + HEADER_BYTES, KEY_BYTES)) == KEYS[0], "memory stays mapped"
    scheduler.poll()
    assert not scheduler.connected
    assert scheduler.found(ticket) is None
    assert scheduler.reserve(ROOT, KEYS[:1], CHUNK_TOKENS) == [None]
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
def test_a_worker_that_reconnects_maps_the_new_arena(path: Path) -> None:
    worker = WorkerBridge(hello("worker"), path)
    worker.connect()
    first = worker.arena
    worker._give_up(ChannelError("cut"))  # A cut that the cache process does not see cannot be had otherwise.
    wait_until(worker.ready)
    assert worker.arena is not None
    assert worker.arena is not first
    worker.close()
