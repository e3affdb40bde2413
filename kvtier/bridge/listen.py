"""The Unix socket on which a cache process listens."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from kvtier.concurrency.tasks import open_tasks
from kvtier.rpc.listener import accept_all

BACKLOG = 64


@asynccontextmanager
async def listening(path: Path, handle: Callable[[socket.socket], Awaitable[None]]) -> AsyncIterator[None]:
    """Serve every connection to ``path`` in a task of its own; only this user may connect.

    ``handle`` owns the socket, and must not raise. On exit, end the tasks, and remove ``path``.
    """

    async def serve(connected: socket.socket, _address: object) -> None:
        await handle(connected)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
        try:
            async with open_tasks() as tasks:
                tasks.start_soon(accept_all, listener, serve)
                yield
                tasks.cancel_scope.cancel()
        finally:
            path.unlink(missing_ok=True)
