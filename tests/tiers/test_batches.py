"""Batches are cut by bytes, and a few are in flight at a time."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from kvtier.tiers.batches import (
    BATCH_BYTES,
    BATCH_SECONDS,
    IN_FLIGHT,
    MAX_GROWTH,
    batch_limit,
    batch_size,
    in_batches,
)

pytestmark = pytest.mark.anyio
HALF = BATCH_BYTES // 2


@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        ([], 0),
        ([1], 1),
        ([HALF, HALF], 2),
        ([HALF, HALF, 1], 2),
        ([HALF, HALF + 1], 1),
        ([10 * BATCH_BYTES, 1], 1),
        ([1, 10 * BATCH_BYTES], 1),
        ([0] * 5, 5),
    ],
)
def test_batch_size(lengths: list[int], size: int) -> None:
    assert batch_size(lengths) == size


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [
        (None, BATCH_BYTES),
        (10 * BATCH_SECONDS, BATCH_BYTES),
        (BATCH_SECONDS, BATCH_BYTES),
        (BATCH_SECONDS / 2, 2 * BATCH_BYTES),
        (BATCH_SECONDS / 100, MAX_GROWTH * BATCH_BYTES),
        (0.0, MAX_GROWTH * BATCH_BYTES),
    ],
)
def test_fast_media_read_more_in_one_call(seconds: float | None, limit: int) -> None:
    assert batch_limit(seconds) == limit
    assert batch_size([limit, 0, 1], batch_limit(seconds)) == 2


async def test_results_are_in_the_order_of_the_items() -> None:
    pauses = {0: 0.03, 2: 0.0, 4: 0.02}

    async def operation(batch: Sequence[int]) -> Sequence[str]:
        await anyio.sleep(pauses[batch[0]])
        return [str(item) for item in batch for _ in range(2)]

    results = await in_batches(operation, range(5), lambda _: HALF)
    assert results == ["0", "0", "1", "1", "2", "2", "3", "3", "4", "4"]


async def test_next_batch_is_in_flight_before_one_ends() -> None:
    running: list[int] = []
    ended = [anyio.Event() for _ in range(5)]

    async def operation(batch: Sequence[int]) -> Sequence[int]:
        running.append(batch[0])
        await ended[batch[0]].wait()
        running.remove(batch[0])
        return batch

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(in_batches, operation, range(5), lambda _: BATCH_BYTES)
        for number in range(5):
            await anyio.wait_all_tasks_blocked()
            assert running == list(range(number, min(5, number + IN_FLIGHT)))
            ended[number].set()


async def test_nothing_is_called_without_items() -> None:
    async def operation(_: Sequence[int]) -> Sequence[int]:
        raise AssertionError

    assert await in_batches(operation, [], lambda _: 1) == []
