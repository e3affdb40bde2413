"""Scripted peers over real sockets, and a transport that copies within this process."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from kvtier.backends.base import Outcome
from kvtier.concurrency.sockets.connection import Connection
from kvtier.errors import PeerError, ProtocolError
from kvtier.memory.arena import Arena
from kvtier.memory.keys import ChunkKey, split_keys
from kvtier.peers.backend import PeersBackend
from kvtier.peers.protocol import (
    NO_GRANT,
    VERSION,
    Await,
    Contained,
    Contains,
    Granted,
    Hello,
    Lookup,
    Readable,
    Release,
    Released,
    Welcome,
    decode_from_client,
)
from kvtier.rpc.authentication import Credentials, receive_exactly, send_all
from kvtier.rpc.frames import MAX_FRAME_BYTES, Message, Ping, Pong, Refused, encode, receive_frame
from kvtier.settings import TierSettings
from kvtier.settings.peer import PeerSettings
from kvtier.testing.backend import make_key, noise
from kvtier.transports.base import Dial, Grants, Link, ReadItem, RemoteSpan, Transport, WriteItem
from tests.rigs.open_files import sockets
from tests.rigs.waiting import until

CHUNK = 5000
TIMEOUT = 20.0
"""For tests in which every peer answers. Long, so that a busy machine does not fail them."""
SECRET = "a secret of these tests"


class NoAuthentication:
    """A stand-in for ``Credentials`` that skips authentication."""

    def connection(self, family: int, host: str) -> Connection:
        return Connection(family)

    def prove_to_server(self, connection: Connection, version: int) -> None:
        pass


def value(key: ChunkKey, length: int = CHUNK) -> bytes:
    return noise(b"value" + key, length)


def _set_event() -> anyio.Event:
    event = anyio.Event()
    event.set()
    return event


@dataclass
class ScriptedPeer:
    """A peer that holds chunks and answers requests, unless ``script`` overrides a reply."""

    name: str = "there"
    transport: str = "memory"
    lease: float = 10.0
    credentials: Credentials | None = None
    """If set, clients must authenticate."""
    instance: str = ""
    port: int = 0
    script: Callable[[Message], Sequence[Message | bytes] | None] = lambda _: None
    """Replies that replace the default ones; ``None`` for the default. Bytes are sent verbatim."""
    late: frozenset[ChunkKey] = frozenset()
    """Chunks that become readable once ``landed`` is set."""
    landed: anyio.Event = field(default_factory=_set_event)
    answering: anyio.Event = field(default_factory=_set_event)
    """Requests wait for this event. Replace it with an unset one to stall the peer."""
    chunks: dict[ChunkKey, bytes] = field(default_factory=dict)
    granted: dict[int, dict[int, ChunkKey]] = field(default_factory=dict)
    """Open grants, and their chunks by number."""
    requests: Counter[str] = field(default_factory=Counter)
    """Received requests by message name, and accepted ``connections``."""
    reads: Counter[ChunkKey] = field(default_factory=Counter)
    read_calls: int = 0
    links: int = 0
    """Number of open links."""
    connections: int = 0
    reading: anyio.Event = field(default_factory=anyio.Event)
    """Set when a read has started."""
    may_read: anyio.Event = field(default_factory=_set_event)
    read_outcome: Outcome | None = None

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1000)
        self._sockets: set[socket.socket] = set()

    def hold(self, *numbers: int, length: int = CHUNK) -> ScriptedPeer:
        for number in numbers:
            self.chunks[make_key(number)] = value(make_key(number), length)
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def open_chunks(self) -> int:
        return sum(map(len, self.granted.values()))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedPeer]:
        """Listen, on the previous port if there is one."""
        with socket.create_server(("127.0.0.1", self.port)) as listener:
            listener.setblocking(False)
            self.port = listener.getsockname()[1]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._accept, listener, tasks)
                yield self
                tasks.cancel_scope.cancel()

    def disconnect(self) -> None:
        """Close every connection, as a peer does when it exits."""
        for connected in self._sockets:
            connected.shutdown(socket.SHUT_RDWR)

    async def _accept(self, listener: socket.socket, tasks: TaskGroup) -> None:
        while True:
            await anyio.wait_readable(listener)
            connected, _ = listener.accept()
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tasks.start_soon(self._serve, connected)

    async def _serve(self, connected: socket.socket) -> None:
        self.requests["connections"] += 1
        if self.credentials is not None:
            try:
                connected = await self.credentials.accept(connected, VERSION)
            except (OSError, PeerError):
                return
        connected.setblocking(False)
        self._sockets.add(connected)
        self.connections += 1
        own_grants: list[int] = []
        sending = anyio.Lock()
        try:
            async with anyio.create_task_group() as tasks:
                with suppress(OSError, ProtocolError):
                    while True:
                        body = await receive_frame(partial(receive_exactly, connected), MAX_FRAME_BYTES)
                        message = decode_from_client(body)
                        if isinstance(message, Refused):
                            break
                        tasks.start_soon(self._respond, connected, sending, message, own_grants)
                        if isinstance(message, Hello) and message.purpose == "data":
                            await receive_exactly(connected, 1)  # Until the connection closes.
                tasks.cancel_scope.cancel()
        finally:
            for grant in own_grants:
                self.granted.pop(grant, None)
            self._sockets.discard(connected)
            self.connections -= 1
            connected.close()

    async def _respond(
        self, connected: socket.socket, sending: anyio.Lock, message: Any, own_grants: list[int]
    ) -> None:
        self.requests[type(message).__name__] += 1
        await self.answering.wait()
        replies = self.script(message)
        if replies is None:
            replies = [await self._default_reply(message, own_grants)]
        with suppress(OSError):
            for reply in replies:
                async with sending:
                    await send_all(connected, reply if isinstance(reply, bytes) else encode(reply))

    async def _default_reply(self, message: Any, own_grants: list[int]) -> Message:
        match message:
            case Hello():
                return Welcome(
                    VERSION, self.instance or self.name, self.transport, self.name.encode(), self.lease
                )
            case Ping(ticket):
                return Pong(ticket)
            case Contains(ticket, keys):
                return Contained(ticket, [key in self.chunks for key in split_keys(keys)])
            case Lookup():
                return self.grant(message, own_grants)
            case Await(ticket, grant, chunks):
                await self.landed.wait()
                granted = self.granted.get(grant, {})
                return Readable(ticket, [granted.get(number) in self.chunks for number in chunks])
            case Release(ticket, grant, chunks):
                granted = self.granted.get(grant, {})
                valid = [granted.pop(number, None) is not None for number in chunks]
                if not granted:
                    self.granted.pop(grant, None)
                return Released(ticket, all(valid))
        raise AssertionError(message)

    def length_of(self, key: ChunkKey) -> int:
        return len(self.chunks[key])

    def grant(self, request: Lookup, own_grants: list[int]) -> Granted:
        keys = split_keys(request.keys)
        positions = [at for at, key in enumerate(keys) if key in self.chunks]
        if request.prefix:
            positions = [at for index, at in enumerate(positions) if at == index]
        positions.sort(key=lambda at: keys[at] in self.late)
        if not positions:
            return Granted(request.ticket, NO_GRANT, [], [], [], 0)
        number = next(self._numbers)
        own_grants.append(number)
        self.granted[number] = {index: keys[at] for index, at in enumerate(positions)}
        asyncio.get_running_loop().call_later(self.lease, self.granted.pop, number, None)
        order = list(self.chunks)
        return Granted(
            request.ticket,
            number,
            positions,
            [order.index(keys[at]) << 24 for at in positions],
            [self.length_of(keys[at]) for at in positions],
            sum(keys[at] not in self.late for at in positions),
        )

    async def read(self, span: RemoteSpan, view: memoryview) -> Outcome:
        if self.read_outcome is not None:
            return self.read_outcome
        at = span.offset >> 24
        key = list(self.chunks)[at] if at < len(self.chunks) else None
        if key is None or key not in self.granted.get(span.grant, {}).values():
            return Outcome.MISS
        if key in self.late and not self.landed.is_set():
            view[:] = bytes(len(view))
            return Outcome.OK
        view[:] = self.chunks[key]
        self.reads[key] += 1
        return Outcome.OK


class MemoryTransport(Transport):
    """A transport that reads from scripted peers."""

    def __init__(self, peers: Sequence[ScriptedPeer], *, one_sided: bool = False) -> None:
        self._peers = {peer.name.encode(): peer for peer in peers}
        self.one_sided = one_sided  # type: ignore[misc]

    async def open(self, arena: Arena, grants: Grants) -> None:
        pass

    async def close(self) -> None:
        assert not any(peer.links for peer in self._peers.values()), "links are open"

    @property
    def endpoint(self) -> bytes:
        return b"here"

    async def connect(self, endpoint: bytes, dial: Dial) -> Link:
        await anyio.lowlevel.checkpoint()
        peer = self._peers[endpoint]
        peer.links += 1
        return MemoryLink(peer)


class MemoryLink(Link):
    def __init__(self, peer: ScriptedPeer) -> None:
        self._peer = peer
        self._calls = 0

    async def read(self, items: Sequence[ReadItem]) -> Sequence[Outcome]:
        peer = self._peer
        peer.read_calls += 1
        self._calls += 1
        peer.reading.set()
        try:
            await peer.may_read.wait()
            await anyio.lowlevel.checkpoint()
            return [await peer.read(span, view) for span, view in items]
        finally:
            self._calls -= 1

    async def write(self, items: Sequence[WriteItem]) -> Sequence[Outcome]:
        raise NotImplementedError

    async def close(self) -> None:
        assert not self._calls, "closed during a read"
        self._peer.links -= 1


@asynccontextmanager
async def reading_from(
    *peers: ScriptedPeer,
    deadline: float = 20.0,
    one_sided: bool = False,
    opened: bool = True,
    credentials: Credentials | None = None,
    unauthenticated: Sequence[ScriptedPeer] = (),
    idle: float = 60.0,
    **more: Any,
) -> AsyncIterator[PeersBackend]:
    """Open a backend with these configured peers, serving or not. Check on exit that nothing is leaked.

    No connection, lease, link, socket or binding is. ``unauthenticated`` peers are not in its settings, but
    it can read from them.
    """
    before = sockets()
    settings = PeerSettings(
        others=[peer.address for peer in peers],
        **{"secret": SECRET, "transport": "memory", "timeout": TIMEOUT} | more,
    )
    transport = MemoryTransport([*peers, *unauthenticated], one_sided=one_sided)
    backend = PeersBackend(
        TierSettings(name="peers", type="peers", write="never", deadline=deadline),
        settings,
        credentials or NoAuthentication(),  # type: ignore[arg-type]
        transport,
        "here",
        idle=idle,
    )
    if opened:
        await backend.open()
        backend.connect()
    try:
        yield backend
    finally:
        await backend.close()
        await transport.close()
        assert all(not client.throughput.in_flight for client in backend.clients)
        assert not backend._bound
    await until_released(*peers, *unauthenticated)
    await until(lambda: sockets() <= before)


async def until_released(*peers: ScriptedPeer) -> None:
    """Wait until no connection, lease or link is open."""
    await until(lambda: not any(peer.connections or peer.open_chunks or peer.links for peer in peers))
