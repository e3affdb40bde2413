"""Operations on the same chunks are serialized if one of them may delete."""

from __future__ import annotations

import itertools

import anyio
import anyio.lowlevel
import pytest

from kvtier.fleet.controller.operations import LockManager, LockRequest
from kvtier.memory.keys import ChunkKey
from tests.fleet.controller.registering import keys_of

pytestmark = pytest.mark.anyio

FIRST, SECOND = keys_of("prompts", 2)


def request(instances: str, *roots: ChunkKey, exclusive: bool = True) -> LockRequest:
    return LockRequest(frozenset(instances), frozenset(roots) if roots else None, exclusive=exclusive)


@pytest.mark.parametrize(
    ("first", "second", "conflict"),
    [
        (request("ab", FIRST), request("ba", FIRST), True),
        (request("ab", FIRST), request("ab", SECOND), False),
        (request("ab", FIRST), request("cd", FIRST), True),
        (request("ab", FIRST, exclusive=False), request("ab", FIRST, exclusive=False), False),
        (request("ab", FIRST, exclusive=False), request("ab", FIRST), True),
        (request("a"), request("ab", FIRST), True),
        (request("a"), request("bc", FIRST), False),
        (request("a"), request("a"), True),
        (request("a"), request("a", FIRST, exclusive=False), True),
    ],
)
async def test_conflicts(first: LockRequest, second: LockRequest, conflict: bool) -> None:
    assert first.conflicts_with(second) == second.conflicts_with(first) == conflict
    locks = LockManager()
    locks.enqueue(first)
    assert locks.is_free(second) != conflict


async def test_conflicting_requests_run_one_at_a_time_in_order() -> None:
    locks = LockManager()
    in_flight: set[int] = set()
    order: list[int] = []

    async def work(number: int, own: LockRequest) -> None:
        async with locks.acquire(own):
            in_flight.add(number)
            assert in_flight == {number}
            await anyio.lowlevel.checkpoint()
            in_flight.discard(number)
            order.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            own = request("ab", FIRST, exclusive=number % 3 > 0) if number % 2 else request("b")
            locks.enqueue(own)
            tasks.start_soon(work, number, own)
    assert order == list(range(20))


async def test_copies_run_concurrently_and_a_delete_waits_for_all() -> None:
    locks = LockManager()
    together = anyio.Event()
    inside = itertools.count(1)
    order: list[str] = []

    async def copy(own: LockRequest) -> None:
        async with locks.acquire(own):
            if next(inside) == 3:
                together.set()
            await together.wait()
            order.append("copy")

    async def move(own: LockRequest) -> None:
        async with locks.acquire(own):
            order.append("move")

    copies = [request("ab", FIRST, exclusive=False) for _ in range(3)]
    last = request("ab", FIRST)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for own in copies:
                locks.enqueue(own)
            locks.enqueue(last)
            tasks.start_soon(move, last)
            for own in copies:
                tasks.start_soon(copy, own)
    assert order == ["copy"] * 3 + ["move"]


async def test_cancelled_request_leaves_the_queue() -> None:
    locks = LockManager()
    first, second, third = (request("ab", FIRST) for _ in range(3))
    for own in (first, second, third):
        locks.enqueue(own)

    async def wait_for_second(scope: anyio.CancelScope) -> None:
        with scope:
            async with locks.acquire(second):
                raise AssertionError

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()
            tasks.start_soon(wait_for_second, scope)
            await anyio.lowlevel.checkpoint()
            scope.cancel()
        locks.release(first)
        async with locks.acquire(third):
            pass
    assert locks.is_free(request("ab", FIRST))
