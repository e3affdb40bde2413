"""Run the proxy: serve until a signal, then drain the requests in flight."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
from anyio import CancelScope

from kvtier.concurrency.signals import stop_on_signals
from kvtier.concurrency.tasks import open_tasks
from kvtier.http import serving
from kvtier.proxy.app import make_app
from kvtier.proxy.proxy import Proxy
from kvtier.proxy.settings import ProxySettings
from kvtier.proxy.statistics import Statistics

logger = logging.getLogger("kvtier.proxy")

SPARE_FILES = 256


class Running(NamedTuple):
    """A running proxy and its listen address."""

    address: tuple[str, int]
    proxy: Proxy


@asynccontextmanager
async def run_proxy(settings: ProxySettings) -> AsyncIterator[Running]:
    """Run a proxy until the block exits; requests still in flight then are cancelled with an error.

    Raises :class:`kvtier.errors.ChannelError` if it cannot listen.
    """
    # Above max_requests, so that admission rejects excess requests, and idle connections have room.
    connections = 2 * settings.max_requests + SPARE_FILES
    async with (
        Proxy.open(settings) as proxy,
        serving(
            make_app(proxy),
            settings.listen,
            setting="--listen",
            limit_concurrency=connections,
            backlog=settings.max_requests,
        ) as address,
    ):
        try:
            yield Running(address, proxy)
        finally:
            with CancelScope(shield=True):
                await proxy.admission.stop()


async def serve(settings: ProxySettings) -> Statistics:
    """Run a proxy until SIGTERM or SIGINT, and return its statistics.

    On a signal it rejects new requests and waits for those in flight, at most ``settings.drain`` seconds; a
    second signal ends the wait. Raises what :func:`run_proxy` raises.
    """
    _raise_file_limit(4 * settings.max_requests + SPARE_FILES)
    serving_scope, draining = CancelScope(), CancelScope()
    async with open_tasks() as tasks:
        await tasks.start(stop_on_signals, serving_scope, draining, logger)
        async with run_proxy(settings) as running:
            host, port = running.address
            name = f"[{host}]" if ":" in host else host
            logger.info("proxy listening on http://%s:%d, process %d", name, port, os.getpid())
            with serving_scope:
                await anyio.sleep_forever()
            running.proxy.admission.draining = True
            logger.info("draining %d requests in flight", running.proxy.admission.in_flight)
            with draining:
                await running.proxy.admission.drain(settings.drain)
        tasks.cancel_scope.cancel()
    return running.proxy.statistics


def _raise_file_limit(needed: int) -> None:
    """Raise the soft limit on open files (usually 1024): a request uses two connections at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        logger.warning(
            "the hard limit on open files is %d, but %d concurrent requests (--max-requests) may need %d: "
            "raise the limit (`ulimit -Hn`), or lower --max-requests",
            allowed,
            (needed - SPARE_FILES) // 4,
            needed,
        )
