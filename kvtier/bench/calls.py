"""Calls with a deadline, even if they ignore cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvtier.bench.errors import BenchFailed, Stuck
from kvtier.units import format_duration

GRACE_SECONDS = 1.0
"""Extra time after the deadline, in which the call can time out itself, with a better error message."""

AnswerT = TypeVar("AnswerT")


async def within(seconds: float, doing: str, call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    """Return the result of ``call``. Raises :class:`BenchFailed` if it exceeds the deadline of ``seconds``.

    ``doing`` names the call in error messages. Cancelling the caller cancels the call and waits for its end.
    Raises :class:`Stuck` if the call does not end when cancelled.
    """
    task = asyncio.ensure_future(_awaited(call))
    try:
        await asyncio.wait([task], timeout=seconds + GRACE_SECONDS)
    except asyncio.CancelledError:
        await _end(task, doing)
        raise
    if task.done():
        return task.result()
    await _end(task, doing)
    raise BenchFailed(f"{doing} exceeded the deadline of {format_duration(seconds)}")


async def _end(task: asyncio.Future[AnswerT], doing: str) -> None:
    task.cancel()
    # anyio's level cancellation raises at every await in the scope: shield the wait, and repeat it.
    waiting = asyncio.ensure_future(asyncio.wait([task], timeout=GRACE_SECONDS))
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            continue
    if not task.done():
        raise Stuck(f"{doing} does not end when cancelled")
    if not task.cancelled():
        task.exception()  # Retrieve it, so that asyncio does not log it.


async def _awaited(call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    return await call()
