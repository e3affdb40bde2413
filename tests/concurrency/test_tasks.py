"""Waiting for an event with a timeout that does not count time in which the process was stopped."""

from __future__ import annotations

import itertools

import anyio
import pytest

from kvtier.concurrency import tasks
from kvtier.concurrency.tasks import wait_for_event

pytestmark = pytest.mark.anyio


async def test_event_that_is_set() -> None:
    event = anyio.Event()
    event.set()
    assert await wait_for_event(event, 0)
    assert await wait_for_event(event, None)


async def test_event_that_is_set_later() -> None:
    event = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(_set_after, event, 0.3)
        assert await wait_for_event(event, 60)


async def test_event_that_is_never_set() -> None:
    assert not await wait_for_event(anyio.Event(), 0.3)


async def test_time_while_the_process_is_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated by a clock that advances by a minute on each read."""
    minutes = itertools.count(step=60)
    monkeypatch.setattr(tasks.time, "monotonic", lambda: float(next(minutes)))
    monkeypatch.setattr(tasks, "SLICE_SECONDS", 0.01)
    event, slices = anyio.Event(), itertools.count()
    move_on_after = anyio.move_on_after

    def counted(seconds: float) -> anyio.CancelScope:
        if next(slices) == 3:
            event.set()
        return move_on_after(seconds)

    monkeypatch.setattr(tasks.anyio, "move_on_after", counted)
    assert await wait_for_event(event, 0.2)


async def _set_after(event: anyio.Event, seconds: float) -> None:
    await anyio.sleep(seconds)
    event.set()
