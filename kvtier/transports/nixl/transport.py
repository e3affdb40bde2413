"""A host's arena, open to its peers over NIXL."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from contextlib import suppress
from typing import ClassVar

import anyio

from kvtier.arena import Arena
from kvtier.errors import PeerError
from kvtier.threads import WorkerThreads
from kvtier.transports.base import Dial, Grants, Link, SupportsConnections, Transport, TransportSettings
from kvtier.transports.nixl.endpoint import ARENA_BYTES, Endpoint
from kvtier.transports.nixl.link import NixlLink, encode_endpoint
from kvtier.transports.nixl.process import CarrierProcess, Region, in_thread
from kvtier.transports.nixl.settings import NixlSettings

logger = logging.getLogger("kvtier")

THREADS = 4
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 10.0
"""Seconds before a process that has ended is started again."""
LONG_LIFE = 60.0
"""Seconds after which a process counts as one that works."""


class NixlTransport(Transport, SupportsConnections):
    """Moves bytes without the other host's taking part, from processes that alone have NIXL in them.

    NIXL and UCX end the process that they are in with a signal when a peer goes away in the wrong moment,
    and cannot take back a transfer that has begun (:mod:`kvtier.transports.nixl.carrier`). So one process
    serves this host's arena to its peers, and each link has one. A process that has ended is replaced; links
    that have lost it ask for the endpoint of the next over a connection (:meth:`serve`).

    Whoever knows the endpoint can read and write the whole arena: NIXL knows of no grants. It is for peers
    who have proved who they are, on a network where nobody else speaks.
    """

    settings_type: ClassVar[type[TransportSettings]] = NixlSettings
    one_sided: ClassVar[bool] = True

    def __init__(self, settings: NixlSettings) -> None:
        self._settings = settings
        self._hop = WorkerThreads(THREADS)
        self._arena: Arena | None = None
        self._server: CarrierProcess | None = None
        self._endpoint = b""
        self._arena_number = secrets.token_bytes(ARENA_BYTES)
        self._watching: asyncio.Task[None] | None = None

    async def open(self, arena: Arena, grants: Grants) -> None:
        """Start the process that serves the arena. Takes a second. Raises :class:`PeerError`."""
        self._arena = arena
        await self._serve()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """End that process; with it ends what is registered."""
        with anyio.CancelScope(shield=True):
            if self._watching is not None:
                self._watching.cancel()
                with suppress(asyncio.CancelledError):
                    await self._watching
            if self._server is not None:
                await self._server.end()
        self._hop.close()

    async def cut_off(self) -> None:
        """End the process through which others reach the arena; another one takes its place."""
        if self._server is not None:
            await self._server.end()

    @property
    def endpoint(self) -> bytes:
        """The agent's name, where the arena lies for it, and NIXL's metadata: see :class:`Endpoint`."""
        return self._endpoint

    async def connect(self, endpoint: bytes, dial: Dial) -> Link:
        """A link with a process of its own. Takes a second. Raises :class:`PeerError`."""
        assert self._arena is not None, "connect comes after open"
        decoded = Endpoint.decode(endpoint)
        link = NixlLink(self._arena, self._settings.deadline, self._hop, self._start, decoded, dial)
        try:
            await link.connect()
        except BaseException:
            await link.close()
            raise
        return link

    async def serve(self, connected: socket.socket) -> None:
        """Tell a link that has lost this host's agent where to find it now."""

        def tell() -> None:
            connected.settimeout(self._settings.deadline)
            with suppress(OSError):
                connected.sendall(encode_endpoint(self._endpoint))

        await in_thread(self._hop, tell)

    async def _start(self, *, serves: bool = False) -> CarrierProcess:
        """Start a process. Raises :class:`PeerError`."""
        assert self._arena is not None
        name = f"kvtier-{secrets.token_hex(8)}"
        region = Region(self._arena.capacity, self._arena.fd)
        return await CarrierProcess.start(region, self._settings, name, self._hop, serves=serves)

    async def _serve(self) -> None:
        assert self._arena is not None
        server = self._server = await self._start(serves=True)
        assert server.opened is not None
        self._endpoint = Endpoint.of(
            self._arena_number, server.name, self._arena.capacity, server.opened
        ).encode()

    async def _watch(self) -> None:
        """Replace the process that serves the arena whenever it has ended."""
        loop = asyncio.get_running_loop()
        pause, began = FIRST_PAUSE, loop.time()
        while True:
            assert self._server is not None
            await self._server.gone.wait()
            pause = min(2 * pause, LONGEST_PAUSE) if loop.time() - began < LONG_LIFE else FIRST_PAUSE
            await asyncio.sleep(pause)
            began = loop.time()
            try:
                await self._serve()
            except PeerError as error:
                logger.warning("peers cannot reach this host over NIXL: %s", error)
            else:
                logger.info("NIXL has ended under a peer that went away, and was started anew")
