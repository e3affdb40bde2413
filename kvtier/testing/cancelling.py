"""Cancel a call at each of its suspension points."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, Literal, TypeVar

from anyio import CancelScope

ResultT = TypeVar("ResultT")

Through = Literal["scope", "task"]
"""How to cancel: with an anyio cancel scope, or with ``Task.cancel`` as asyncio's own timeouts do."""


async def cancelled_at(
    step: int, operation: Callable[[], Coroutine[Any, Any, object]], *, through: Through, lag: int = 0
) -> bool:
    """Run a call, cancel it when it suspends for the ``step``-th time, and return whether it was cancelled.

    ``False`` if the call finished with fewer suspensions. With ``lag``, cancel that many event loop
    iterations later, when the awaited operation has started. Call this with step 1, 2, 3 and so on until the
    first ``False`` to cancel the call at every await.
    """
    loop = asyncio.get_running_loop()
    suspended = 0
    cancel: Callable[[], object]

    def count() -> None:
        nonlocal suspended
        suspended += 1
        if suspended == step:
            cancel_after(lag)

    def cancel_after(iterations: int) -> None:
        if iterations:
            loop.call_soon(cancel_after, iterations - 1)
        else:
            cancel()

    async def run() -> bool:
        nonlocal cancel
        with CancelScope() as scope:
            cancel = scope.cancel if through == "scope" else task.cancel
            await _counting(operation(), count)
        return scope.cancelled_caught

    task = asyncio.ensure_future(run())
    await asyncio.wait([task])
    return task.cancelled() or task.result()


@coroutine
def _counting(
    call: Coroutine[Any, Any, ResultT], on_suspend: Callable[[], None]
) -> Generator[Any, Any, ResultT]:
    """Run ``call`` like ``await``, and call ``on_suspend`` each time that it suspends."""
    try:
        waits_for = call.send(None)
        while True:
            on_suspend()
            try:
                received = yield waits_for
            except GeneratorExit:
                call.close()
                raise
            except BaseException as error:
                waits_for = call.throw(error)
            else:
                waits_for = call.send(received)
    except StopIteration as stop:
        result: ResultT = stop.value
        return result
