"""Task groups whose only error is raised as itself, and waits that a stopped process does not use up."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def open_tasks() -> AsyncIterator[TaskGroup]:
    """Like :func:`anyio.create_task_group`, but a lone exception comes out bare, not in a group.

    A program that holds a cache open must see its own exceptions as it raised them.
    """
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from group.exceptions[0].__cause__


SLICE_SECONDS = 0.25


async def set_within(event: anyio.Event, seconds: float | None) -> bool:
    """Wait for an event for up to ``seconds``, or for ever; whether it is set.

    Time in which this process did not run does not count: after it was stopped or starved, what it waits for
    has often come, but has not been looked at yet, and a deadline that has passed would hide that.
    """
    if seconds is None:
        await event.wait()
        return True
    while seconds > 0 and not event.is_set():
        part = min(seconds, SLICE_SECONDS)
        began = time.monotonic()
        with anyio.move_on_after(part):
            await event.wait()
        seconds -= min(time.monotonic() - began, 2 * part)
    return event.is_set()
