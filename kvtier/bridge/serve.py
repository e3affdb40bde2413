"""Lifecycle of a cache process: claim the socket, serve, and drain before exit."""

from __future__ import annotations

import gc
import logging
import os
import socket as sockets
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import aiofiles.os
import anyio
from anyio import CancelScope
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from kvtier.bridge.server import BridgeServer
from kvtier.bridge.spawn import default_address
from kvtier.cache import TieredCache
from kvtier.concurrency.files import FileLocked, LockFile
from kvtier.concurrency.placement import shorten_slices, spread_memory
from kvtier.concurrency.processes import settle
from kvtier.concurrency.systemd import listener_path
from kvtier.concurrency.tasks import open_background_tasks, stop_on_signals
from kvtier.errors import ChannelError, KVTierError
from kvtier.instance import Instance
from kvtier.rpc.listener import listening
from kvtier.settings import Settings

if TYPE_CHECKING:
    from kvtier.observability.recording.recorder import Recorder


logger = logging.getLogger("kvtier")

FIRST_ENGINE_SECONDS = 60.0
"""How long a cache process that an engine started waits for that engine to connect."""


async def serve(
    settings: Settings,
    *,
    socket: Path | None = None,
    exit_when_idle: bool = False,
    on_serving: Callable[[], None] = lambda: None,
    on_stopping: Callable[[], None] = lambda: None,
    listener: sockets.socket | None = None,
) -> None:
    """Serve engines on a Unix socket until SIGTERM or SIGINT, or until the last engine has disconnected.

    Then stop serving, and finish pending writes to lower tiers for up to ``drain_timeout``; a second signal
    cancels them. With ``exit_when_idle``, exit ``linger`` seconds after the last engine has disconnected.
    ``on_serving`` is called once engines can connect, ``on_stopping`` once no further ones can. With a
    ``listener``, which somebody else has bound, engines connect to that, and its file is not removed.
    Raises :class:`ChannelError` if another process serves on this socket or on ``metrics.listen``, or if the
    settings name another socket than ``listener``, :class:`SettingsError` if ``recording.path`` cannot be
    written, and the errors of :meth:`Instance.open`.
    """
    spread_memory()
    shorten_slices()  # So that engines need not wait for whole slices of what else computes on their CPUs.
    named = socket or settings.socket
    path = listener_path(listener) if listener is not None else named or default_address(settings)
    if named not in (None, path):
        raise ChannelError(f"systemd listens on {path}: set `socket` to that, instead of {named}")
    serving, draining = CancelScope(), CancelScope()
    async with (
        _claim(path, listener),
        _recording(settings) as recorder,
        Instance.open(settings) as instance,
        open_background_tasks() as tasks,
    ):
        server = BridgeServer(instance, recorder)
        await tasks.start(stop_on_signals, serving, draining, logger)
        if engines := settings.canary.engine:
            from kvtier.observability.canary import Periodic  # With an HTTP client: only if it is used.

            for url in [engines] if isinstance(engines, str) else dict.fromkeys(engines):
                server.canaries[url] = Periodic(
                    url, settings.canary, lambda: server.engines > 0 and not serving.cancel_called
                )
                tasks.start_soon(server.canaries[url].run)
        async with _serving_metrics(settings.metrics.listen, server):
            with server.notices.listening(logger), _frozen(), serving:
                async with listening(path, server.handle, listener):
                    names = ", ".join(f"{tier.name} ({tier.settings.type})" for tier in server.cache.tiers)
                    logger.info("serving %s on %s, process %d", names, path, os.getpid())
                    on_serving()
                    await (_until_idle(server, settings.linger) if exit_when_idle else anyio.sleep_forever())
            on_stopping()
            with draining:
                await _finish(instance.cache)


@asynccontextmanager
async def _recording(settings: Settings) -> AsyncIterator[Recorder | None]:
    """Record lookups while the context is open. Import nothing if ``recording.path`` is not set."""
    if settings.recording.path is None:
        yield None
        return
    from kvtier.observability.recording.recorder import recording
    from kvtier.tiers.tenants import tenant_names

    async with recording(settings.recording, tenant_names(settings)) as recorder:
        yield recorder


@contextmanager
def _frozen() -> Iterator[None]:
    """Exclude the objects allocated so far, which live until exit, from garbage collection."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@asynccontextmanager
async def _serving_metrics(listen: str | None, server: BridgeServer) -> AsyncIterator[None]:
    """Serve Prometheus metrics, also while draining. Import nothing if ``metrics.listen`` is not set."""
    if listen is None:
        yield
        return
    from kvtier.http import serving
    from kvtier.observability.metrics import MAX_REQUESTS, CacheMetrics, application

    with CacheMetrics.of(server.cache, server.status, server.instance.what_if) as metrics:
        async with serving(
            application(metrics), listen, setting="metrics.listen", limit_concurrency=MAX_REQUESTS
        ) as (host, port):
            logger.info("metrics on http://%s:%d/metrics", f"[{host}]" if ":" in host else host, port)
            yield


async def _until_idle(server: BridgeServer, linger: float) -> None:
    seconds = FIRST_ENGINE_SECONDS
    while True:
        connected = server.engine_connected
        with anyio.move_on_after(seconds):
            await connected.wait()
        if not connected.is_set():
            logger.info("no engine for %g s: shutting down", seconds)
            return
        await server.idle.wait()
        seconds = linger


async def _finish(cache: TieredCache) -> None:
    """Finish pending writes, with a progress bar on a terminal."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("writing to the lower tiers"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        total = 0

        def show(left: int) -> None:
            nonlocal total
            if not total:
                logger.info("writing %.1f MiB to the lower tiers", left / 2**20)
            total = max(total, left)
            bar.update(task, total=total, completed=total - left)

        await cache.finish(show)


@asynccontextmanager
async def _claim(path: Path, listener: sockets.socket | None) -> AsyncIterator[None]:
    """Hold an exclusive lock for serving on ``path``; the kernel releases it when this process exits."""
    try:
        await aiofiles.os.makedirs(path.parent, mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK((await aiofiles.os.stat(path)).st_mode):
                raise ChannelError(f"{path} exists and is not a socket: set another `socket`")
        lock = await LockFile.acquire(path.with_name(path.name + ".lock"), f"process {os.getpid()}")
    except FileLocked as error:
        raise ChannelError(
            f"{error.holder} already serves on {path}: stop it, or set another `socket`"
        ) from error
    except (OSError, ValueError) as error:
        raise ChannelError(f"cannot create socket {path}: {error}: set another `socket`") from error
    try:
        if listener is None:
            with suppress(FileNotFoundError):
                await aiofiles.os.unlink(path)
        yield
    finally:
        await lock.release()


def main() -> None:
    """Start a cache process that is no descendant of the engine. Exit once it serves, or with its status.

    A vLLM that is stopped kills all descendants of its engine (``kill_process_tree`` in
    ``vllm/utils/system_utils.py``): the chunks in memory would be lost, for other engines as well.
    """
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        # A byte, or the end of the pipe if it has exited before.
        status = 0 if os.read(reader, 1) else os.waitpid(process, 0)[1]
        os._exit(abs(os.waitstatus_to_exitcode(status)))
    os.close(reader)
    _serve(writer)


def _serve(writer: int) -> None:
    """Serve until ``linger`` seconds after the last engine has disconnected.

    ``writer``: a descriptor that receives a byte once engines can connect. It is closed then.
    """

    def notify() -> None:
        with suppress(BrokenPipeError):
            os.write(writer, b"1")
        os.close(writer)

    settle()
    settings = Settings.model_validate_json(sys.stdin.buffer.read())
    sys.stdin.close()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        socket = Path(sys.argv[1])
        anyio.run(partial(serve, settings, socket=socket, exit_when_idle=True, on_serving=notify))
    except KVTierError as error:
        logger.error("%s", error)  # noqa: TRY400 - no traceback: the engine shows this line as the reason
        sys.exit(1)


if __name__ == "__main__":
    main()
