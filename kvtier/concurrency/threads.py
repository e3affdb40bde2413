"""Run blocking work on a batch in worker threads, which release the caller's memory before the call ends."""

from __future__ import annotations

import _thread
import asyncio
import select
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from anyio import CancelScope

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

WORKER_NAME = "kvtier-worker"
"""Name of the worker threads. They are daemons, and do not keep the process from exiting."""
IDLE_SECONDS = 5.0
"""How long an idle thread lives."""

PAUSE_SECONDS = 5e-5

Executor = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a function in a worker thread. The result is done when the function returns."""


def run_in_background(function: Callable[[], object]) -> None:
    """Run a function in a daemon thread and return immediately.

    ``threading.Thread.start`` waits until the thread runs, which has blocked an engine's step for 60 and
    196 ms on a saturated machine. Raises ``RuntimeError`` if the system cannot create a thread.
    """
    _thread.start_new_thread(function, ())


def let_others_run() -> None:
    """Give up the interpreter for a moment, from a thread that computes.

    Otherwise it would keep it from an event loop for up to 5 ms, ``sys.getswitchinterval()``.
    """
    # With 0 seconds, this thread mostly takes it again before another one has woken up. time.sleep waits for
    # an absolute time: libfaketime, with which the soak test turns clocks, refuses one that has just passed.
    select.select((), (), (), PAUSE_SECONDS)


def caller_into_loop() -> Callable[..., object]:
    """Return a function that schedules a call in the running event loop, from any thread.

    It does not wait for the call, unlike anyio's ``from_thread``: the event loop may be busy, or hang. It
    raises ``RuntimeError`` if the event loop is closed.
    """
    return asyncio.get_running_loop().call_soon_threadsafe


Call = asyncio.Future[None]
"""A call in a worker thread. Done when the function has returned or raised."""


class _Work(NamedTuple):
    function: Callable[[], None]
    loop: asyncio.AbstractEventLoop
    done: Call


class _Pool:
    """State shared by the threads of a :class:`WorkerThreads`, which they do not keep alive."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[_Work | None] = SimpleQueue()
        self.lock = threading.Lock()
        self.threads = 0
        self.unfinished = 0

    def end(self) -> None:
        """Let each thread exit when the queue is empty."""
        with self.lock:
            for _ in range(self.threads):
                self.queue.put(None)

    def thread_failed(self, error: RuntimeError) -> None:
        """Handle a failed thread start. Without any thread, fail all queued work."""
        with self.lock:
            self.threads -= 1
            if self.threads:
                return
            with suppress(Empty):
                while True:
                    if (work := self.queue.get_nowait()) is not None:
                        self.unfinished -= 1
                        work.loop.call_soon(_settle, work.done, error)

    def work(self) -> None:
        """Process the queue. Runs in each thread."""
        while (work := self._next()) is not None:
            error: BaseException | None = None
            try:
                work.function()
            except BaseException as raised:
                error = raised
            with self.lock:
                self.unfinished -= 1
            with suppress(RuntimeError):  # The loop is closed, and with it the waiting tasks.
                work.loop.call_soon_threadsafe(_settle, work.done, error)
            # Do not keep references while waiting for the next work.
            del work, error

    def _next(self) -> _Work | None:
        """Return the next work; ``None`` if the thread should exit."""
        while True:
            work = None
            with suppress(Empty):
                work = self.queue.get(timeout=IDLE_SECONDS)
            if work is not None:
                return work
            with self.lock:
                # Exit only if more threads than work remain: work may have been queued just now.
                if self.threads > self.unfinished:
                    self.threads -= 1
                    return None


class WorkerThreads:
    """Up to ``max_threads`` worker threads, started on demand. Call it from one event loop only.

    A round trip to a worker thread takes about 60 µs (anyio and the default executor: 80 to 100 µs): no task,
    context copy or Python-level lock sits between the event loop and a waiting thread.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._pool = _Pool()
        # At exit, daemon threads need not end.
        weakref.finalize(self, self._pool.end).atexit = False

    def __call__(self, function: Callable[[], None]) -> Call:
        """Run ``function`` when a thread is free. The future gets its exception. Does not block.

        If no thread can be started, the future gets the :class:`RuntimeError`.
        """
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        pool = self._pool
        with pool.lock:
            pool.unfinished += 1
            start = pool.threads < min(self._max_threads, pool.unfinished)
            pool.threads += start
            pool.queue.put(_Work(function, loop, done))
        if start:
            # A daemon: a thread that hangs in the kernel must not keep the process from exiting.
            thread = threading.Thread(target=pool.work, name=WORKER_NAME, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                pool.thread_failed(error)
        return done

    def close(self) -> None:
        """Let the threads exit when the queue is empty. Does not block. Idempotent.

        Without it they live as long as this object.
        """
        self._pool.end()


def _settle(done: Call, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


async def spread(
    work: Callable[[ItemT], ResultT],
    items: Sequence[ItemT],
    *,
    parts: int,
    executor: Executor,
    on_cancel: Callable[[], None] | None = None,
) -> list[ResultT]:
    """Apply ``work`` to every item in up to ``parts`` threads. Return the results in order of the items.

    Makes one executor call per part, not per item: each thread takes items from a queue until it is empty.
    When cancelled, through an anyio scope or ``Task.cancel``, it drops the items that are not started and
    ends when no thread uses an item. Raises the exception of ``work``, also after all threads have finished.
    ``on_cancel`` is called at once on cancellation; it may interrupt the threads.
    """
    # A thread removes its item from the queue: it references this function, and thus the queue, for a moment
    # after it has returned, when the memory may already be unmapped.
    queue = deque(enumerate(items))
    results: dict[int, ResultT] = {}

    def run_items() -> None:
        while True:
            try:
                index, item = queue.popleft()
            except IndexError:
                return
            results[index] = work(item)

    calls = [asyncio.ensure_future(executor(run_items)) for _ in range(min(parts, len(items)))]
    try:
        if calls:
            await asyncio.wait(calls)
    except asyncio.CancelledError:
        queue.clear()
        if on_cancel is not None:
            on_cancel()
        await wait_all(calls)
        _error_of(calls)
        raise
    if (error := _error_of(calls)) is not None:
        try:
            raise error
        finally:
            # Break the reference cycle of exception and frame, which would keep the items in memory.
            del error
    return [results[index] for index in range(len(items))]


async def in_thread(
    function: Callable[[], ResultT], executor: Executor, on_cancel: Callable[[], None] | None = None
) -> ResultT:
    """Call ``function`` in a worker thread. Cancelled like :func:`spread`: returns when it has returned."""
    (result,) = await spread(lambda call: call(), [function], parts=1, executor=executor, on_cancel=on_cancel)
    return result


def _error_of(calls: list[asyncio.Task[None]]) -> BaseException | None:
    """Return the first exception, and mark all as retrieved. Clears ``calls``."""
    errors = [error for call in calls if not call.cancelled() and (error := call.exception()) is not None]
    calls.clear()
    return errors[0] if errors else None


async def wait_all(calls: Sequence[asyncio.Future[Any]]) -> None:
    """Wait for all calls, however often the wait is cancelled. The caller re-raises its cancellation."""
    with CancelScope(shield=True):
        while not all(call.done() for call in calls):
            with suppress(asyncio.CancelledError):
                await asyncio.wait(calls)
