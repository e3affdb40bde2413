"""Blocking work on a batch, in worker threads that let go of the caller's memory before the call ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from anyio import CancelScope, CapacityLimiter, to_thread

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

Hop = Callable[[Callable[[], None]], Coroutine[Any, Any, None]]
"""Runs a function in some worker thread and comes back when it has returned."""


def limited_hop(limiter: CapacityLimiter) -> Hop:
    """Hops into the worker threads that the whole process shares, as many at once as ``limiter`` admits."""

    async def hop(function: Callable[[], None]) -> None:
        await to_thread.run_sync(function, limiter=limiter)

    return hop


async def spread(
    work: Callable[[ItemT], ResultT],
    items: Sequence[ItemT],
    *,
    parts: int,
    hop: Hop,
    on_cancel: Callable[[], None] | None = None,
) -> list[ResultT]:
    """Apply ``work`` to every item in at most ``parts`` threads at once; the results in the items' order.

    One hop a part, however many items there are: each thread takes the next item until none is left.
    A cancelled call drops the items that nobody has begun, and ends only when every thread has let go
    of its item, whether it was cancelled through an anyio scope or through ``Task.cancel``. Raises what
    ``work`` raises, then also only when all threads are through. ``on_cancel`` is called at once where the
    call is cancelled: it may hurry the threads on.
    """
    # Each item leaves the queue with the thread that takes it: a thread holds on to this function, and so to
    # the queue, for a moment after it has returned, and the memory may be unmapped by then.
    waiting = deque(enumerate(items))
    results: dict[int, ResultT] = {}

    def take_turns() -> None:
        while True:
            try:
                index, item = waiting.popleft()
            except IndexError:
                return
            results[index] = work(item)

    hops = [asyncio.ensure_future(hop(take_turns)) for _ in range(min(parts, len(items)))]
    try:
        if hops:
            await asyncio.wait(hops)
    except asyncio.CancelledError:
        waiting.clear()
        if on_cancel is not None:
            on_cancel()
        await _all_done(hops)
        raise
    for done in hops:
        done.result()
    return [results[index] for index in range(len(items))]


async def _all_done(hops: Sequence[asyncio.Future[None]]) -> None:
    """Wait for every hop, however often the waiting is cancelled: the caller raises its cancellation then."""
    with CancelScope(shield=True):
        while not all(hop.done() for hop in hops):
            with suppress(asyncio.CancelledError):
                await asyncio.wait(hops)
