"""Accepts connections on a listening socket."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from logging import getLogger
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from kvtier.concurrency.tasks import open_background_tasks
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


BACKLOG = 64


@asynccontextmanager
async def listening(
    path: Path, handle: Callable[[socket.socket], Awaitable[None]], inherited: socket.socket | None = None
) -> AsyncIterator[None]:
    """Serve every connection to ``path`` in a task of its own; only this user may connect.

    ``handle`` owns the socket, and must not raise. On exit, end the tasks, and remove ``path``. An
    ``inherited`` socket listens already, and belongs to whoever has bound it: ``path`` stays.
    """

    async def serve(connected: socket.socket, _address: object) -> None:
        await handle(connected)

    with inherited or _bind(path) as listener:
        try:
            async with open_background_tasks() as tasks:
                tasks.start_soon(accept_all, listener, serve)
                yield
        finally:
            if inherited is None:
                path.unlink(missing_ok=True)


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(False)
    # bind(2) creates the file with this mask. With chmod afterwards, others could connect in between.
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(mask)
    listener.listen(BACKLOG)
    return listener
