"""Scripted engines, and the bridge server of a cache process on a socket, in one event loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import UNIXSocketStream

from kvtier import Settings
from kvtier.bridge import protocol
from kvtier.bridge.protocol import Commit, Hello, Leave, Reserve, Reserved, Run, Status, StatusReport, Welcome
from kvtier.bridge.server import BridgeServer
from kvtier.instance import Instance
from kvtier.memory.arena import ArenaMap
from kvtier.memory.header import HEADER_BYTES
from kvtier.memory.keys import ChunkKey, chunk_keys, join_keys, root_key
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.rpc.frames import FrameReader, Message, encode
from kvtier.rpc.listener import listening

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

    async def receive(self) -> protocol.FromCache:
        with anyio.fail_after(30):
            while not self.frames:
                self.frames += self.reader.feed(await self.stream.receive(65536))
        return protocol.decode_from_cache(self.frames.pop(0))

    async def request(self, message: Message) -> protocol.FromCache:
        await self.send(message)
        return await self.receive()

    async def greet(
        self,
        role: protocol.Role = "scheduler",
        rank: int = 0,
        *,
        layout: ChunkLayout = LAYOUT,
        namespace: bytes = NAMESPACE,
        engine: str = "engine",
        **more: object,
    ) -> Welcome:
        hello = Hello(protocol.VERSION, engine, role, rank, layout, namespace, **more)  # type: ignore[arg-type]
        await self.send(hello)
        with anyio.fail_after(30):
            data, fds = await self.stream.receive_fds(65536, 1)
        self.frames += self.reader.feed(data)
        welcome = protocol.decode_from_cache(self.frames.pop(0))
        assert isinstance(welcome, Welcome)
        self.arena = ArenaMap(fds[0], welcome.arena_bytes)
        return welcome

    async def status(self) -> dict[str, object]:
        report = await self.request(Status(99))
        assert isinstance(report, StatusReport)
        parsed: dict[str, object] = json.loads(report.report)
        return parsed


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

    @asynccontextmanager
    async def peer(self) -> AsyncIterator[Peer]:
        async with await anyio.connect_unix(self.path) as stream:
            yield Peer(stream)

    @asynccontextmanager
    async def engine(self, name: str = "engine") -> AsyncIterator[tuple[Peer, list[Peer]]]:
        """Connect the scheduler and workers of an engine of two ranks, which write to nothing at the end."""
        async with self.peer() as scheduler, self.peer() as worker0, self.peer() as worker1:
            await scheduler.greet(engine=name)
            for rank, worker in enumerate((worker0, worker1)):
                await worker.greet("worker", rank, engine=name, client=1 + rank)
            yield scheduler, [worker0, worker1]
            for worker in (worker0, worker1):
                with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await worker.send(Leave())

    async def wait_until_idle(self) -> None:
        """Wait until all engines are disconnected, and only the chunks of the first tier are leased."""
        with anyio.fail_after(30):
            while self.server.engines:
                await anyio.sleep(0.005)
            cache = self.server.cache
            while cache.pending_bytes or cache.arena.leases != cache.catalog.count(0):
                await anyio.sleep(0.005)


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
    reserved = await scheduler.request(Reserve(1, [Run(ROOT, join_keys(keys), CHUNK_TOKENS)]))
    assert isinstance(reserved, Reserved)
    rank_bytes = LAYOUT.rank_bytes(CHUNK_TOKENS)
    for rank, worker in enumerate(workers):
        for key, lease, offset in zip(keys, reserved.leases, reserved.offsets, strict=True):
            if lease:
                start = offset + HEADER_BYTES + rank * rank_bytes
                worker.arena.view(start, rank_bytes)[:] = key * (rank_bytes // len(key))
        await worker.send(Commit(reserved.leases))
        await worker.status()
    return reserved.leases
