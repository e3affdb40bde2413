"""Calls with a deadline, even if they ignore cancellation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from kvtier.concurrency.detached import DetachedTask
from kvtier.lab.bench.errors import BenchFailed, Stuck
from kvtier.units import format_duration

GRACE_SECONDS = 1.0
"""Extra time after the deadline, in which the call can time out itself, with a better error message."""

AnswerT = TypeVar("AnswerT")


async def within(seconds: float, doing: str, call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    """Return the result of ``call``. Raises :class:`BenchFailed` if it exceeds the deadline of ``seconds``.

    ``doing`` names the call in error messages. Cancelling the caller cancels the call and waits for its end.
    Raises :class:`Stuck` if the call does not end when cancelled.
    """
    task = DetachedTask(_awaited(call))
    try:
        ended = await task.wait(seconds + GRACE_SECONDS)
    except anyio.get_cancelled_exc_class():
        await _stop(task, doing)
        raise
    if ended:
        return task.result()
    await _stop(task, doing)
    raise BenchFailed(f"{doing} exceeded the deadline of {format_duration(seconds)}")


async def _stop(task: DetachedTask[AnswerT], doing: str) -> None:
    if not await task.stop(GRACE_SECONDS):
        raise Stuck(f"{doing} does not end when cancelled")


async def _awaited(call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    return await call()
