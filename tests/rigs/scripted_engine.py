"""Scripted engines, and the bridge server of a cache process on a socket, in one event loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import UNIXSocketStream

from kvtier import Settings
from kvtier.bridge import protocol
from kvtier.bridge.protocol import (
    Commit,
    Found,
    Hello,
    Leave,
    Lookup,
    Reserve,
    Reserved,
    Run,
    Status,
    StatusReport,
    Welcome,
)
from kvtier.bridge.server import BridgeServer
from kvtier.instance import Instance
from kvtier.memory.arena import ArenaMap
from kvtier.memory.header import HEADER_BYTES
from kvtier.memory.keys import ChunkKey, chunk_keys, join_keys, root_key
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.rpc.frames import FrameReader, Message, encode
from kvtier.rpc.listener import listening
from tests.rigs.waiting import until

CHUNK_TOKENS = 64
LAYOUT = ChunkLayout(CHUNK_TOKENS, (GroupLayout(16, (1024, 1024)),), ranks=2)
NAMESPACE = bytes(range(32))
ROOT = root_key(NAMESPACE)
TOKENS = CHUNK_TOKENS * 6
KEYS = chunk_keys(ROOT, list(range(TOKENS)), CHUNK_TOKENS)


class Peer:
    """One connection of a scripted engine."""

    def __init__(self, stream: UNIXSocketStream) -> None:
        self.stream = stream
        self.frames: list[bytes] = []
        self.reader = FrameReader()
        self.arena: ArenaMap

    async def send(self, *messages: Message) -> None:
        await self.stream.send(b"".join(map(encode, messages)))

    async def receive(self, kind: type[Any] = Message) -> Any:
        """Return the next message, which must be a ``kind``."""
        with anyio.fail_after(30):
            while not self.frames:
                self.frames += self.reader.feed(await self.stream.receive(65536))
        message = protocol.decode_from_cache(self.frames.pop(0))
        assert isinstance(message, kind), message
        return message

    async def request(self, message: Message, kind: type[Any] = Message) -> Any:
        """Send a message, and return the next one, which must be a ``kind``."""
        await self.send(message)
        return await self.receive(kind)

    async def greet(
        self,
        role: protocol.Role = "scheduler",
        rank: int = 0,
        *,
        layout: ChunkLayout = LAYOUT,
        namespace: bytes = NAMESPACE,
        engine: str = "engine",
        **more: Any,
    ) -> Welcome:
        hello = Hello(protocol.VERSION, engine, role, rank, layout, namespace, **more)
        await self.send(hello)
        with anyio.fail_after(30):
            data, fds = await self.stream.receive_fds(65536, 1)
        self.frames += self.reader.feed(data)
        welcome = protocol.decode_from_cache(self.frames.pop(0))
        assert isinstance(welcome, Welcome)
        self.arena = ArenaMap(fds[0], welcome.arena_bytes)
        return welcome

    async def status(self) -> dict[str, Any]:
        report = await self.request(Status(99), StatusReport)
        return dict(json.loads(report.report))

    async def look_up(self, keys: Sequence[ChunkKey], ticket: int = 1, **more: Any) -> Found:
        """Look up whole chunks; return the immediate answer."""
        request = Lookup(ticket, join_keys(keys), CHUNK_TOKENS * len(keys), **more)
        return await self.request(request, Found)

    async def reserve(self, keys: Sequence[ChunkKey], parent: ChunkKey = ROOT, ticket: int = 1) -> Reserved:
        """Reserve room for whole chunks."""
        request = Reserve(ticket, [Run(parent, join_keys(keys), CHUNK_TOKENS)])
        return await self.request(request, Reserved)

    async def commit(self, leases: list[int]) -> None:
        """Commit reservations, and wait until that is handled."""
        await self.send(Commit(leases))
        await self.status()


class Host:
    """The bridge server of a cache process on a socket."""

    def __init__(self, path: Path, instance: Instance) -> None:
        self.path = path
        self.instance = instance
        self.server = BridgeServer(instance)

    def engine_status(self, name: str = "engine") -> dict[str, Any]:
        """Return what a connected engine holds."""
        engines: Any = self.server.status()["engines"]
        (status,) = (engine for engine in engines if engine["name"] == name)
        return dict(status)

    @property
    def connections(self) -> int:
        """Number of connections that are served."""
        tasks: Any = self.server.status()["tasks"]
        return sum(count for name, count in tasks.items() if name.endswith("listening.<locals>.serve"))

    @asynccontextmanager
    async def peer(
        self, role: protocol.Role | None = None, rank: int = 0, **hello: Any
    ) -> AsyncIterator[Peer]:
        """Connect, and greet if there is a role."""
        async with await anyio.connect_unix(self.path) as stream:
            peer = Peer(stream)
            if role is not None:
                await peer.greet(role, rank, **hello)
            yield peer

    @asynccontextmanager
    async def engine(self, name: str = "engine") -> AsyncIterator[tuple[Peer, list[Peer]]]:
        """Connect the scheduler and workers of an engine of two ranks, which write to nothing at the end."""
        async with (
            self.peer("scheduler", engine=name) as scheduler,
            self.peer("worker", 0, engine=name, client=1) as worker0,
            self.peer("worker", 1, engine=name, client=2) as worker1,
        ):
            yield scheduler, [worker0, worker1]
            for worker in (worker0, worker1):
                with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await worker.send(Leave())

    async def wait_until_idle(self) -> None:
        """Wait until all engines are disconnected, and only the chunks of the first tier are leased."""
        await until(lambda: not self.server.engines)
        cache = self.server.cache
        await until(lambda: not cache.pending_bytes and cache.arena.leases == cache.catalog.count(0))


@asynccontextmanager
async def open_host(tmp_path: Path, **more: object) -> AsyncIterator[Host]:
    tiers = [
        {"name": "ram", "type": "cpu", "capacity": "4MiB"},
        {"name": "ssd", "type": "disk", "path": str(tmp_path / "ssd"), "capacity": "8MiB"},
    ]
    settings = Settings(chunk_tokens=CHUNK_TOKENS, tiers=tiers, **more)  # type: ignore[arg-type]
    async with Instance.open(settings) as instance:
        host = Host(tmp_path / "socket", instance)
        async with listening(host.path, host.server.handle):
            yield host


async def store(scheduler: Peer, workers: list[Peer], keys: list[ChunkKey]) -> list[int]:
    """Reserve chunks, fill each with its key, and commit them. Return the leases."""
    reserved = await scheduler.reserve(keys)
    rank_bytes = LAYOUT.rank_bytes(CHUNK_TOKENS)
    for rank, worker in enumerate(workers):
        for key, lease, offset in zip(keys, reserved.leases, reserved.offsets, strict=True):
            if lease:
                start = offset + HEADER_BYTES + rank * rank_bytes
                worker.arena.view(start, rank_bytes)[:] = key * (rank_bytes // len(key))
        await worker.commit(reserved.leases)
    return reserved.leases
