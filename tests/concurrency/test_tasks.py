"""Tasks outside of groups, and waits: their results, their cancellation, and time in which nothing ran."""

from __future__ import annotations

import itertools

import anyio
import anyio.lowlevel
import pytest

from kvtier.concurrency import tasks
from kvtier.concurrency.tasks import DetachedTask, wait_for_event, wait_shielded
from kvtier.testing.cancelling import Through, cancelled_at

pytestmark = pytest.mark.anyio


async def test_event_that_is_set_now_or_later() -> None:
    event = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(_set_after, event, 0.3)
        assert await wait_for_event(event, 60)
    assert await wait_for_event(event, 0)
    assert await wait_for_event(event, None)


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


async def test_detached_task_returns_its_result() -> None:
    async def answer() -> int:
        await anyio.lowlevel.checkpoint()
        return 42

    task = DetachedTask(answer())
    assert await task.wait()
    assert (task.result(), task.error, task.cancelled) == (42, None, False)
    assert await task.join() == 42


async def test_error_is_raised_by_join_and_not_by_wait() -> None:
    async def fail() -> None:
        raise ValueError("no")

    task = DetachedTask(fail())
    assert await task.wait()
    assert isinstance(task.error, ValueError)
    with pytest.raises(ValueError, match="no"):
        await task.join()


async def test_wait_times_out_and_the_task_continues() -> None:
    go = anyio.Event()
    task = DetachedTask(go.wait())
    assert not await task.wait(0.01)
    go.set()
    assert await task.wait()
    assert not task.cancelled


@pytest.mark.parametrize("through", ["scope", "task"])
async def test_cancelling_a_waiting_call_does_not_cancel_the_task(through: Through) -> None:
    go = anyio.Event()
    task = DetachedTask(go.wait())
    assert await cancelled_at(1, task.join, through=through)
    assert await cancelled_at(1, task.wait, through=through)
    go.set()
    await task.join()


async def test_stop_cancels_and_waits() -> None:
    ended = False

    async def run() -> None:
        nonlocal ended
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
            ended = True

    task = DetachedTask(run())
    await anyio.lowlevel.checkpoint()
    assert await task.stop()
    assert ended
    assert (task.cancelled, task.error) == (True, None)


async def test_stop_gives_up_on_a_task_that_ignores_its_cancellation() -> None:
    go = anyio.Event()
    task = DetachedTask(wait_shielded([go]))
    await anyio.lowlevel.checkpoint()
    assert not await task.stop(0.01)
    go.set()
    assert await task.wait()


@pytest.mark.parametrize("through", ["scope", "task"])
async def test_cancelled_stop_still_waits(through: Through) -> None:
    go = anyio.Event()
    task = DetachedTask(wait_shielded([go]))
    await anyio.lowlevel.checkpoint()

    async def stop() -> None:
        await task.stop()
        assert go.is_set()

    async with anyio.create_task_group() as group:

        async def cancel() -> None:
            await cancelled_at(1, stop, through=through)
            assert go.is_set(), "stop returned before the task had ended"

        group.start_soon(cancel)
        await anyio.sleep(0.05)
        go.set()
    await task.wait()


@pytest.mark.parametrize("through", ["scope", "task"])
async def test_shielded_wait_ends_when_all_events_are_set(through: Through) -> None:
    events = [anyio.Event() for _ in range(3)]
    waited = False

    async def wait() -> None:
        nonlocal waited
        await wait_shielded(events)
        waited = True

    async with anyio.create_task_group() as group:

        async def cancel() -> None:
            await cancelled_at(1, wait, through=through)
            assert waited

        group.start_soon(cancel)
        await anyio.sleep(0.05)
        for event in events:
            assert not waited
            event.set()
            await anyio.lowlevel.checkpoint()
