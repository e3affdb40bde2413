"""Blocking work in threads: ordered results, bounded threads, and no work after the call returns."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable

import anyio
import pytest

from kvtier.concurrency.threads import WorkerThreads, spread
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio


class Work:
    """Work items that block until released, with counters."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.started = 0
        self.running = 0
        self.max_running = 0
        self._lock = threading.Lock()

    def __call__(self, item: int) -> int:
        with self._lock:
            self.started += 1
            self.running += 1
            self.max_running = max(self.max_running, self.running)
        self.released.wait(60)
        with self._lock:
            self.running -= 1
        return item * 10


async def test_results_are_ordered_and_threads_are_bounded() -> None:
    work = Work()
    call = asyncio.ensure_future(spread(work, range(20), parts=3, executor=WorkerThreads(8)))
    await until(lambda: work.running == 3)
    work.released.set()
    results = await call
    assert results == [item * 10 for item in range(20)]
    assert work.max_running == 3


async def test_threads_are_bounded_over_several_calls() -> None:
    work = Work()
    executor = WorkerThreads(2)
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(lambda: spread(work, range(4), parts=4, executor=executor))
        await until(lambda: work.running == 2)
        work.released.set()
    assert (work.started, work.max_running) == (12, 2)


async def test_empty_input_uses_no_thread() -> None:
    async def unused_executor(function: Callable[[], None]) -> None:
        raise AssertionError("the executor was called without work")

    assert await spread(str, [], parts=4, executor=unused_executor) == []


async def test_idle_thread_holds_no_reference_to_items() -> None:
    """A reference kept by an idle thread would prevent an arena from being unmapped."""
    functions = []
    executor = WorkerThreads(2)

    async def recording_executor(function: Callable[[], None]) -> None:
        functions.append(function)
        await executor(function)

    items = [{number} for number in range(5)]
    references = [weakref.ref(item) for item in items]
    assert await spread(len, items, parts=2, executor=recording_executor) == [1] * 5
    del items
    assert len(functions) == 2
    assert [item() for item in references] == [None] * 5


@pytest.mark.parametrize("times", [1, 3])
async def test_cancelled_task_waits_for_running_items_and_drops_the_rest(times: int) -> None:
    work = Work()
    task = asyncio.ensure_future(spread(work, range(50), parts=2, executor=WorkerThreads(2)))
    await until(lambda: work.running == 2)
    for _ in range(times):
        task.cancel()
        await anyio.sleep(0.02)
        assert not task.done()
    work.released.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (work.running, work.started) == (0, 2)


async def test_cancelled_scope_waits_for_running_items_and_drops_the_rest() -> None:
    work = Work()
    ended = False

    async def call() -> None:
        nonlocal ended
        try:
            await spread(work, range(50), parts=2, executor=WorkerThreads(2))
        finally:
            ended = True

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await until(lambda: work.running == 2)
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.02)
            assert not ended
            work.released.set()
    assert ended
    assert (work.running, work.started) == (0, 2)


async def test_error_is_raised_after_all_threads_have_finished() -> None:
    finished = []

    def work(item: int) -> None:
        if item == 0:
            raise ZeroDivisionError
        time.sleep(0.05)
        finished.append(item)

    with pytest.raises(ZeroDivisionError):
        await spread(work, range(4), parts=4, executor=WorkerThreads(4))
    assert sorted(finished) == [1, 2, 3]


async def test_threads_start_on_demand_and_end_with_their_owner() -> None:
    before = set(threading.enumerate())
    work = Work()
    work.released.set()
    executor = WorkerThreads(4)
    assert await spread(work, range(3), parts=4, executor=executor) == [0, 10, 20]
    assert 1 <= len(set(threading.enumerate()) - before) <= 3
    executor.close()
    assert await spread(work, range(9), parts=4, executor=executor) == [item * 10 for item in range(9)]
    executor.close()
    await until(lambda: before.issuperset(threading.enumerate()))
    # So do the threads of an executor that is garbage-collected.
    assert await spread(work, [1], parts=1, executor=WorkerThreads(1)) == [10]
    await until(lambda: before.issuperset(threading.enumerate()))


async def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.concurrency.threads.IDLE_SECONDS", 0.01)
    before = set(threading.enumerate())
    executor = WorkerThreads(2)
    for number in range(5):
        assert await spread(str, [number], parts=1, executor=executor) == [str(number)]
        await until(lambda: before.issuperset(threading.enumerate()))


async def test_exception_in_a_thread_propagates() -> None:
    with pytest.raises(ZeroDivisionError):
        await WorkerThreads(1)(lambda: 1 // 0)


async def test_failure_to_start_a_thread_fails_only_that_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = WorkerThreads(2)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await executor(lambda: None)
    completed: list[int] = []
    await executor(lambda: completed.append(1))
    assert completed == [1]
