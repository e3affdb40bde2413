"""What the controller and the proxy have in common as HTTP services: tokens, errors, metrics, and a life."""

from __future__ import annotations

import hmac
import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import cache
from typing import Protocol, TypeVar

import anyio
from anyio import CancelScope
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from kvtier.concurrency import systemd
from kvtier.concurrency.tasks import open_background_tasks, stop_on_signals
from kvtier.settings.peer import join_address

BEARER = {"WWW-Authenticate": "Bearer"}
"""Headers of the answer to a client without the token."""

Respond = Callable[[Request, Exception], Awaitable[Response]]


class Running(Protocol):
    """A service that runs."""

    @property
    def address(self) -> tuple[str, int]:
        """The bound address."""
        ...


RunningT = TypeVar("RunningT", bound=Running)


@cache
def trusted_certificates() -> ssl.SSLContext:
    """Return a TLS context with those of this host. There is one for all, because loading them is slow."""
    return ssl.create_default_context()


def has_token(connection: HTTPConnection, token: bytes) -> bool:
    """Return whether a request has ``Authorization: Bearer TOKEN``. Compares tokens in constant time."""
    scheme, _, given = connection.headers.get("authorization", "").partition(" ")
    return hmac.compare_digest(given.strip().encode(), token) and scheme.lower() == "bearer"


def add_error_handlers(app: FastAPI, respond: Respond, *kinds: type[Exception]) -> None:
    """Have ``respond`` answer all errors: those of HTTP, of invalid requests, of these kinds, and bugs."""
    for kind in (HTTPException, RequestValidationError, *kinds, Exception):
        app.add_exception_handler(kind, respond)


class ServiceMetrics(Collector):
    """Prometheus metrics of a service, read at each scrape from the counters that it keeps anyway."""

    def __init__(self) -> None:
        # Without auto_describe, registering does not collect.
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def response(self) -> Response:
        """Return all metrics in Prometheus' text format."""
        return Response(generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def serve_until_signal(
    service: AbstractAsyncContextManager[RunningT],
    finish: Callable[[RunningT], Awaitable[None]],
    *,
    name: str,
    tls: bool = False,
) -> RunningT:
    """Run a service until SIGTERM or SIGINT, then ``finish`` it, which a second signal skips.

    Return the service, which has ended. Raises what ``service`` raises.
    """
    logger = logging.getLogger(f"kvtier.{name}")
    serving, finishing = CancelScope(), CancelScope()
    async with open_background_tasks() as tasks:
        await tasks.start(stop_on_signals, serving, finishing, logger)
        async with service as running:
            address = join_address(*running.address)
            logger.info("%s listening on http%s://%s, process %d", name, "s" * tls, address, os.getpid())
            systemd.notify("READY=1")
            with serving:
                await anyio.sleep_forever()
            systemd.notify("STOPPING=1")
            with finishing:
                await finish(running)
    return running
