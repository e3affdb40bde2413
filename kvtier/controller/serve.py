"""The life of the controller: remember, serve, and let what is under way end before it leaves."""

from __future__ import annotations

import logging
import os
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
from anyio import CancelScope
from anyio.abc import TaskStatus

from kvtier.controller.app import make_app
from kvtier.controller.events import EventLog
from kvtier.controller.operations import Operations
from kvtier.controller.pinning import give_pins
from kvtier.controller.pins import Pins
from kvtier.controller.registry import MOST_MEMBERS, Registry
from kvtier.controller.settings import ServiceSettings
from kvtier.controller.state import State
from kvtier.controller.stream import MOST_READERS
from kvtier.errors import SettingsError
from kvtier.http import serving
from kvtier.sockets.frames import MAX_FRAME_BYTES
from kvtier.tasks import open_tasks

logger = logging.getLogger("kvtier.controller")

FINISH_SECONDS = 5.0
"""How long operations that are under way may go on when the controller is told to stop."""
MOST_CONNECTIONS = MOST_MEMBERS + MOST_READERS + 960


class Controller(NamedTuple):
    """A controller that is running."""

    address: tuple[str, int]
    registry: Registry
    operations: Operations


@asynccontextmanager
async def controlling(settings: ServiceSettings) -> AsyncIterator[Controller]:
    """Run a controller until the block is left; what is under way then has failed.

    Raises :class:`kvtier.errors.ControllerError` where what it remembers cannot be read or is another's,
    :class:`kvtier.errors.ChannelError` where it cannot listen, and :class:`kvtier.errors.SettingsError` for
    certificates that are none.
    """
    context = _tls(settings)
    token = settings.token.get_secret_value() if settings.token is not None else None
    with State.open(settings.state) as state:
        log, pins = EventLog(state, keep=settings.keep_events), Pins(state)
        registry = Registry(heartbeat=settings.heartbeat, silence=settings.silence)
        async with open_tasks() as tasks, Operations.open(registry, log, pins) as operations:
            tasks.start_soon(registry.run)
            tasks.start_soon(give_pins, registry, pins)
            async with serving(
                make_app(operations, token),
                settings.listen,
                setting="--listen",
                ssl=context,
                limit_concurrency=MOST_CONNECTIONS,
                ws_max_size=MAX_FRAME_BYTES,
            ) as address:
                try:
                    yield Controller(address, registry, operations)
                finally:
                    # Before its instances are gone: they are not to blame.
                    operations.stop()
            tasks.cancel_scope.cancel()


async def serve(settings: ServiceSettings) -> None:
    """Run a controller until SIGTERM or SIGINT; a second one ends it at once.

    Raises what :func:`controlling` does.
    """
    serving_scope, finishing = CancelScope(), CancelScope()
    async with open_tasks() as tasks:
        await tasks.start(_stop_on_signals, serving_scope, finishing)
        async with controlling(settings) as controller:
            host, port = controller.address
            scheme = "http" if settings.tls_certificate is None else "https"
            name = f"[{host}]" if ":" in host else host
            logger.info("the controller is at %s://%s:%d, process %d", scheme, name, port, os.getpid())
            with serving_scope:
                await anyio.sleep_forever()
            with finishing:
                await controller.operations.finish(FINISH_SECONDS)
        tasks.cancel_scope.cancel()


async def _stop_on_signals(
    serving_scope: CancelScope, finishing: CancelScope, *, task_status: TaskStatus[None]
) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            logger.info("%s: leaving", signal.Signals(number).name)
            if serving_scope.cancel_called:
                finishing.cancel()
            serving_scope.cancel()


def _tls(settings: ServiceSettings) -> ssl.SSLContext | None:
    if settings.tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            f"--tls-certificate {settings.tls_certificate} and --tls-key {settings.tls_key} cannot be used: "
            f"{error}"
        ) from error
    return context
