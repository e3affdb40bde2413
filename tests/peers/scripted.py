"""Peers that do as a test tells them, over real sockets, and a transport that copies within this process."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from kvtier.arena import Arena
from kvtier.backends.base import Outcome
from kvtier.errors import ChannelError, PeerError
from kvtier.keys import ChunkKey, split_keys
from kvtier.peers.authentication import Credentials
from kvtier.peers.backend import PeersBackend
from kvtier.peers.protocol import (
    NO_GRANT,
    VERSION,
    Await,
    Contained,
    Contains,
    Granted,
    Hello,
    LookUp,
    Ping,
    Pong,
    Readable,
    Release,
    Released,
    Welcome,
    decode_from_client,
)
from kvtier.settings import TierSettings
from kvtier.settings_peer import PeerSettings
from kvtier.sockets.channel import Channel
from kvtier.sockets.connection import Connection
from kvtier.sockets.frames import FrameReader, Message, encode
from kvtier.testing.backend import make_key, noise
from kvtier.transports.base import (
    Dial,
    Grants,
    Link,
    ReadItem,
    RemoteSpan,
    Transport,
    WriteItem,
)

CHUNK = 5000
PATIENCE = 20.0
"""Of tests in which every peer answers: a busy machine must not decide them."""
SECRET = "a secret of these tests"


class OpenDoor:
    """Stands in the place of ``Credentials`` where nobody proves anything."""

    def connection(self, family: int, host: str) -> Connection:
        return Connection(family)

    def prove_to_server(self, connection: Connection) -> None:
        pass


def value(key: ChunkKey, length: int = CHUNK) -> bytes:
    return noise(b"value" + key, length)


def _happened() -> anyio.Event:
    event = anyio.Event()
    event.set()
    return event


@dataclass
class ScriptedPeer:
    """Holds chunks and answers about them, unless ``script`` answers otherwise."""

    name: str = "there"
    transport: str = "memory"
    lease: float = 10.0
    credentials: Credentials | None = None
    """By which who connects has to prove who it is."""
    instance: str = ""
    port: int = 0
    script: Callable[[Message], Sequence[Message | bytes] | None] = lambda _: None
    """What to answer in place of the usual; ``None`` for the usual. Bytes are sent as they are."""
    late: frozenset[ChunkKey] = frozenset()
    """Chunks that are readable only when ``landed`` is set."""
    landed: anyio.Event = field(default_factory=_happened)
    answering: anyio.Event = field(default_factory=_happened)
    """Cleared by putting another in its place: questions wait for it."""
    chunks: dict[ChunkKey, bytes] = field(default_factory=dict)
    granted: dict[int, dict[int, ChunkKey]] = field(default_factory=dict)
    """Grants that are open, and their chunks by number."""
    asked: Counter[str] = field(default_factory=Counter)
    reads: Counter[ChunkKey] = field(default_factory=Counter)
    read_calls: int = 0
    links: int = 0
    """Open ones."""
    connections: int = 0
    reading: anyio.Event = field(default_factory=anyio.Event)
    """Set when a read has begun."""
    may_read: anyio.Event = field(default_factory=_happened)
    read_outcome: Outcome | None = None

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1000)
        self._channels: set[Channel] = set()

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
        """Listens, on the same port as before where there was one."""
        with socket.create_server(("127.0.0.1", self.port)) as listener:
            listener.setblocking(False)
            self.port = listener.getsockname()[1]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._accept, listener, tasks)
                yield self
                tasks.cancel_scope.cancel()

    def hang_up(self) -> None:
        """Close every connection, as a peer does that ends."""
        for channel in self._channels:
            channel._socket.shutdown(socket.SHUT_RDWR)

    async def _accept(self, listener: socket.socket, tasks: TaskGroup) -> None:
        while True:
            await anyio.wait_readable(listener)
            connected, _ = listener.accept()
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tasks.start_soon(self._serve, connected)

    async def _serve(self, connected: socket.socket) -> None:
        self.asked["connections"] += 1
        if self.credentials is not None:
            try:
                connected = await self.credentials.accept(connected)
            except (OSError, PeerError):
                return
        channel = Channel(connected)
        self._channels.add(channel)
        self.connections += 1
        reader = FrameReader()
        mine: list[int] = []
        try:
            async with anyio.create_task_group() as tasks:
                with suppress(ChannelError):
                    while True:
                        for body in reader.feed(await channel.receive()):
                            message = decode_from_client(body)
                            tasks.start_soon(self._respond, channel, message, mine)
                            if isinstance(message, Hello) and message.purpose == "data":
                                await self.serve_data(channel)
                tasks.cancel_scope.cancel()
        finally:
            for grant in mine:
                self.granted.pop(grant, None)
            self._channels.discard(channel)
            self.connections -= 1
            channel.close()

    async def serve_data(self, channel: Channel) -> None:
        """Until the connection ends."""
        await channel.receive()

    async def _respond(self, channel: Channel, message: Any, mine: list[int]) -> None:
        self.asked[type(message).__name__] += 1
        await self.answering.wait()
        answers = self.script(message)
        if answers is None:
            answers = [await self._usual(message, mine)]
        with suppress(ChannelError):
            for answer in answers:
                await channel.send(answer if isinstance(answer, bytes) else encode(answer))

    async def _usual(self, message: Any, mine: list[int]) -> Message:
        match message:
            case Hello():
                return Welcome(
                    VERSION, self.instance or self.name, self.transport, self.name.encode(), self.lease
                )
            case Ping(ticket):
                return Pong(ticket)
            case Contains(ticket, keys):
                return Contained(ticket, [key in self.chunks for key in split_keys(keys)])
            case LookUp():
                return self.grant(message, mine)
            case Await(ticket, grant, chunks):
                await self.landed.wait()
                there = self.granted.get(grant, {})
                return Readable(ticket, [there.get(number) in self.chunks for number in chunks])
            case Release(ticket, grant, chunks):
                there = self.granted.get(grant, {})
                stood = [there.pop(number, None) is not None for number in chunks]
                if not there:
                    self.granted.pop(grant, None)
                return Released(ticket, all(stood))
        raise AssertionError(message)

    def length_of(self, key: ChunkKey) -> int:
        return len(self.chunks[key])

    def grant(self, question: LookUp, mine: list[int]) -> Granted:
        keys = split_keys(question.keys)
        positions = [at for at, key in enumerate(keys) if key in self.chunks]
        if question.prefix:
            positions = [at for index, at in enumerate(positions) if at == index]
        positions.sort(key=lambda at: keys[at] in self.late)
        if not positions:
            return Granted(question.ticket, NO_GRANT, [], [], [], 0)
        number = next(self._numbers)
        mine.append(number)
        self.granted[number] = {index: keys[at] for index, at in enumerate(positions)}
        asyncio.get_running_loop().call_later(self.lease, self.granted.pop, number, None)
        order = list(self.chunks)
        return Granted(
            question.ticket,
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
    """Reads from scripted peers."""

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
        assert not self._calls, "closed while it reads"
        self._peer.links -= 1


@asynccontextmanager
async def reading_from(
    *peers: ScriptedPeer,
    deadline: float = 20.0,
    one_sided: bool = False,
    opened: bool = True,
    credentials: Credentials | None = None,
    strangers: Sequence[ScriptedPeer] = (),
    idle: float = 60.0,
    **more: Any,
) -> AsyncIterator[PeersBackend]:
    """A backend whose peers these are, whether they serve yet or not; afterwards nothing of it is left.

    ``strangers`` are not named in its settings, and it can read from them all the same.
    """
    settings = PeerSettings(
        others=[peer.address for peer in peers],
        **{"secret": SECRET, "transport": "memory", "patience": PATIENCE} | more,
    )
    transport = MemoryTransport([*peers, *strangers], one_sided=one_sided)
    backend = PeersBackend(
        TierSettings(name="peers", type="peers", write="never", deadline=deadline),
        settings,
        credentials or OpenDoor(),  # type: ignore[arg-type]
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
        assert all(not client.pace.under_way for client in backend.clients)


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until something is so."""
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.005)
