"""All state of the proxy, and the tasks that check its engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import CancelScope
from anyio.abc import TaskGroup

from kvtier.concurrency.tasks import open_tasks
from kvtier.fleet.proxy.admission import Admission
from kvtier.fleet.proxy.checks import Checks
from kvtier.fleet.proxy.directory import Directory
from kvtier.fleet.proxy.metrics import Statistics
from kvtier.fleet.proxy.settings import ProxySettings, split_engine
from kvtier.fleet.proxy.upstream import Role, Upstream, Upstreams


class Proxy:
    """All state of the proxy except the HTTP server. Create with :meth:`open`."""

    def __init__(self, settings: ProxySettings, tasks: TaskGroup) -> None:
        self.settings = settings
        self.statistics = Statistics()
        self.upstreams = Upstreams(settings.remember)
        self.admission = Admission(settings.max_requests, settings.max_body, settings.max_held)
        self.directory: Directory | None = None
        if settings.controller:
            self.directory = Directory(settings, self.upstreams, self.statistics)
        self._checks = Checks(self.upstreams, settings)
        self._tasks = tasks

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: ProxySettings) -> AsyncIterator[Proxy]:
        """Check the configured engines until the block exits; all requests must have ended by then."""
        async with open_tasks() as tasks:
            proxy = cls(settings, tasks)
            for role, engines in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
                for text in engines:
                    proxy.add(role, *split_engine(text))
            if proxy.directory is not None:
                tasks.start_soon(proxy.directory.run)
            try:
                yield proxy
            finally:
                tasks.cancel_scope.cancel()
                # Also if it is cancelled: else only the garbage collector would close the connections.
                with CancelScope(shield=True):
                    await proxy.upstreams.aclose()

    def add(self, role: Role, url: str, peer: str | None = None) -> Upstream:
        """Add an engine; it gets requests once its health check passes.

        Raises ``ValueError`` if it exists already, or there are too many.
        """
        upstream = self.upstreams.add(role, url, peer)
        self._tasks.start_soon(self._checks.watch, upstream)
        return upstream
