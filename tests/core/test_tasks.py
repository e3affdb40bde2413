"""What is waited for in time is seen, however long the process itself stood still."""

from __future__ import annotations

import itertools

import anyio
import pytest

from kvtier import tasks
from kvtier.tasks import set_within

pytestmark = pytest.mark.anyio


async def test_an_event_that_is_set() -> None:
    event = anyio.Event()
    event.set()
    assert await set_within(event, 0)
    assert await set_within(event, None)


async def test_an_event_that_is_set_meanwhile() -> None:
    event = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(_set_after, event, 0.3)
        assert await set_within(event, 60)


async def test_an_event_that_is_never_set() -> None:
    assert not await set_within(anyio.Event(), 0.3)


async def test_time_in_which_the_process_stood_still_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a clock that has advanced by a minute whenever it is looked at."""
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
    assert await set_within(event, 0.2)


async def _set_after(event: anyio.Event, seconds: float) -> None:
    await anyio.sleep(seconds)
    event.set()
