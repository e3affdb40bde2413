"""Task groups that unwrap a single exception, and timeouts that do not count time while stopped."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def open_tasks() -> AsyncIterator[TaskGroup]:
    """Like :func:`anyio.create_task_group`, but raise a single exception itself instead of in a group.

    A program that has a cache open must see its own exceptions unwrapped.
    """
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from group.exceptions[0].__cause__


SLICE_SECONDS = 0.25


async def wait_for_event(event: anyio.Event, seconds: float | None) -> bool:
    """Wait for an event for up to ``seconds``, or without limit. Return whether it is set.

    Time in which this process did not run is not counted: after it was stopped or starved, the awaited result
    has often arrived but is not processed yet, and would be reported as a timeout.
    """
    if seconds is None:
        await event.wait()
        return True
    while seconds > 0 and not event.is_set():
        step = min(seconds, SLICE_SECONDS)
        started = time.monotonic()
        with anyio.move_on_after(step):
            await event.wait()
        seconds -= min(time.monotonic() - started, 2 * step)
    return event.is_set()


async def wait_shielded(events: Sequence[anyio.Event]) -> None:
    """Wait for all events, however often the wait is cancelled. The caller re-raises its cancellation."""
    with anyio.CancelScope(shield=True):
        for event in events:
            while not event.is_set():
                with suppress(anyio.get_cancelled_exc_class()):
                    await event.wait()
