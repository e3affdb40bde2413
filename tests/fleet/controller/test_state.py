"""Damage of the controller's state file: what can be read is read, and nothing ends in a traceback."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import ControllerError
from kvtier.fleet.controller.events import EventLog
from kvtier.fleet.controller.pins import Pins
from kvtier.fleet.controller.state import FileState
from tests.rigs.running_controller import keys_of, running_controller

pytestmark = pytest.mark.anyio

KEYS = keys_of("prompt", 6)
OTHERS = keys_of("another prompt", 2)
DAMAGES = {
    "an event is cut off": "UPDATE events SET event = substr(event, 1, 20) WHERE id = :id",
    "an event is text": "UPDATE events SET event = 'text' WHERE id = :id",
    "an event is a number": "UPDATE events SET event = 7 WHERE id = :id",
    "an event is empty": "UPDATE events SET event = X'' WHERE id = :id",
    "an event is another message": "UPDATE events SET event = X'81a16101' WHERE id = :id",
    "an event has another id": "UPDATE events SET id = 'other' WHERE id = :id",
    "an id is not UTF-8": "UPDATE events SET id = CAST(X'ff' AS TEXT) WHERE id = :id",
    "the time of an event is text": "UPDATE events SET created_at = 'now', event = X'c1' WHERE id = :id",
    "keys are cut off": "UPDATE pins SET keys = substr(keys, 1, 40) WHERE instance = 'a'",
    "keys are empty": "UPDATE pins SET keys = X'' WHERE instance = 'a'",
    "keys are text": "UPDATE pins SET keys = 'text' WHERE instance = 'a'",
    "keys are those of another pin": "UPDATE pins SET last = X'00' WHERE instance = 'a'",
    "an instance is a blob": "UPDATE pins SET instance = X'ff00' WHERE instance = 'a'",
    "an expiry is text": "UPDATE pins SET until = 'tomorrow' WHERE instance = 'a'",
    "a time is text": "UPDATE pins SET given_at = 'yesterday' WHERE instance = 'a'",
}


async def make_state(path: Path) -> tuple[str, str]:
    """Write two events and two pins. Return the ids of the events."""
    async with FileState.open(path) as state:
        log, pins = EventLog(state), Pins(state)
        events = [log.create("clear", target=(instance, None)) for instance in ("a", "b")]
        for event in events:
            log.finish(event)
        pins.add("a", KEYS, None, ())
        pins.add("b", OTHERS, 1e9, ())
    return events[0].event_id, events[1].event_id


def damage(path: Path, change: Callable[[sqlite3.Connection], object]) -> None:
    connection = sqlite3.connect(path)
    with connection:
        change(connection)
    connection.close()


@pytest.mark.parametrize("what", DAMAGES)
async def test_damaged_row_is_skipped_with_a_warning_that_names_it(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "controller.sqlite"
    damaged, other = await make_state(path)

    def change(connection: sqlite3.Connection) -> None:
        assert connection.execute(DAMAGES[what], {"id": damaged}).rowcount == 1

    damage(path, change)
    async with running_controller(tmp_path) as controller:
        listed = (await controller.get("/events"))["events"]
    is_event = "events" in DAMAGES[what]
    assert [event["event_id"] for event in listed] == ([other] if is_event else [other, damaged])
    async with FileState.open(path) as state:
        pins = Pins(state)
        assert [len(pins.of(instance)) for instance in ("a", "b")] == [1 if is_event else 0, 1]
    named = {
        "an event has another id": "other",
        "an id is not UTF-8": "\ufffd",
        "an instance is a blob": "\\xff",
    }
    name = named.get(what, damaged if is_event else "'a'")
    [warning] = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert warning.startswith(f"{path}: a damaged row is skipped, of ")
    assert name in warning


async def test_damaged_file_is_reported_in_one_message(tmp_path: Path) -> None:
    path = tmp_path / "controller.sqlite"
    await make_state(path)
    damage(path, lambda connection: connection.execute("DROP TABLE pins"))
    with pytest.raises(ControllerError, match=r"no such table: pins\): remove it.*--state"):
        async with running_controller(tmp_path):
            pass
    path.unlink()
    async with FileState.open(path) as state:
        log = EventLog(state)
        for _ in range(200):
            log.finish(log.create("clear", model="m" * 500))
    content = bytearray(path.read_bytes())
    content[8192:] = bytes(len(content) - 8192)
    path.write_bytes(content)
    with pytest.raises(ControllerError, match=r"malformed\): remove it.*--state"):
        async with running_controller(tmp_path):
            pass
