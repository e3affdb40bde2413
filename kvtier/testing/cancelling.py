"""Cancelling a call at each point at which it can be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, Literal, TypeVar

from anyio import CancelScope

ResultT = TypeVar("ResultT")

Through = Literal["scope", "task"]
"""Cancelled through an anyio scope, or through ``Task.cancel`` as asyncio's own time-outs do."""


async def cancelled_at(
    step: int, operation: Callable[[], Coroutine[Any, Any, object]], *, through: Through, lag: int = 0
) -> bool:
    """Run a call and cancel it when it suspends for the ``step``-th time; whether it was cancelled.

    ``False`` where it ended before, having suspended less often. With ``lag`` it is cancelled so many
    turns of the loop later: what it waits for has then begun. Run it for step 1, 2, 3 and so on up to the
    first ``False``, and a call has been cancelled at every await that it has.
    """
    loop = asyncio.get_running_loop()
    suspended = 0
    cancel: Callable[[], object]

    def count() -> None:
        nonlocal suspended
        suspended += 1
        if suspended == step:
            turn(lag)

    def turn(left: int) -> None:
        if left:
            loop.call_soon(turn, left - 1)
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
    call: Coroutine[Any, Any, ResultT], suspends: Callable[[], None]
) -> Generator[Any, Any, ResultT]:
    """Run ``call`` as ``await`` does, telling ``suspends`` each time that it gives way to the loop."""
    try:
        waits_for = call.send(None)
        while True:
            suspends()
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
