"""The controller process: startup, serving, and graceful shutdown."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from starlette.types import ASGIApp

from kvtier.concurrency.breaker import MAX_PAUSE
from kvtier.concurrency.processes import raise_file_limit
from kvtier.concurrency.tasks import open_background_tasks, open_tasks
from kvtier.errors import ControllerError, SettingsError
from kvtier.fleet.controller.app import Authenticator, make_app
from kvtier.fleet.controller.events import EventLog
from kvtier.fleet.controller.history import History
from kvtier.fleet.controller.operations import Operations
from kvtier.fleet.controller.pin_and_clear import restore_pins
from kvtier.fleet.controller.pins import Pins
from kvtier.fleet.controller.registry import MAX_MEMBERS, Registry
from kvtier.fleet.controller.settings import ServiceSettings
from kvtier.fleet.controller.standby import Standby
from kvtier.fleet.controller.state import FileState, State
from kvtier.fleet.controller.stream import MAX_READERS
from kvtier.fleet.service import serve_until_signal, trusted_certificates
from kvtier.http import serving
from kvtier.observability.traces.export import exporting
from kvtier.observability.traces.spans import Tracer
from kvtier.rpc.frames import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from kvtier.fleet.controller.shared_state import SharedState

logger = logging.getLogger("kvtier.controller")

SETTLE_SECONDS = MAX_PAUSE + 2.0
"""After this, instances that were registered before have found a controller that has started."""
PAUSE_SECONDS = 1.0
"""In which another controller may lead, after this one could not."""
FINISH_SECONDS = 5.0
"""Grace period for operations in flight at shutdown."""
MAX_CONNECTIONS = MAX_MEMBERS + MAX_READERS + 960
SPARE_FILES = 64
"""For all but connections."""


class Controller:
    """A running controller. Which application serves its clients depends on whether it leads."""

    address: tuple[str, int]
    operations: Operations
    history: History

    def __init__(self, settings: ServiceSettings, registry: Registry, state: State, tracer: Tracer) -> None:
        self.registry = registry
        self._settings = settings
        self._state = state
        self._tracer = tracer
        self._token = settings.token.get_secret_value() if settings.token is not None else None
        self._settled_at = time.monotonic() + SETTLE_SECONDS
        self._stepping_down = anyio.Event()

    def is_ready(self) -> bool:
        """Return whether all instances have probably registered, and reported their chunks."""
        members = self.registry.members.values()
        return time.monotonic() > self._settled_at and all(member.up_to_date for member in members)

    @asynccontextmanager
    async def lead(self, term: int) -> AsyncIterator[ASGIApp]:
        """Execute operations within the block. Raises: ControllerError: the state is damaged."""
        log = EventLog(self._state, keep=self._settings.keep_events)
        pins, history = Pins(self._state), History(self._state)
        self.registry.term = term
        async with open_tasks() as tasks, Operations.open(self.registry, log, pins) as operations:
            tasks.start_soon(history.run, self.registry.members)
            tasks.start_soon(restore_pins, self.registry, pins, operations.locks)
            try:
                yield await self._make_app(operations, history)
            finally:
                self.registry.term = None
                tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def stand_by(self, state: SharedState) -> AsyncIterator[Standby]:
        """Answer what any controller can, and forward the rest to the one that leads, within the block."""
        verify = self._settings.tls_certificate is not None and trusted_certificates()
        log, pins, history = EventLog(state), Pins(state), History(state)
        async with Operations.open(self.registry, log, pins) as operations:
            app = await self._make_app(operations, history)
            standby = Standby(app, state, self.is_ready, Authenticator(self._token), verify)
            async with aclosing(standby):
                yield standby

    async def take_turns(self, standby: Standby) -> None:
        """Lead whenever no other controller does, until :meth:`finish` is called."""
        url = self._settings.reached_at(self.address[1])
        while not self._stepping_down.is_set():
            term = await standby.state.acquire(url, self.is_ready)
            try:
                async with standby.state.leading(term), self.lead(term) as standby.leading:
                    logger.info("this controller leads, in term %d", term)
                    try:
                        await self._stepping_down.wait()
                    finally:
                        standby.leading = None  # Before it refuses operations.
            except ControllerError as error:
                logger.warning("this controller cannot lead: %s", error)
                await anyio.sleep(PAUSE_SECONDS)
            except Exception:  # A bug, which must not end lookups.
                logger.exception("this controller cannot lead")
                await anyio.sleep(PAUSE_SECONDS)

    async def _make_app(self, operations: Operations, history: History) -> ASGIApp:
        operations.tracer = self._tracer
        self.operations, self.history = operations, history
        return await make_app(operations, history, self._token, self._settings.grafana)

    async def finish(self) -> None:
        """Wait for operations in flight, or leave them to another controller."""
        if self._settings.is_shared:
            self._stepping_down.set()
        else:
            await self.operations.finish(FINISH_SECONDS)


@asynccontextmanager
async def run_controller(settings: ServiceSettings) -> AsyncIterator[Controller]:
    """Run a controller within the block. Operations in flight at its end are left to the next one.

    Raises: ``ControllerError`` if the state is unreadable or in use by another controller, ``ChannelError``
    if it cannot listen, ``SettingsError`` if the certificates are invalid or a package is missing.
    """
    context = _tls(settings)
    files = raise_file_limit(2 * MAX_CONNECTIONS + SPARE_FILES)
    registry = Registry(heartbeat=settings.heartbeat, idle_timeout=settings.instance_timeout)
    async with (
        exporting(settings.traces, "kvtier-controller", settings.listen) as tracer,
        AsyncExitStack() as stack,
    ):
        tasks = await stack.enter_async_context(open_tasks())
        stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(registry.run)
        app: ASGIApp
        if settings.is_shared:
            shared = await stack.enter_async_context(_shared_state(settings))
            controller = Controller(settings, registry, shared, tracer)
            app = await stack.enter_async_context(controller.stand_by(shared))
        else:
            state = await stack.enter_async_context(FileState.open(Path(settings.state)))
            controller = Controller(settings, registry, state, tracer)
            app = await stack.enter_async_context(controller.lead(0))
        async with (
            serving(
                app,
                settings.listen,
                setting="--listen",
                ssl=context,
                limit_concurrency=MAX_CONNECTIONS,
                max_connections=min(2 * MAX_CONNECTIONS, files - min(SPARE_FILES, files // 4)),
                ws_max_size=MAX_FRAME_BYTES,
            ) as controller.address,
            open_background_tasks() as turns,
        ):
            if isinstance(app, Standby):
                turns.start_soon(controller.take_turns, app)
            try:
                yield controller
            finally:
                # Before the instances disconnect, so that operations do not fail with that reason.
                controller.operations.stop()


def _shared_state(settings: ServiceSettings) -> AbstractAsyncContextManager[SharedState]:
    try:
        from kvtier.fleet.controller.shared_state import SharedState
    except ImportError as error:
        raise SettingsError(f'--state {settings.state} requires pip install "kvtier[redis]"') from error
    password = settings.state_password
    return SharedState.open(settings.state, None if password is None else password.get_secret_value())


async def serve(settings: ServiceSettings) -> None:
    """Run a controller until SIGTERM or SIGINT. A second signal skips the grace period.

    Raises: see :func:`run_controller`.
    """
    await serve_until_signal(
        run_controller(settings),
        Controller.finish,
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
