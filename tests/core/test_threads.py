"""Blocking work in threads: in order, bounded, and never longer than the call."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable

import anyio
import pytest

from kvtier.threads import WorkerThreads, spread

pytestmark = pytest.mark.anyio


class Work:
    """Items that wait until they are let go, and what is known of them."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = 0
        self.running = 0
        self.most = 0
        self._lock = threading.Lock()

    def __call__(self, item: int) -> int:
        with self._lock:
            self.begun += 1
            self.running += 1
            self.most = max(self.most, self.running)
        self.go.wait(60)
        with self._lock:
            self.running -= 1
        return item * 10

    async def until(self, condition: Callable[[], bool]) -> None:
        with anyio.fail_after(30):
            while not condition():
                await anyio.sleep(0.001)


async def test_results_come_in_order_from_as_many_threads_as_allowed() -> None:
    work = Work()
    async with anyio.create_task_group() as group:
        group.start_soon(work.until, lambda: work.running == 3)

        async def let_go() -> None:
            await work.until(lambda: work.running == 3)
            work.go.set()

        group.start_soon(let_go)
        results = await spread(work, range(20), parts=3, hop=WorkerThreads(8))
    assert results == [item * 10 for item in range(20)]
    assert work.most == 3


async def test_the_number_of_threads_bounds_several_calls_together() -> None:
    work = Work()
    hop = WorkerThreads(2)
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(lambda: spread(work, range(4), parts=4, hop=hop))
        await work.until(lambda: work.running == 2)
        work.go.set()
    assert (work.begun, work.most) == (12, 2)


async def test_nothing_to_do_takes_no_thread() -> None:
    async def no_hop(function: Callable[[], None]) -> None:
        raise AssertionError("a hop for nothing")

    assert await spread(str, [], parts=4, hop=no_hop) == []


async def test_a_thread_that_lingers_holds_no_item() -> None:
    """As a thread does between its result and its next turn: an arena could not be unmapped meanwhile."""
    lingering = []
    hop = WorkerThreads(2)

    async def lingering_hop(function: Callable[[], None]) -> None:
        lingering.append(function)
        await hop(function)

    items = [{number} for number in range(5)]
    known = [weakref.ref(item) for item in items]
    assert await spread(len, items, parts=2, hop=lingering_hop) == [1] * 5
    del items
    assert len(lingering) == 2
    assert [item() for item in known] == [None] * 5


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_task_waits_for_its_threads_and_drops_the_rest(times: int) -> None:
    work = Work()
    task = asyncio.ensure_future(spread(work, range(50), parts=2, hop=WorkerThreads(2)))
    await work.until(lambda: work.running == 2)
    for _ in range(times):
        task.cancel()
        await anyio.sleep(0.02)
        assert not task.done()
    work.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (work.running, work.begun) == (0, 2)


async def test_a_cancelled_scope_waits_for_its_threads_and_drops_the_rest() -> None:
    work = Work()
    ended = False

    async def call() -> None:
        nonlocal ended
        try:
            await spread(work, range(50), parts=2, hop=WorkerThreads(2))
        finally:
            ended = True

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await work.until(lambda: work.running == 2)
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.02)
            assert not ended
            work.go.set()
    assert ended
    assert (work.running, work.begun) == (0, 2)


async def test_an_error_is_raised_when_all_threads_are_through() -> None:
    through = []

    def work(item: int) -> None:
        if item == 0:
            raise ZeroDivisionError
        time.sleep(0.05)
        through.append(item)

    with pytest.raises(ZeroDivisionError):
        await spread(work, range(4), parts=4, hop=WorkerThreads(4))
    assert sorted(through) == [1, 2, 3]


async def test_threads_are_started_when_needed_and_end_with_their_owner() -> None:
    before = set(threading.enumerate())
    work = Work()
    work.go.set()
    hop = WorkerThreads(4)
    assert await spread(work, range(3), parts=4, hop=hop) == [0, 10, 20]
    assert 1 <= len(set(threading.enumerate()) - before) <= 3
    hop.close()
    assert await spread(work, range(9), parts=4, hop=hop) == [item * 10 for item in range(9)]
    hop.close()
    await work.until(lambda: before.issuperset(threading.enumerate()))
    # One that is dropped lets go of them, too.
    assert await spread(work, [1], parts=1, hop=WorkerThreads(1)) == [10]
    await work.until(lambda: before.issuperset(threading.enumerate()))


async def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.threads.IDLE_SECONDS", 0.01)
    before = set(threading.enumerate())
    hop = WorkerThreads(2)
    for number in range(5):
        assert await spread(str, [number], parts=1, hop=hop) == [str(number)]
        with anyio.fail_after(30):
            while not before.issuperset(threading.enumerate()):
                await anyio.sleep(0.001)


async def test_what_a_thread_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await WorkerThreads(1)(lambda: 1 // 0)


async def test_where_no_thread_can_be_started_work_fails_and_later_work_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hop = WorkerThreads(2)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await hop(lambda: None)
    done: list[int] = []
    await hop(lambda: done.append(1))
    assert done == [1]
