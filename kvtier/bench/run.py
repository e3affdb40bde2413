"""Measurements in an event loop of a thread of its own: what hangs there does not take the program along."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import anyio

from kvtier.bench.errors import Stuck
from kvtier.errors import KVTierError

CLEAN_UP_SECONDS = 30.0
"""How long cleaning up is waited for once somebody has had enough."""

AnswerT = TypeVar("AnswerT")


def run(work: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    """What ``work`` comes to, in an event loop of its own. Call it from the main thread; blocks.

    On Ctrl-C, and on whatever else ends this thread's waiting, the work is cancelled and waited for while it
    cleans up; a second one ends that, too. Comes back also where a call in it does not end, whose thread goes
    on.
    """
    told: Future[AnswerT] = Future()
    began: Future[tuple[asyncio.AbstractEventLoop, anyio.CancelScope]] = Future()

    async def supervised() -> None:
        with anyio.CancelScope() as scope:
            began.set_result((asyncio.get_running_loop(), scope))
            try:
                # Told from within: a loop with a call that does not end does not end either.
                told.set_result(await work())
            except BaseException as error:
                told.set_exception(error)
                raise

    def thread() -> None:
        try:
            anyio.run(supervised)
        except BaseException as error:
            if not told.done():
                told.set_exception(error)

    threading.Thread(target=thread, name="kvtier-bench", daemon=True).start()
    loop, scope = began.result()
    try:
        return told.result()
    except BaseException:
        if not told.done():
            loop.call_soon_threadsafe(scope.cancel)
            with suppress(TimeoutError):
                told.exception(CLEAN_UP_SECONDS)
        raise


def in_words(error: BaseException) -> str:
    """What went wrong, for people. Of several errors at once the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, Stuck):
        return f"{error}; what it has stored may be left behind"
    if isinstance(error, KVTierError):
        return str(error)
    if isinstance(error, ImportError):
        return f"{error}: install what provides it (`kvtier doctor` says more)"
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"
