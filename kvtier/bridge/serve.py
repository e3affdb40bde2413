"""The life of a cache process: claim the socket, serve, and on the way out lose nothing."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TextIO

import anyio
from anyio import CancelScope
from anyio.abc import TaskStatus
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from kvtier.bridge.listen import listening
from kvtier.bridge.server import BridgeServer
from kvtier.bridge.spawn import default_address
from kvtier.cache import TieredCache
from kvtier.errors import ChannelError
from kvtier.instance import Instance
from kvtier.settings import Settings
from kvtier.tasks import open_tasks

logger = logging.getLogger("kvtier")

FIRST_ENGINE_SECONDS = 60.0
"""How long a cache process that an engine started waits for that engine."""


async def serve(settings: Settings, *, socket: Path | None = None, exit_when_idle: bool = False) -> None:
    """Serve engines on a Unix socket until SIGTERM or SIGINT, or until the last has left.

    Then no engine is served any longer, and what is on its way to a lower tier is written, for
    ``drain_timeout`` at most; a second signal ends that at once. Raises :class:`ChannelError` where
    another process serves on this socket or on ``metrics.listen``, and what :meth:`Instance.open` raises.
    """
    path = socket or settings.socket or default_address(settings)
    serving, draining = CancelScope(), CancelScope()
    with _claim(path):
        async with Instance.open(settings) as instance, open_tasks() as tasks:
            server = BridgeServer(instance)
            await tasks.start(_stop_on_signals, serving, draining)
            async with _serving_metrics(settings.metrics.listen, server):
                with server.notices.listening(logger), _frozen(), serving:
                    await _serve_engines(server, path, settings.linger if exit_when_idle else None)
                with draining:
                    await _finish(instance.cache)
            tasks.cancel_scope.cancel()


@contextmanager
def _frozen() -> Iterator[None]:
    """What is there by now stays: full collections need not look at it meanwhile."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@asynccontextmanager
async def _serving_metrics(listen: str | None, server: BridgeServer) -> AsyncIterator[None]:
    """Let Prometheus ask, also while the last chunks are written. Nothing is imported where nobody does."""
    if listen is None:
        yield
        return
    from kvtier.http import serving
    from kvtier.metrics import MOST_REQUESTS, CacheMetrics, application

    with CacheMetrics.of(server.cache, server.status) as metrics:
        async with serving(
            application(metrics), listen, setting="metrics.listen", limit_concurrency=MOST_REQUESTS
        ) as (host, port):
            logger.info("metrics on http://%s:%d/metrics", f"[{host}]" if ":" in host else host, port)
            yield


async def _serve_engines(server: BridgeServer, path: Path, linger: float | None) -> None:
    names = ", ".join(f"{tier.name} ({tier.settings.type})" for tier in server.cache.hierarchy.tiers)
    async with listening(path, server.handle):
        logger.info("serving %s on %s, process %d", names, path, os.getpid())
        if linger is None:
            await anyio.sleep_forever()
        else:
            await _until_idle(server, linger)


async def _until_idle(server: BridgeServer, linger: float) -> None:
    with anyio.move_on_after(FIRST_ENGINE_SECONDS):
        await server.came.wait()
    while True:
        if server.engines:
            await server.left.wait()
        await anyio.sleep(linger)
        if not server.engines:
            logger.info("no engine for %g s: leaving", linger)
            return


async def _stop_on_signals(
    serving: CancelScope, draining: CancelScope, *, task_status: TaskStatus[None]
) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            if serving.cancel_called:
                logger.warning("%s again: leaving at once", signal.Signals(number).name)
                draining.cancel()
            else:
                logger.info("%s: leaving", signal.Signals(number).name)
                serving.cancel()


async def _finish(cache: TieredCache) -> None:
    """Write what is still to be written, with a progress bar on a terminal."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("writing to the lower tiers"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        most = 0

        def show(left: int) -> None:
            nonlocal most
            if not most:
                logger.info("writing %.1f MiB to the lower tiers", left / 2**20)
            most = max(most, left)
            bar.update(task, total=most, completed=most - left)

        await cache.finish(show)


@contextmanager
def _claim(path: Path) -> Iterator[None]:
    """Hold the right to serve on ``path``; the kernel takes it back however this process ends."""
    with _lock_of(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ChannelError(
                f"process {lock.read().strip() or 'unknown'} already serves on {path}: "
                "stop it, or choose another `socket`"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        path.unlink(missing_ok=True)
        yield


def _lock_of(path: Path) -> TextIO:
    """Open the file whose lock is the right to serve on ``path``. Raises :class:`ChannelError`."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and not path.is_socket():
            raise ChannelError(f"socket {path} is there already, and is no socket: choose another `socket`")
        return path.with_name(path.name + ".lock").open("a+")
    except (OSError, ValueError) as error:
        raise ChannelError(f"socket {path} cannot be made: {error}: choose another `socket`") from error
