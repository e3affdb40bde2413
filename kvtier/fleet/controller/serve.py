"""The controller process: startup, serving, and graceful shutdown."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from kvtier.concurrency.processes import raise_file_limit
from kvtier.concurrency.tasks import open_tasks
from kvtier.errors import SettingsError
from kvtier.fleet.controller.app import make_app
from kvtier.fleet.controller.events import EventLog
from kvtier.fleet.controller.history import History
from kvtier.fleet.controller.operations import Operations
from kvtier.fleet.controller.pin_and_clear import restore_pins
from kvtier.fleet.controller.pins import Pins
from kvtier.fleet.controller.registry import MAX_MEMBERS, Registry
from kvtier.fleet.controller.settings import ServiceSettings
from kvtier.fleet.controller.state import State
from kvtier.fleet.controller.stream import MAX_READERS
from kvtier.fleet.service import serve_until_signal
from kvtier.http import serving
from kvtier.observability.traces.export import exporting
from kvtier.rpc.frames import MAX_FRAME_BYTES

FINISH_SECONDS = 5.0
"""Grace period for operations in flight at shutdown."""
MAX_CONNECTIONS = MAX_MEMBERS + MAX_READERS + 960
SPARE_FILES = 64
"""For all but connections."""


class Controller(NamedTuple):
    """A running controller."""

    address: tuple[str, int]
    registry: Registry
    operations: Operations
    history: History


@asynccontextmanager
async def run_controller(settings: ServiceSettings) -> AsyncIterator[Controller]:
    """Run a controller within the block. Operations in flight at its end fail.

    Raises: ``ControllerError`` if the state file is unreadable or in use by another controller,
    ``ChannelError`` if it cannot listen, ``SettingsError`` if the certificates are invalid.
    """
    context = _tls(settings)
    token = settings.token.get_secret_value() if settings.token is not None else None
    files = raise_file_limit(2 * MAX_CONNECTIONS + SPARE_FILES)
    async with State.open(settings.state) as state:
        log, pins, history = EventLog(state, keep=settings.keep_events), Pins(state), History(state)
        registry = Registry(heartbeat=settings.heartbeat, idle_timeout=settings.instance_timeout)
        async with (
            exporting(settings.traces, "kvtier-controller", settings.listen) as tracer,
            open_tasks() as tasks,
            Operations.open(registry, log, pins) as operations,
        ):
            operations.tracer = tracer
            tasks.start_soon(registry.run)
            tasks.start_soon(history.run, registry.members)
            tasks.start_soon(restore_pins, registry, pins, operations.locks)
            async with serving(
                make_app(operations, history, token, settings.grafana),
                settings.listen,
                setting="--listen",
                ssl=context,
                limit_concurrency=MAX_CONNECTIONS,
                max_connections=min(2 * MAX_CONNECTIONS, files - min(SPARE_FILES, files // 4)),
                ws_max_size=MAX_FRAME_BYTES,
            ) as address:
                try:
                    yield Controller(address, registry, operations, history)
                finally:
                    # Before the instances disconnect, so that operations do not fail with that reason.
                    operations.stop()
            tasks.cancel_scope.cancel()


async def serve(settings: ServiceSettings) -> None:
    """Run a controller until SIGTERM or SIGINT. A second signal skips the grace period.

    Raises: see :func:`run_controller`.
    """
    await serve_until_signal(
        run_controller(settings),
        lambda controller: controller.operations.finish(FINISH_SECONDS),
        name="controller",
        tls=settings.tls_certificate is not None,
    )


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
