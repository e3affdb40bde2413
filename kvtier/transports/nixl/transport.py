"""The transport ``nixl``: one-sided reads and writes of peers' arenas with NIXL."""

from __future__ import annotations

import logging
import secrets
import socket
from contextlib import suppress
from typing import ClassVar

import anyio

from kvtier.concurrency.breaker import Backoff
from kvtier.concurrency.tasks import DetachedTask
from kvtier.concurrency.threads import WorkerThreads, in_thread
from kvtier.errors import PeerError
from kvtier.memory.arena import Arena
from kvtier.transports.base import Dial, Grants, Link, SupportsConnections, Transport, TransportSettings
from kvtier.transports.nixl.link import ARENA_BYTES, Endpoint, NixlLink, encode_endpoint
from kvtier.transports.nixl.process import NixlProcess, Region
from kvtier.transports.nixl.settings import NixlSettings

logger = logging.getLogger("kvtier")

THREADS = 4
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 10.0
"""Back-off before an exited process is restarted, in seconds."""
LONG_LIFE = 60.0
"""Uptime in seconds after which the back-off is reset."""


class NixlTransport(Transport, SupportsConnections):
    """A transport that bypasses the remote cache process, with child processes that have NIXL loaded.

    NIXL and UCX can abort their process when a peer disappears, and cannot cancel a running transfer
    (:mod:`kvtier.transports.nixl.worker`). So one child process serves this host's arena to its peers, and
    each link has another. An exited process is restarted; links that have lost it request the new endpoint
    over a connection (:meth:`serve`).

    A peer that knows the endpoint can read and write the whole arena: NIXL does not enforce grants. Use this
    transport only between authenticated peers on a trusted network.
    """

    settings_type: ClassVar[type[TransportSettings]] = NixlSettings
    one_sided: ClassVar[bool] = True

    def __init__(self, settings: NixlSettings) -> None:
        self._settings = settings
        self._executor = WorkerThreads(THREADS)
        self._arena: Arena | None = None
        self._server: NixlProcess | None = None
        self._endpoint = b""
        self._arena_number = secrets.token_bytes(ARENA_BYTES)
        self._watching: DetachedTask[None] | None = None
        self._serving = anyio.Event()
        """Set while the process runs that serves the arena at :attr:`endpoint`."""

    async def open(self, arena: Arena, grants: Grants) -> None:
        """Start the process that serves the arena. Takes about 1 s. Raises :class:`PeerError`."""
        self._arena = arena
        await self._serve()
        self._watching = DetachedTask(self._watch())

    async def close(self) -> None:
        """Kill that process, which also ends the memory registration."""
        with anyio.CancelScope(shield=True):
            if self._watching is not None:
                await self._watching.stop()
            if self._server is not None:
                await self._server.end()
        self._executor.close()

    async def cut_off(self) -> None:
        """Kill the process through which peers access the arena. It is restarted."""
        if self._server is not None:
            # At once: a link that asks now must get the endpoint of the next process.
            self._note_exit()
            await self._server.end()

    @property
    def endpoint(self) -> bytes:
        """The agent's name, the arena's address and NIXL's metadata; see :class:`Endpoint`."""
        return self._endpoint

    async def connect(self, endpoint: bytes, dial: Dial) -> Link:
        """Return a link with its own process. Takes about 1 s. Raises :class:`PeerError`."""
        assert self._arena is not None, "call open before connect"
        decoded = Endpoint.decode(endpoint)
        link = NixlLink(self._arena, self._settings.deadline, self._executor, self._start, decoded, dial)
        try:
            await link.connect()
        except BaseException:
            await link.close()
            raise
        return link

    async def serve(self, connected: socket.socket) -> None:
        """Send the endpoint to a link that has lost this host's agent, once there is another agent."""

        def send_endpoint() -> None:
            connected.settimeout(self._settings.deadline)
            with suppress(OSError):
                connected.sendall(encode_endpoint(self._endpoint))

        # A link tries few times, each with a process of its own, which takes as long to start as the agent.
        with anyio.move_on_after(self._settings.deadline):
            await self._serving.wait()
        await in_thread(send_endpoint, self._executor)

    async def _start(self, *, serves: bool = False) -> NixlProcess:
        """Start a process. Raises :class:`PeerError`."""
        assert self._arena is not None
        region = Region(self._arena.capacity, self._arena.fd)
        return await NixlProcess.start(region, self._settings, self._executor, serves=serves)

    async def _serve(self) -> None:
        self._server = await self._start(serves=True)
        self._endpoint = Endpoint.of(self._arena_number, self._server).encode()
        self._serving.set()

    def _note_exit(self) -> None:
        if self._serving.is_set():  # Else others wait for this event already.
            self._serving = anyio.Event()

    async def _watch(self) -> None:
        """Restart the process that serves the arena whenever it exits."""
        backoff, began = Backoff(FIRST_PAUSE, LONGEST_PAUSE), anyio.current_time()
        while True:
            assert self._server is not None
            await self._server.exited.wait()
            self._note_exit()
            if anyio.current_time() - began > LONG_LIFE:
                backoff.reset()
            await anyio.sleep(backoff.next())
            began = anyio.current_time()
            try:
                await self._serve()
            except PeerError as error:
                logger.warning("nixl transport: peers cannot reach this host: %s", error)
            else:
                logger.info("nixl transport: restarted the NIXL process, which had exited")
