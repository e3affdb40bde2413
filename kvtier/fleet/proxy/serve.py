"""The proxy process: how it serves and drains."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from anyio import CancelScope

from kvtier.concurrency.processes import raise_file_limit
from kvtier.fleet.proxy.app import make_app
from kvtier.fleet.proxy.metrics import Statistics
from kvtier.fleet.proxy.proxy import Proxy
from kvtier.fleet.proxy.settings import ProxySettings
from kvtier.fleet.service import serve_until_signal
from kvtier.http import serving

logger = logging.getLogger("kvtier.proxy")
SPARE_FILES = 256
"""For idle connections, and for clients that are refused."""


class Running(NamedTuple):
    """A running proxy and its listen address."""

    address: tuple[str, int]
    proxy: Proxy


@asynccontextmanager
async def run_proxy(settings: ProxySettings) -> AsyncIterator[Running]:
    """Run a proxy until the block exits; requests still in flight then are cancelled with an error.

    Raises :class:`kvtier.errors.ChannelError` if it cannot listen.
    """
    settings, max_connections = _fit_to_files(settings)
    async with (
        Proxy.open(settings) as proxy,
        serving(
            make_app(proxy),
            settings.listen,
            setting="--listen",
            # Above max_requests, so that admission rejects excess requests, and idle connections have room.
            limit_concurrency=2 * settings.max_requests + SPARE_FILES,
            max_connections=max_connections,
            backlog=settings.max_requests,
        ) as address,
    ):
        try:
            yield Running(address, proxy)
        finally:
            # Also if it is cancelled: else clients would see closed connections instead of an error.
            with CancelScope(shield=True):
                await proxy.admission.stop()


async def serve(settings: ProxySettings) -> Statistics:
    """Run a proxy until SIGTERM or SIGINT, and return its statistics.

    On a signal it rejects new requests and waits for those in flight, at most ``settings.drain`` seconds; a
    second signal ends the wait. Raises what :func:`run_proxy` raises.
    """

    async def drain(running: Running) -> None:
        admission = running.proxy.admission
        logger.info("draining %d requests in flight", admission.in_flight)
        await admission.drain(settings.drain)

    running = await serve_until_signal(run_proxy(settings), drain, name="proxy")
    return running.proxy.statistics


def _fit_to_files(settings: ProxySettings) -> tuple[ProxySettings, int]:
    """Raise the limit of open files, and fit ``max_requests`` to it; return also how many may connect.

    A request has a connection to its client, and one to an engine at a time. For the latter, descriptors are
    kept back: else clients that connect at once could take all, and none of them would be served.
    """
    files = raise_file_limit(5 * settings.max_requests + 3 * SPARE_FILES)
    spare = min(SPARE_FILES, files // 4)
    requests = min(settings.max_requests, (files - spare - spare // 2) // 2)
    if requests < settings.max_requests:
        logger.warning(
            "the hard limit on open files is %d, which allows %d concurrent requests, not %d: raise the "
            "limit (`ulimit -Hn`), or lower --max-requests",
            files,
            requests,
            settings.max_requests,
        )
    connections = min(4 * requests + 2 * SPARE_FILES, files - requests - spare)
    return settings.model_copy(update={"max_requests": requests}), connections
