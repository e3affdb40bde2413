"""Tasks outside of task groups."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from kvtier.concurrency.threads import wait_all

ResultT = TypeVar("ResultT")


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
