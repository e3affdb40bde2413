"""Calls that are held to a deadline, also those that do not keep it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvtier.bench.errors import BenchFailed, Stuck
from kvtier.units import format_duration

GRACE_SECONDS = 1.0
"""How much longer than its deadline a call is waited for: it gives up by itself then, and can say why."""

AnswerT = TypeVar("AnswerT")


async def within(seconds: float, doing: str, call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    """What ``call`` answers. Raises :class:`BenchFailed` where it takes longer.

    Where the caller is cancelled the call is, too, and waited for as long as for one that is late.
    :class:`Stuck`: it could not be ended.
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
    raise BenchFailed(f"{doing} takes longer than {format_duration(seconds)}, the deadline")


async def _end(task: asyncio.Future[AnswerT], doing: str) -> None:
    task.cancel()
    # A level cancellation would come again at each await: nothing is awaited in its scope but this.
    waiting = asyncio.ensure_future(asyncio.wait([task], timeout=GRACE_SECONDS))
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            continue
    if not task.done():
        raise Stuck(f"{doing} does not end when it is cancelled")
    if not task.cancelled():
        task.exception()  # Looked at, so that nobody is warned of it.


async def _awaited(call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    return await call()
