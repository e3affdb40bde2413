"""Task groups whose only error is raised as itself."""

from __future__ import annotations

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
