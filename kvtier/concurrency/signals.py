"""Signals that end a command."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from logging import Logger
from types import FrameType

import anyio
from anyio import CancelScope
from anyio.abc import TaskStatus


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that cleanup runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def stop_on_signals(
    serving: CancelScope, draining: CancelScope, logger: Logger, *, task_status: TaskStatus[None]
) -> None:
    """Cancel ``serving`` on the first SIGTERM or SIGINT, and ``draining`` on the second."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            if serving.cancel_called:
                logger.warning("%s again: exiting without draining", signal.Signals(number).name)
                draining.cancel()
            else:
                logger.info("%s: shutting down", signal.Signals(number).name)
                serving.cancel()
