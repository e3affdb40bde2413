"""A real server over a real cache, and clients that say byte for byte what a test tells them."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from kvtier import Settings, TieredCache
from kvtier.arena import Arena
from kvtier.errors import PeerError
from kvtier.header import ChunkHeader, object_bytes
from kvtier.keys import ChunkKey, join_keys
from kvtier.peers.authentication import Credentials, receive_exactly, send_all
from kvtier.peers.grants import GrantBook
from kvtier.peers.protocol import (
    VERSION,
    Granted,
    Hello,
    LookUp,
    Refused,
    Release,
    Released,
    Welcome,
    decode_from_server,
)
from kvtier.peers.server import PeerServer
from kvtier.plugins import Plugins
from kvtier.settings_peer import PeerSettings
from kvtier.sockets.connection import Connection, Deadline
from kvtier.sockets.frames import Message, encode
from kvtier.testing.backend import make_key, noise
from kvtier.threads import WorkerThreads
from kvtier.transports.base import Dial, Grants, Link, Transport, TransportSettings
from tests.open_files import open_files

SECRET = "a secret that these tests share"
PAYLOAD = 16_000
CHUNK = object_bytes(PAYLOAD)
BUILT_IN = Plugins.load([])


class NoTransport(Transport):
    """Moves nothing."""

    def __init__(self) -> None:
        super().__init__(TransportSettings(type="none"))

    async def open(self, arena: Arena, grants: Grants) -> None: ...

    async def close(self) -> None: ...

    @property
    def endpoint(self) -> bytes:
        return b"an endpoint"

    async def connect(self, endpoint: bytes, dial: Dial) -> Link:
        raise PeerError("it moves nothing")


class EchoTransport(NoTransport):
    """Says on a data connection what it hears there."""

    serving = 0

    async def serve(self, connected: socket.socket) -> None:
        self.serving += 1
        try:
            while True:
                await send_all(connected, await receive_exactly(connected, 1))
        finally:
            self.serving -= 1


class RawClient:
    """One connection to a server. Says what it is told to, and nothing by itself."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected

    async def say(self, *messages: Message | bytes) -> None:
        joined = b"".join(message if isinstance(message, bytes) else encode(message) for message in messages)
        await send_all(self.socket, joined)

    async def hear(self) -> Any:
        with anyio.fail_after(30):
            (length,) = struct.unpack("<I", await receive_exactly(self.socket, 4))
            return decode_from_server(await receive_exactly(self.socket, length))

    async def ask(self, message: Message) -> Any:
        await self.say(message)
        return await self.hear()

    async def closed(self, seconds: float = 10) -> bytes:
        """What still comes until the server closes."""
        heard = bytearray()
        with anyio.fail_after(seconds):
            try:
                while True:
                    heard += await receive_exactly(self.socket, 1)
            except ConnectionError:
                return bytes(heard)

    async def look_up(self, keys: Sequence[ChunkKey], *, prefix: bool = True, ticket: int = 1) -> Granted:
        granted = await self.ask(LookUp(ticket, join_keys(keys), prefix))
        assert isinstance(granted, Granted)
        assert granted.ticket == ticket
        return granted

    async def release(self, granted: Granted, chunks: Sequence[int] | None = None) -> bool:
        every = range(len(granted.positions))
        released = await self.ask(Release(2, granted.grant, list(every if chunks is None else chunks)))
        assert isinstance(released, Released)
        return released.stood

    def close(self) -> None:
        self.socket.close()


class Door:
    """An open cache that serves peers."""

    def __init__(
        self, cache: TieredCache, server: PeerServer, grants: GrantBook, settings: PeerSettings
    ) -> None:
        self.cache = cache
        self.server = server
        self.grants = grants
        self.credentials = Credentials.of(settings)
        self.hop = WorkerThreads(4)
        self.sockets: list[socket.socket] = []
        """Of clients: closed at the end."""
        self.kept: list[socket.socket] = []
        """Those that a test closes itself, later."""

    def store(self, *numbers: int) -> list[ChunkKey]:
        """Chunks in memory, whole and without a checksum."""
        keys = [make_key(number) for number in numbers]
        reservations = []
        for key in keys:
            reservation = self.cache.reserve(ChunkHeader(key, make_key(0), bytes(32), PAYLOAD))
            assert reservation is not None
            reservation.lease.view[256 : 256 + PAYLOAD] = noise(b"value" + key, PAYLOAD)
            reservations.append(reservation)
        self.cache.commit(reservations)
        return keys

    async def store_many(self, count: int) -> list[ChunkKey]:
        """The chunks 1 to ``count``, and others get their turn meanwhile."""
        keys = []
        for number in range(1, count + 1):
            keys += self.store(number)
            await anyio.lowlevel.checkpoint()
        return keys

    async def dial(self) -> socket.socket:
        """Connected, and nothing said."""
        raw = socket.socket()
        raw.setblocking(False)
        self.sockets.append(raw)
        await _connect(raw, self.server.address)
        return raw

    async def authenticated(self, credentials: Credentials | None = None) -> socket.socket:
        """Connected and let in; raises what the client's side raises."""
        chosen = credentials or self.credentials
        deadline = Deadline(10)
        connection = chosen.connection(socket.AF_INET, "127.0.0.1")

        def prove(connection: Connection) -> None:
            with deadline.bounds(connection):
                connection.connect(self.server.address)
                chosen.prove_to_server(connection)

        try:
            await self.hop(lambda: prove(connection))
        except BaseException:
            connection.close()
            raise
        connected = connection.detach()
        self.sockets.append(connected)
        return connected

    async def client(self, purpose: Any = "control", version: int = VERSION) -> RawClient:
        """One that was let in and has said Hello."""
        client = RawClient(await self.authenticated())
        welcome = await client.ask(Hello(version, "a test", purpose))
        assert isinstance(welcome, Welcome), welcome
        return client

    async def refusal(self, message: Message | bytes) -> str:
        """Why the server goes no further with one that was let in."""
        client = RawClient(await self.authenticated())
        await client.say(message)
        refused = await client.hear()
        assert isinstance(refused, Refused)
        assert not await client.closed()
        return refused.reason

    def refused(self) -> dict[str, int]:
        refused = self.server.status()["refused"]
        assert isinstance(refused, dict)
        return refused

    async def at_rest(self) -> None:
        """Wait until nobody is connected, and check that nothing is promised or leased."""
        with anyio.fail_after(30):
            while self.server.status()["connections"] or self.server.status()["strangers"]:
                await anyio.sleep(0.005)
            while self.cache.pending_bytes or self.cache.status()["flights"]:
                await anyio.sleep(0.005)
            while self.cache.arena.leases != self.cache.hierarchy.catalog.count(0):
                await anyio.sleep(0.005)
        reserving = self.server.status()["reserving"]
        assert isinstance(reserving, dict)
        assert {reserving[name] for name in ("reserved_bytes", "reservations", "announcements")} == {0}
        assert not self.cache.expecting.coming
        assert not self.cache.expecting.waiting
        assert self.grants.open == 0
        assert self.grants.promised == 0
        assert not self.grants._times
        assert not self.grants._slices


async def _connect(raw: socket.socket, address: tuple[str, int]) -> None:
    try:
        raw.connect(address)
    except BlockingIOError:
        await anyio.wait_writable(raw)


@asynccontextmanager
async def serving(
    *,
    ram: int = 64,
    disk: Path | None = None,
    checksum: bool = True,
    transport: Transport | None = None,
    **more: Any,
) -> AsyncIterator[Door]:
    """A cache of ``ram`` chunks in memory that serves peers. Afterwards nothing of it is left."""
    tiers: list[dict[str, Any]] = [{"name": "ram", "type": "cpu", "capacity": ram * CHUNK}]
    if disk is not None:
        tiers.append({"name": "ssd", "type": "disk", "path": str(disk), "capacity": 4096 * CHUNK})
    settings = PeerSettings(**{"listen": "127.0.0.1:0", "secret": SECRET, "transport": "none"} | more)
    descriptors = open_descriptors()
    async with TieredCache.open(Settings(tiers=tiers, checksum=checksum), plugins=BUILT_IN) as cache:
        transport = transport or NoTransport()
        grants = GrantBook(cache.arena, settings, one_sided=transport.one_sided)
        server = PeerServer(cache, settings, transport, grants, "there")
        async with server.serving():
            door = Door(cache, server, grants, settings)
            try:
                yield door
            finally:
                for connected in door.sockets:
                    connected.close()
        await door.at_rest()
    await until(lambda: open_descriptors() <= descriptors + len(door.kept))


def open_descriptors() -> int:
    return len(open_files())


async def until(condition: Any, seconds: float = 10) -> None:
    """Wait until something is so."""
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.005)
