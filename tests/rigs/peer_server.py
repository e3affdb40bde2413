"""A real server over a real cache, and raw clients that send exactly what a test specifies."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from kvtier import Settings, TieredCache
from kvtier.concurrency.sockets.connection import Connection, Deadline
from kvtier.concurrency.threads import WorkerThreads
from kvtier.errors import PeerError
from kvtier.memory.arena import Arena
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.memory.slices import Lease
from kvtier.peers.grants import GrantBook
from kvtier.peers.protocol import (
    VERSION,
    Granted,
    Hello,
    Lookup,
    Release,
    Released,
    Welcome,
    decode_from_server,
)
from kvtier.peers.push_targets import ArenaTarget
from kvtier.peers.reservations import Reservations
from kvtier.peers.server import PeerServer
from kvtier.peers.staging.buffers import Stagings
from kvtier.plugins import Plugins
from kvtier.rpc.authentication import Credentials, receive_exactly, send_all
from kvtier.rpc.frames import MAX_FRAME_BYTES, Message, Refused, encode, receive_frame
from kvtier.settings.peer import PeerSettings
from kvtier.testing.backend import make_key, noise
from kvtier.transports.base import Access, Dial, Grants, Link, RemoteSpan, Transport, TransportSettings
from tests.rigs.open_files import open_files
from tests.rigs.waiting import until

SECRET = "a secret that these tests share"
PAYLOAD = 16_000
CHUNK = object_bytes(PAYLOAD)
BUILT_IN = Plugins.load([])


class NoTransport(Transport):
    """A transport that moves nothing."""

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
    """Echoes the bytes of data connections."""

    serving = 0

    async def serve(self, connected: socket.socket) -> None:
        self.serving += 1
        try:
            while True:
                await send_all(connected, await receive_exactly(connected, 1))
        finally:
            self.serving -= 1


class RawClient:
    """One connection to a server. Sends nothing by itself."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected

    async def send(self, *messages: Message | bytes) -> None:
        data = b"".join(message if isinstance(message, bytes) else encode(message) for message in messages)
        await send_all(self.socket, data)

    async def receive(self) -> Any:
        with anyio.fail_after(30):
            read = partial(receive_exactly, self.socket)
            return decode_from_server(await receive_frame(read, MAX_FRAME_BYTES))

    async def request(self, message: Message) -> Any:
        await self.send(message)
        return await self.receive()

    async def read_to_end(self, seconds: float = 10) -> bytes:
        """Return the remaining bytes until the server closes the connection."""
        received = bytearray()
        with anyio.fail_after(seconds):
            try:
                while True:
                    received += await receive_exactly(self.socket, 1)
            except ConnectionError:
                return bytes(received)

    async def look_up(self, keys: Sequence[ChunkKey], *, prefix: bool = True, ticket: int = 1) -> Granted:
        granted = await self.request(Lookup(ticket, join_keys(keys), prefix))
        assert isinstance(granted, Granted)
        assert granted.ticket == ticket
        return granted

    async def release(self, granted: Granted, chunks: Sequence[int] | None = None) -> bool:
        every = range(len(granted.positions))
        released = await self.request(Release(2, granted.grant, list(every if chunks is None else chunks)))
        assert isinstance(released, Released)
        return released.valid

    def close(self) -> None:
        self.socket.close()


@contextmanager
def held(grants: GrantBook, span: RemoteSpan, access: Access = Access.READ) -> Iterator[Lease]:
    """Hold a span that is granted, as a transport does during a transfer."""
    lease = grants.hold(span, access)
    assert lease is not None
    try:
        yield lease
    finally:
        lease.release()


def corrupt(cache: TieredCache, key: ChunkKey) -> None:
    """Flip a bit of a chunk in memory."""
    lease = cache.memory.lease(key)
    assert lease is not None
    lease.view[30] ^= 1
    lease.release()


class ServedCache:
    """An open cache, and the server through which peers read it."""

    def __init__(
        self, cache: TieredCache, server: PeerServer, grants: GrantBook, settings: PeerSettings
    ) -> None:
        self.cache = cache
        self.server = server
        self.grants = grants
        self.credentials = Credentials.from_settings(settings)
        self.executor = WorkerThreads(4)
        self.sockets: list[socket.socket] = []
        """Client sockets, closed at the end."""
        self.unmanaged_sockets: list[socket.socket] = []
        """Client sockets that the test closes itself."""

    def store(self, *numbers: int) -> list[ChunkKey]:
        """Store whole chunks in memory, without checksums."""
        keys = [make_key(number) for number in numbers]
        reservations = []
        for key in keys:
            reservation = self.cache.reserve(ChunkHeader(key, make_key(0), bytes(32), PAYLOAD))
            assert reservation is not None
            reservation.lease.view[HEADER_BYTES : HEADER_BYTES + PAYLOAD] = noise(b"value" + key, PAYLOAD)
            reservations.append(reservation)
        self.cache.commit(reservations)
        return keys

    async def store_many(self, count: int) -> list[ChunkKey]:
        """Store chunks 1 to ``count``, and yield to other tasks in between."""
        keys = []
        for number in range(1, count + 1):
            keys += self.store(number)
            await anyio.lowlevel.checkpoint()
        return keys

    async def connect(self) -> socket.socket:
        """Connect without sending anything."""
        raw = socket.socket()
        raw.setblocking(False)
        self.sockets.append(raw)
        await _connect(raw, self.server.address)
        return raw

    async def connect_authenticated(self, credentials: Credentials | None = None) -> socket.socket:
        """Connect and authenticate. Raises what the client side raises."""
        chosen = credentials or self.credentials
        deadline = Deadline(10)
        connection = chosen.connection(socket.AF_INET, "127.0.0.1")

        def prove(connection: Connection) -> None:
            with deadline.bounds(connection):
                connection.connect(self.server.address)
                chosen.prove_to_server(connection, VERSION)

        try:
            await self.executor(lambda: prove(connection))
        except BaseException:
            connection.close()
            raise
        connected = connection.detach()
        self.sockets.append(connected)
        return connected

    async def client(self, purpose: Any = "control", version: int = VERSION) -> RawClient:
        """Connect, authenticate and exchange Hello and Welcome."""
        client = RawClient(await self.connect_authenticated())
        welcome = await client.request(Hello(version, "a test", purpose))
        assert isinstance(welcome, Welcome), welcome
        return client

    async def refusal(self, message: Message | bytes) -> str:
        """Send a message on an authenticated connection; return why the server refuses it."""
        client = RawClient(await self.connect_authenticated())
        await client.send(message)
        refused = await client.receive()
        assert isinstance(refused, Refused)
        assert not await client.read_to_end()
        return refused.reason

    def refused(self) -> dict[str, int]:
        refused = self.server.status()["refused"]
        assert isinstance(refused, dict)
        return refused

    async def wait_until_idle(self) -> None:
        """Wait until all clients are disconnected, and check that nothing is granted or leased."""
        with anyio.fail_after(30):
            while self.server.status()["connections"] or self.server.status()["unauthenticated"]:
                await anyio.sleep(0.005)
            while self.cache.pending_bytes or self.cache.status()["flights"]:
                await anyio.sleep(0.005)
            while self.cache.arena.leases != self.cache.catalog.count(0):
                await anyio.sleep(0.005)
        reserving = self.server.status()["reserving"]
        assert isinstance(reserving, dict)
        assert {reserving[name] for name in ("reserved_bytes", "reservations", "announcements")} == {0}
        assert not self.cache.expecting.announced
        assert not self.cache.expecting.waiting
        assert self.grants.open == 0
        assert self.grants.granted_bytes == 0
        assert self.grants.slices == 0


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
) -> AsyncIterator[ServedCache]:
    """Open a cache of ``ram`` chunks in memory that serves peers. Check on exit that nothing is leaked."""
    tiers: list[dict[str, Any]] = [{"name": "ram", "type": "cpu", "capacity": ram * CHUNK}]
    if disk is not None:
        tiers.append({"name": "ssd", "type": "disk", "path": str(disk), "capacity": 4096 * CHUNK})
    settings = PeerSettings(**{"listen": "127.0.0.1:0", "secret": SECRET, "transport": "none"} | more)
    descriptors = len(open_files())
    async with TieredCache.open(Settings(tiers=tiers, checksum=checksum), plugins=BUILT_IN) as cache:
        transport = transport or NoTransport()
        grants = GrantBook(cache.arena, settings, one_sided=transport.one_sided)
        arena = ArenaTarget(cache, grants, transport.cut_off)
        reservations = Reservations(cache, arena, Stagings(cache.settings, None, cache))
        server = PeerServer(cache, settings, transport, grants, reservations, "there")
        async with server.serving():
            served = ServedCache(cache, server, grants, settings)
            try:
                yield served
            finally:
                for connected in served.sockets:
                    connected.close()
        await served.wait_until_idle()
    await until(lambda: len(open_files()) <= descriptors + len(served.unmanaged_sockets))
