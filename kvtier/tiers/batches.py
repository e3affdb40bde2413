"""Batches: what a medium reads or writes in one call. They are cut here, for all tiers and stages.

A batch is the unit of progress for a waiting request, and of memory that is freed at once. The next one is in
flight before it ends, so that no medium waits for a checksum, and no checksum for a medium.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import anyio

from kvtier.units import MIB

BATCH_BYTES = 16 * MIB
"""Large enough to keep any medium busy, small enough to end soon. A tier's deadline applies to as much."""
BATCH_SECONDS = 0.04
"""Duration of a call that reads from a faster medium, as each call takes the event loop 1 to 2 ms."""
MAX_GROWTH = 4
"""A call reads at most this multiple of :data:`BATCH_BYTES`."""
IN_FLIGHT = 2
"""Batches of one transfer in flight. More are not faster on any medium, and halve the throughput of some."""

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def batch_limit(seconds: float | None) -> int:
    """Return how many bytes to read in one call if :data:`BATCH_BYTES` take ``seconds``, if that is known."""
    growth = 1.0 if seconds is None else BATCH_SECONDS / max(seconds, BATCH_SECONDS / MAX_GROWTH)
    return int(BATCH_BYTES * max(growth, 1.0))


def batch_size(lengths: Iterable[int], limit: int | None = None) -> int:
    """Return how many leading items are one batch: up to ``limit`` bytes, but at least one.

    Without a limit, :data:`BATCH_BYTES`.
    """
    limit = BATCH_BYTES if limit is None else limit
    count = total = 0
    for length in lengths:
        total += length
        if count and total > limit:
            break
        count += 1
    return count


async def concurrently(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run :data:`IN_FLIGHT` tasks that process one batch after another, until all of them return."""
    async with anyio.create_task_group() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.start_soon(work)


async def in_batches(
    operation: Callable[[Sequence[ItemT]], Awaitable[Sequence[ResultT]]],
    items: Sequence[ItemT],
    length_of: Callable[[ItemT], int],
) -> list[ResultT]:
    """Call ``operation`` for each batch of ``items``. Return all results, in the order of the batches."""
    results: list[Sequence[ResultT]] = []
    start = 0

    async def work() -> None:
        nonlocal start
        while start < len(items):
            stop = start + batch_size(map(length_of, islice(items, start, None)))
            batch, start = items[start:stop], stop
            place = len(results)
            results.append(())
            results[place] = await operation(batch)

    await concurrently(work)
    return list(chain.from_iterable(results))
