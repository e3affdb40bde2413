"""Run measurements so that a hung call does not hang the program: in a thread, and with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

import anyio

from kvtier.concurrency.tasks import DetachedTask
from kvtier.concurrency.threads import caller_into_loop
from kvtier.errors import KVTierError
from kvtier.lab.bench.sides import Overdue, Stuck

SIGNAL_SECONDS = 0.5
"""At most how late Ctrl-C is noticed."""
CLEAN_UP_SECONDS = 30.0
"""Timeout for the clean-up after Ctrl-C."""

AnswerT = TypeVar("AnswerT")
GRACE_SECONDS = 1.0
"""Extra time after the deadline, in which the call can time out itself, with a better error message."""


def run(work: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    """Run ``work`` on an event loop in a new thread and return its result. Blocks; call from the main thread.

    On Ctrl-C, or any other exception in this thread, it cancels the work and waits for its clean-up; a second
    Ctrl-C ends the wait. It returns even if a call in the work never ends; the thread then keeps running.
    """
    result: Future[AnswerT] = Future()
    started: Future[tuple[Callable[..., object], anyio.CancelScope]] = Future()

    async def supervised() -> None:
        with anyio.CancelScope() as scope:
            started.set_result((caller_into_loop(), scope))
            try:
                # Set here, because anyio.run does not return while a call is stuck.
                result.set_result(await work())
            except BaseException as error:
                result.set_exception(error)
                raise

    def thread() -> None:
        try:
            anyio.run(supervised)
        except BaseException as error:
            if not result.done():
                result.set_exception(error)

    try:
        # A daemon: a call that hangs must not keep the program from its exit.
        threading.Thread(target=thread, name="kvtier-bench", daemon=True).start()
        while not result.done():
            # A signal that arrives just before a wait does not interrupt it, however long it takes.
            wait([result], SIGNAL_SECONDS)
        return result.result()
    except BaseException:
        with suppress(TimeoutError):
            if not result.done():
                call_soon, scope = started.result(CLEAN_UP_SECONDS)
                call_soon(scope.cancel)
                result.exception(CLEAN_UP_SECONDS)
        raise


def describe_error(error: BaseException) -> str:
    """Return a message for the user; for an exception group, that of the first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, Stuck):
        return f"{error}; stored chunks may be left behind"
    if isinstance(error, KVTierError):
        return str(error)
    if isinstance(error, ImportError):
        return f"{error}: install the package that provides it (`kvtier doctor` shows details)"
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"


async def within(seconds: float, doing: str, call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    """Return the result of ``call``. Raises :class:`Overdue` if it exceeds the deadline of ``seconds``.

    ``doing`` names the call in error messages. Cancelling the caller cancels the call and waits for its end.
    Raises :class:`Stuck` if the call does not end when cancelled.
    """

    async def awaited() -> AnswerT:
        return await call()

    async def stop() -> None:
        if not await task.stop(GRACE_SECONDS):
            raise Stuck(doing, seconds)

    task = DetachedTask(awaited())
    try:
        ended = await task.wait(seconds + GRACE_SECONDS)
    except anyio.get_cancelled_exc_class():
        await stop()
        raise
    if ended:
        return task.result()
    await stop()
    raise Overdue(doing, seconds)
