"""The log of events: ordered, bounded, and continued by the next controller."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest

from kvtier.errors import ControllerError
from kvtier.fleet.controller import events as events_module
from kvtier.fleet.controller.errors import TooManyOperations, UnknownName
from kvtier.fleet.controller.events import INTERRUPTED, Event, EventLog
from kvtier.fleet.controller.settings import KEEP_SECONDS
from kvtier.fleet.controller.state import EVENTS, OPERATIONS, FileState
from tests.rigs.clock import Clock

pytestmark = pytest.mark.anyio


async def open_state(path: Path) -> None:
    async with FileState.open(path):
        pass


def finished(log: EventLog) -> Event:
    event = log.create("move", source=("a", "ram"), target=("b", "ram"), num_tokens=512, chunks=2)
    log.start(event)
    log.finish(event)
    return event


def test_event_is_queued_running_and_done(state: FileState) -> None:
    clock = Clock()
    log = EventLog(state, clock=clock)
    reported: list[tuple[str, int]] = []
    with log.subscribe(lambda event: reported.append((event.state, event.chunks_done))):
        event = log.create(
            "move", source=("a", "ram"), target=("b", "ram"), model="m", num_tokens=512, chunks=2
        )
        assert (event.state, event.created_at, event.started_at) == ("queued", 1000.0, None)
        clock.now += 1
        log.start(event)
        log.progress(event, 1, 4096)
        log.progress(event, 5, 8192)
        clock.now += 2
        log.finish(event)
    log.progress(event, 0, 0)
    assert reported == [("queued", 0), ("running", 0), ("running", 1), ("running", 2), ("done", 2)]
    assert (event.started_at, event.ended_at, event.error) == (1001.0, 1003.0, None)
    assert log.unfinished == 0
    assert log.seconds["move"] == 2
    assert log.counts["move", "done"] == 1


def test_failed_event_keeps_its_first_error(state: FileState) -> None:
    log = EventLog(state)
    event = log.create("pin")
    log.fail(event, "the target is gone")
    log.fail(event, "something else")
    assert (event.state, event.error) == ("failed", "the target is gone")
    assert log.counts["pin", "failed"] == 1


def test_newest_events_come_first_and_unknown_ids_are_reported(state: FileState) -> None:
    log = EventLog(state)
    events = [finished(log) for _ in range(5)]
    assert log.newest(3) == events[:1:-1]
    assert log.find(events[0].event_id) is events[0]
    with pytest.raises(UnknownName, match=events[4].event_id) as raised:
        log.find("nonsense")
    assert set(raised.value.known) == {event.event_id for event in events}


def test_events_expire(state: FileState) -> None:
    clock = Clock()
    log = EventLog(state, keep=60, clock=clock)
    in_flight, old = log.create("clear"), finished(log)
    clock.now += 59
    young = finished(log)
    clock.now += 2
    assert log.newest(10) == [young, in_flight]
    with pytest.raises(UnknownName):
        log.find(old.event_id)
    assert len(state.rows(EVENTS)) == 2


def test_number_of_ended_events_is_limited(state: FileState) -> None:
    log = EventLog(state, max_ended=3)
    in_flight = log.create("clear")
    ended = [finished(log) for _ in range(10)]
    assert log.newest(100) == [*ended[:-4:-1], in_flight]
    assert len(state.rows(EVENTS)) == 4


def test_number_of_unfinished_events_is_limited(state: FileState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "MAX_UNFINISHED", 2)
    log = EventLog(state)
    first, _ = log.create("pin"), log.create("pin")
    with pytest.raises(TooManyOperations, match="2 operations are in flight"):
        log.create("pin")
    log.finish(first)
    log.create("pin")


async def test_unfinished_events_are_queued_again_with_their_operation(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    async with FileState.open(path) as state:
        log = EventLog(state)
        done = finished(log)
        done.result.removed = 7
        queued, running = (log.create("move", chunks=3, operation=name) for name in (b"first", b"second"))
        log.start(running)
        log.progress(running, 1, 1)
    # Like a kill, this only closes the connection.
    for _ in range(2):
        async with FileState.open(path) as state:
            log = EventLog(state)
            assert [event.state for event in log.newest(10)] == ["queued", "queued", "done"]
            assert log.interrupted == {queued.event_id: b"first", running.event_id: b"second"}
            assert log.find(running.event_id).started_at is None
            assert log.unfinished == 2
            assert log.find(done.event_id).source == ("a", "ram")
    async with FileState.open(path) as state:
        log = EventLog(state)
        log.finish(log.find(queued.event_id))
        assert [event_id for event_id, _ in state.rows(OPERATIONS)] == [running.event_id]


def test_operations_of_events_that_have_ended_are_deleted(state: FileState) -> None:
    """A controller may be killed between the two writes, in either order."""
    ended = finished(EventLog(state))
    for event_id in (ended.event_id, "never created"):
        state.put(OPERATIONS, (event_id, b"an operation"))
    assert EventLog(state).interrupted == {}
    assert state.rows(OPERATIONS) == []


@pytest.mark.parametrize("why", ["too old", "of an earlier version"])
async def test_what_cannot_be_continued_has_failed(tmp_path: Path, why: str) -> None:
    clock = Clock()
    async with FileState.open(tmp_path / "state.sqlite") as state:
        event = EventLog(state, clock=clock).create("move", operation=b"an operation")
        if why == "too old":
            clock.now += KEEP_SECONDS + 1
        else:
            state.delete(OPERATIONS, [(event.event_id,)])
        log = EventLog(state, clock=clock)
        again = log.find(event.event_id)
        assert (again.state, log.unfinished, log.interrupted) == ("failed", 0, {})
        assert again.error is not None
        assert INTERRUPTED in again.error
        assert state.rows(OPERATIONS) == []
        assert EventLog(state, clock=clock).find(event.event_id).error == again.error


def test_events_of_earlier_versions_are_read(state: FileState) -> None:
    """They have their id as ``id``, and no fields that are added later."""
    event = {"id": "e1", "kind": "pin", "source": None, "target": ["a", "ram"], "model": None}
    event |= {"num_tokens": 16, "chunks": 1, "state": "done", "created_at": 1.0, "ended_at": 2.0}
    state.put(EVENTS, ("e1", 1.0, msgspec.msgpack.encode(event)))
    [found] = EventLog(state, clock=lambda: 3.0).newest(10)
    assert (found.event_id, found.target, found.result.chunks) == ("e1", ("a", "ram"), 0)


def test_earlier_versions_can_read_events(state: FileState) -> None:
    """They require these fields, and ignore others."""
    event = finished(EventLog(state))
    [(_, _, encoded)] = state.rows(EVENTS)
    written = msgspec.msgpack.decode(encoded)
    assert written["id"] == event.event_id
    assert written.keys() > {"kind", "source", "target", "model", "num_tokens", "chunks", "created_at"}


async def test_wait_for_the_end_times_out(state: FileState) -> None:
    log = EventLog(state)
    event = log.create("move")
    await log.wait(event, 0.01)
    assert not event.ended
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.wait, event, 10)
        tasks.start_soon(log.wait_all)
        await anyio.lowlevel.checkpoint()
        log.fail(event, "the end")
    await log.wait(event, 10)
    assert event.error == "the end"


async def test_end_is_told_once_it_is_stored(state: FileState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next controller could repeat what a client takes for done."""
    log = EventLog(state)
    event = finished(log)
    stored, told = anyio.Event(), anyio.Event()

    async def wait() -> None:
        await log.wait(event, 0)
        told.set()

    monkeypatch.setattr(state, "saved", stored.wait)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert not told.is_set()
        stored.set()

    async def fail() -> None:
        raise ControllerError("it does not answer")

    monkeypatch.setattr(state, "saved", fail)
    await log.wait(event, 0)


async def test_nothing_waits_for_a_log_that_is_closed(state: FileState) -> None:
    log = EventLog(state)
    event = log.create("move")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.wait, event, math.inf)
        tasks.start_soon(log.wait_all)
        await anyio.lowlevel.checkpoint()
        log.close()
    assert event.state == "queued"


async def test_state_file_is_exclusive(tmp_path: Path, state: FileState) -> None:
    with pytest.raises(ControllerError, match="another controller uses"):
        await open_state(state.path)
    assert (tmp_path / "state.sqlite").stat().st_mode & 0o077 == 0


async def test_foreign_file_is_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("this is not a database, and must be kept" * 100)
    with pytest.raises(ControllerError, match="remove it, or set another file with --state"):
        await open_state(path)
    with sqlite3.connect(tmp_path / "later.sqlite") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ControllerError, match="written by another version"):
        await open_state(tmp_path / "later.sqlite")
    (tmp_path / "file").touch()
    with pytest.raises(ControllerError, match="set another file with --state"):
        await open_state(tmp_path / "file" / "state")
    assert path.read_text().startswith("this is not")


def test_full_disk_is_not_fatal(state: FileState, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(state)
    # The minimum: there is no room for another page.
    state.connection.execute("PRAGMA max_page_count = 1")
    events = [finished(log) for _ in range(200)]
    assert log.newest(1) == [events[-1]]
    assert caplog.text.count("changes are not persisted") == 1
