"""The log of events: in order, bounded, and over with the controller that was to carry them out."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kvtier.controller import events as module
from kvtier.controller.errors import TooManyOperations, UnknownEvent
from kvtier.controller.events import RESTARTED, Event, EventLog
from kvtier.controller.state import State
from kvtier.errors import ControllerError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    with State.open(tmp_path / "state.sqlite") as opened:
        yield opened


def finished(log: EventLog) -> Event:
    event = log.create("move", source=("a", "ram"), target=("b", "ram"), num_tokens=512, chunks=2)
    log.start(event)
    log.finish(event)
    return event


def test_an_event_is_queued_running_and_done(state: State) -> None:
    clock = Clock()
    log = EventLog(state, clock=clock)
    told: list[tuple[str, int]] = []
    with log.watching(lambda event: told.append((event.state, event.chunks_done))):
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
    assert told == [("queued", 0), ("running", 0), ("running", 1), ("running", 2), ("done", 2)]
    assert (event.started_at, event.ended_at, event.error) == (1001.0, 1003.0, None)
    assert log.unfinished == 0
    assert log.seconds["move"] == 2
    assert log.counts["move", "done"] == 1


def test_what_has_failed_says_why_and_cannot_fail_again(state: State) -> None:
    log = EventLog(state)
    event = log.create("pin")
    log.fail(event, "the target is gone")
    log.fail(event, "something else")
    assert (event.state, event.error) == ("failed", "the target is gone")
    assert log.counts["pin", "failed"] == 1


def test_the_newest_come_first_and_what_is_unknown_is_named(state: State) -> None:
    log = EventLog(state)
    events = [finished(log) for _ in range(5)]
    assert log.newest(3) == events[:1:-1]
    assert log.find(events[0].id) is events[0]
    with pytest.raises(UnknownEvent, match=events[4].id) as raised:
        log.find("nonsense")
    assert set(raised.value.known) == {event.id for event in events}


def test_events_are_forgotten_after_a_while(state: State) -> None:
    clock = Clock()
    log = EventLog(state, keep=60, clock=clock)
    under_way, old = log.create("clear"), finished(log)
    clock.now += 59
    young = finished(log)
    clock.now += 2
    assert log.newest(10) == [young, under_way]
    with pytest.raises(UnknownEvent):
        log.find(old.id)
    assert len(state.read("SELECT id FROM events")) == 2


def test_no_more_are_kept_than_may_be(state: State) -> None:
    log = EventLog(state, most=3)
    under_way = log.create("clear")
    ended = [finished(log) for _ in range(10)]
    assert log.newest(100) == [*ended[:-4:-1], under_way]
    assert len(state.read("SELECT id FROM events")) == 4


def test_no_more_are_taken_on_than_can_be_looked_after(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_UNFINISHED", 2)
    log = EventLog(state)
    first, _ = log.create("pin"), log.create("pin")
    with pytest.raises(TooManyOperations, match="2 operations are under way"):
        log.create("pin")
    log.finish(first)
    log.create("pin")


def test_what_was_under_way_has_failed_when_the_controller_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    with State.open(path) as state:
        log = EventLog(state)
        done = finished(log)
        done.result.removed = 7
        queued, running = log.create("move", chunks=3), log.create("prefetch")
        log.start(running)
        log.progress(running, 1, 1)
    # The connection is closed, as a kill does it: nothing else was called.
    with State.open(path) as state:
        log = EventLog(state)
        assert [event.state for event in log.newest(10)] == ["failed", "failed", "done"]
        for event in (queued, running):
            again = log.find(event.id)
            assert again.error is not None
            assert RESTARTED in again.error
            assert again.ended_at is not None
        assert log.unfinished == 0
        assert log.find(done.id).source == ("a", "ram")
    with State.open(path) as state:
        assert [event.state for event in EventLog(state).newest(10)] == ["failed", "failed", "done"]


@pytest.mark.anyio
async def test_waiting_for_the_end_takes_no_longer_than_one_likes(state: State) -> None:
    log = EventLog(state)
    event = log.create("move")
    await log.wait(event, 0.01)
    assert not event.ended
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.wait, event, 10)
        tasks.start_soon(log.all_ended)
        await anyio.lowlevel.checkpoint()
        log.fail_all("the end")
    await log.wait(event, 10)
    assert event.error == "the end"


def test_two_controllers_do_not_share_a_file(tmp_path: Path, state: State) -> None:
    with (
        pytest.raises(ControllerError, match="another controller uses"),
        State.open(state.path),
    ):
        pass
    assert (tmp_path / "state.sqlite").stat().st_mode & 0o077 == 0


def test_a_file_that_is_none_of_ours_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("this is not a database, and somebody wants to keep it" * 100)
    with (
        pytest.raises(ControllerError, match="remove it, or name another file with --state"),
        State.open(path),
    ):
        pass
    with sqlite3.connect(tmp_path / "later.sqlite") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ControllerError, match="written by another version"):
        State.open(tmp_path / "later.sqlite").__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(ControllerError, match="name another file with --state"):
        State.open(tmp_path / "file" / "state").__enter__()
    assert path.read_text().startswith("this is not")


def test_a_full_disk_ends_nothing(state: State, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(state)
    # As little as there is: the next page finds no room.
    state._connection.execute("PRAGMA max_page_count = 1")
    events = [finished(log) for _ in range(200)]
    assert log.newest(1) == [events[-1]]
    assert caplog.text.count("what happens now is not remembered") == 1
