"""The life of the proxy: serve, and let what is under way end before it leaves."""

from __future__ import annotations

import logging
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
from anyio import CancelScope
from anyio.abc import TaskStatus

from kvtier.http import serving
from kvtier.proxy.app import make_app
from kvtier.proxy.proxy import Proxy
from kvtier.proxy.settings import ProxySettings
from kvtier.proxy.statistics import Statistics
from kvtier.tasks import open_tasks

logger = logging.getLogger("kvtier.proxy")

SPARE_FILES = 256


class Running(NamedTuple):
    """A proxy that serves."""

    address: tuple[str, int]
    proxy: Proxy


@asynccontextmanager
async def proxying(settings: ProxySettings) -> AsyncIterator[Running]:
    """Run a proxy until the block is left; requests that are under way then are ended, and told so.

    Raises :class:`kvtier.errors.ChannelError` where it cannot listen.
    """
    connections = (
        2 * settings.most_requests + SPARE_FILES
    )  # Most of them idle: a refusal is to come from here.
    async with (
        Proxy.open(settings) as proxy,
        serving(
            make_app(proxy),
            settings.listen,
            setting="--listen",
            limit_concurrency=connections,
            backlog=settings.most_requests,
        ) as address,
    ):
        try:
            yield Running(address, proxy)
        finally:
            with CancelScope(shield=True):
                await proxy.admission.stop()


async def serve(settings: ProxySettings) -> Statistics:
    """Run a proxy until SIGTERM or SIGINT, and return what it has counted.

    It then takes no more requests and waits for those under way, for ``settings.drain`` at most; a second
    signal ends that at once. Raises what :func:`proxying` does.
    """
    _allow_files(4 * settings.most_requests + SPARE_FILES)
    serving_scope, draining = CancelScope(), CancelScope()
    async with open_tasks() as tasks:
        await tasks.start(_stop_on_signals, serving_scope, draining)
        async with proxying(settings) as running:
            host, port = running.address
            name = f"[{host}]" if ":" in host else host
            logger.info("the proxy is at http://%s:%d, process %d", name, port, os.getpid())
            with serving_scope:
                await anyio.sleep_forever()
            running.proxy.admission.draining = True
            logger.info("%d requests are under way", running.proxy.admission.under_way)
            with draining:
                await running.proxy.admission.drain(settings.drain)
        tasks.cancel_scope.cancel()
    return running.proxy.statistics


async def _stop_on_signals(
    serving_scope: CancelScope, draining: CancelScope, *, task_status: TaskStatus[None]
) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            logger.info("%s: leaving", signal.Signals(number).name)
            if serving_scope.cancel_called:
                draining.cancel()
            serving_scope.cancel()


def _allow_files(needed: int) -> None:
    """A request has a connection to its client, and one to an engine. 1024 files are a usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        logger.warning(
            "this process may open %d files, and %d requests at once (--most-requests) may need %d: raise "
            "the limit (`ulimit -Hn`), or lower --most-requests",
            allowed,
            (needed - SPARE_FILES) // 4,
            needed,
        )
