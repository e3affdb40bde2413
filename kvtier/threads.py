"""Blocking work on a batch, in worker threads that let go of the caller's memory before the call ends."""

from __future__ import annotations

import _thread
import asyncio
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
"""Threads of this name keep no process from ending."""
IDLE_SECONDS = 5.0
"""How long a thread that has nothing to do stays."""

Hop = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a function in some worker thread at once, and is done when that has returned."""


def run_in_background(function: Callable[[], None]) -> None:
    """Run a function in a thread of its own, which keeps no process from ending, and return at once.

    ``threading.Thread.start`` waits until the thread runs: 60 and 196 ms of an engine's step were lost to
    that on a saturated machine. Raises ``RuntimeError`` where the system gives no thread.
    """
    _thread.start_new_thread(function, ())


class _Work(NamedTuple):
    function: Callable[[], None]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]


class _Crew:
    """What the threads of one :class:`WorkerThreads` share. They hold this, not that, so that it can end."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[_Work | None] = SimpleQueue()
        self.lock = threading.Lock()
        self.threads = 0
        self.unfinished = 0

    def end(self) -> None:
        """Let each thread end once there is nothing left to do."""
        with self.lock:
            for _ in range(self.threads):
                self.queue.put(None)

    def do_without_thread(self, error: RuntimeError) -> None:
        """A thread could not be started: where there is no other one, nothing that waits can be done."""
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
        """In each thread: do what there is to do."""
        while (work := self._next()) is not None:
            error: BaseException | None = None
            try:
                work.function()
            except BaseException as raised:
                error = raised
            with self.lock:
                self.unfinished -= 1
            with suppress(RuntimeError):  # The loop is closed: nobody waits any longer.
                work.loop.call_soon_threadsafe(_settle, work.done, error)
            # Between two pieces of work a thread holds on to nothing of the last.
            del work, error

    def _next(self) -> _Work | None:
        """What to do next; ``None`` where it is time to end."""
        while True:
            work = None
            with suppress(Empty):
                work = self.queue.get(timeout=IDLE_SECONDS)
            if work is not None:
                return work
            with self.lock:
                # None that is counted on: work may have come in this very moment.
                if self.threads > self.unfinished:
                    self.threads -= 1
                    return None


class WorkerThreads:
    """At most ``most`` threads, started when they are needed. Called from one event loop.

    A hop there and back takes some 60 µs, where anyio's and the executor's take 80 to 100: no task, no
    context and no lock of Python's own stand between the loop and a thread that waits for work.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._crew = _Crew()
        weakref.finalize(self, self._crew.end).atexit = False

    def __call__(self, function: Callable[[], None]) -> asyncio.Future[None]:
        """Have ``function`` run as soon as a thread is free; done with what it raises. Does not block.

        Where the system gives no thread, it is done with :class:`RuntimeError`.
        """
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        crew = self._crew
        with crew.lock:
            crew.unfinished += 1
            start = crew.threads < min(self._most, crew.unfinished)
            crew.threads += start
            crew.queue.put(_Work(function, loop, done))
        if start:
            # A daemon: what hangs in the kernel must not keep the process from ending.
            thread = threading.Thread(target=crew.work, name=WORKER_NAME, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                crew.do_without_thread(error)
        return done

    def close(self) -> None:
        """Let the threads end once they have nothing left to do; else they stay as long as this lives.

        Does not block; harmless when repeated.
        """
        self._crew.end()


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
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
        await all_done(hops)
        _error_of(hops)
        raise
    if (error := _error_of(hops)) is not None:
        try:
            raise error
        finally:
            # It refers to this frame: what it was about would stay in memory until it is collected.
            del error
    return [results[index] for index in range(len(items))]


def _error_of(hops: list[asyncio.Task[None]]) -> BaseException | None:
    """What the first hop that failed has raised. Forgets them all, whose errors count as known now."""
    errors = [error for hop in hops if not hop.cancelled() and (error := hop.exception()) is not None]
    hops.clear()
    return errors[0] if errors else None


async def all_done(hops: Sequence[asyncio.Future[Any]]) -> None:
    """Wait for them all, however often the waiting is cancelled: the caller raises its cancellation then."""
    with CancelScope(shield=True):
        while not all(hop.done() for hop in hops):
            with suppress(asyncio.CancelledError):
                await asyncio.wait(hops)
