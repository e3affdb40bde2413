"""Tasks: groups that unwrap a single exception, tasks outside of groups, waits, changes, an end by signal."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from logging import Logger
from typing import Any, Generic, TypeVar

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup, TaskStatus

from kvtier.concurrency.threads import wait_all

SLICE_SECONDS = 0.25
ResultT = TypeVar("ResultT")


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


@asynccontextmanager
async def open_background_tasks() -> AsyncIterator[TaskGroup]:
    """Like :func:`open_tasks`, but cancel the tasks at the end of the block instead of waiting for them."""
    async with open_tasks() as tasks:
        try:
            yield tasks
        finally:
            tasks.cancel_scope.cancel()


def call_later(seconds: float, function: Callable[[], None]) -> None:
    """Have the running event loop call a function. Takes a microsecond, a task 20. Errors are logged."""
    loop = asyncio.get_running_loop()
    # The timer is set in the next turn: after a pause that takes 30 µs, for which an answer would wait.
    loop.call_soon(loop.call_later, seconds, function)


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
        # A slice that took much longer was one in which this process did not run.
        seconds -= min(time.monotonic() - started, 2 * step)
    return event.is_set()


async def wait_shielded(events: Sequence[anyio.Event]) -> None:
    """Wait for all events, however often the wait is cancelled. The caller re-raises its cancellation."""
    with anyio.CancelScope(shield=True):
        for event in events:
            while not event.is_set():
                with suppress(anyio.get_cancelled_exc_class()):
                    await event.wait()


class Changes:
    """Counts changes, and wakes those who wait for one. Several at once wake a waiter once."""

    def __init__(self) -> None:
        self.count = 0
        self._next = anyio.Event()

    def notify(self) -> None:
        """Count a change."""
        self.count += 1
        self._next.set()
        self._next = anyio.Event()

    async def after(self, count: int) -> int:
        """Wait until there have been more than ``count`` changes, and return how many there have been."""
        while self.count <= count:
            await self._next.wait()
        return self.count


class DetachedTask(Generic[ResultT]):
    """A task that may outlive the block that starts it, and may ignore its cancellation.

    A task group waits for its tasks at the end of its block. This task is for an object whose ``close``
    stops what its ``open`` starts, and for calls into code that may hang. Cancelling a call that waits for
    the task does not cancel the task.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, ResultT]) -> None:
        """Start the task. Call from the event loop."""
        name = getattr(coroutine, "__qualname__", None)  # As anyio names its tasks.
        self._task = asyncio.get_running_loop().create_task(coroutine, name=name)

    @property
    def cancelled(self) -> bool:
        """Whether it ended by being cancelled."""
        return self._task.cancelled()

    @property
    def error(self) -> BaseException | None:
        """Its exception; ``None`` if it returned or was cancelled. It must have ended."""
        return None if self._task.cancelled() else self._task.exception()

    def result(self) -> ResultT:
        """Return its result, or raise its exception. It must have ended."""
        return self._task.result()

    def cancel(self) -> None:
        """Cancel it once, with ``Task.cancel``. Does not wait."""
        self._task.cancel()

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, for at most ``seconds``. Return whether it has ended."""
        await asyncio.wait([self._task], timeout=seconds)
        return self._task.done()

    async def join(self) -> ResultT:
        """Wait until it has ended. Return its result, or raise its exception."""
        await self.wait()
        return self._task.result()

    async def stop(self, seconds: float | None = None) -> bool:
        """Cancel it, and wait until it has ended, for at most ``seconds``. Return whether it has ended.

        Waits even if the caller is cancelled meanwhile; the caller re-raises its cancellation. The exception
        of the task is not logged: see :attr:`error`.
        """
        self._task.cancel()
        await wait_all([asyncio.ensure_future(self.wait(seconds))])
        if not self._task.done():
            return False
        _ = self.error  # Mark it as retrieved.
        return True


async def stop_on_signals(
    serving: CancelScope, draining: CancelScope, logger: Logger, *, task_status: TaskStatus[None]
) -> None:
    """Cancel ``serving`` on the first SIGTERM or SIGINT, and ``draining`` on the second."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            if serving.cancel_called:
                logger.warning("%s again: exiting without draining", signal.Signals(number).name)
                draining.cancel()
            else:
                logger.info("%s: shutting down", signal.Signals(number).name)
                serving.cancel()
