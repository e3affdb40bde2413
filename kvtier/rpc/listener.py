"""Accepts connections on a listening socket."""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine
from logging import getLogger
from typing import Any

import anyio
import anyio.lowlevel

from kvtier.logs import RateLimitedLog

RECOVERY_SECONDS = 0.1
"""Pause after a failed ``accept``, for example when file descriptors run out."""

_warn = RateLimitedLog(getLogger("kvtier"))


async def accept_all(
    listener: socket.socket, serve: Callable[[socket.socket, Any], Coroutine[Any, Any, None]]
) -> None:
    """Serve every connection in a task of its own, with its address, until cancelled.

    ``listener`` is non-blocking. ``serve`` owns the socket, and must not raise. A failed ``accept`` is logged
    and retried.
    """
    async with anyio.create_task_group() as tasks:
        while True:
            try:
                connected, address = listener.accept()
            except BlockingIOError:
                await anyio.wait_readable(listener)
            except OSError as error:
                _warn("cannot accept connections on %s: %s", listener.getsockname(), error)
                await anyio.sleep(RECOVERY_SECONDS)
            else:
                tasks.start_soon(serve, connected, address)
                await anyio.lowlevel.checkpoint()
