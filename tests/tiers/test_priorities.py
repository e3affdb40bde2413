"""A tier transfers what a request waits for before the background work that came first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import TaskGroup

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem
from kvtier.backends.cpu import CpuBackend
from kvtier.catalog.catalog import Catalog
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.events import Priority
from kvtier.memory.arena import Arena
from kvtier.memory.header import ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.settings import LocalTierSettings, TierSettings
from kvtier.testing.backend import make_key
from kvtier.tiers.level import ChunkBytes
from kvtier.tiers.sealer import Sealer
from kvtier.tiers.tier import Tier

pytestmark = pytest.mark.anyio

LENGTH = object_bytes(1000)


class Medium(Backend):
    """Records its calls, each of which waits for :attr:`resume`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.resume = anyio.Event()

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [False] * len(keys)

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        return await self._call("put", len(items))

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        return await self._call("get", len(items))

    async def delete(self, keys: Sequence[ChunkKey]) -> None: ...

    async def _call(self, name: str, count: int) -> Sequence[Outcome]:
        self.calls.append(name)
        await self.resume.wait()
        return [Outcome.MISS] * count


class Transfers:
    """Starts transfers of one chunk each."""

    def __init__(self, tier: Tier, arena: Arena, tasks: TaskGroup) -> None:
        self._tier, self._arena, self._tasks = tier, arena, tasks

    async def start(self, name: str, priority: Priority) -> None:
        lease = self._arena.allocate(LENGTH)
        assert lease is not None
        ChunkHeader(make_key(1), make_key(0), bytes(32), 1000).seal(lease.view, checksum=False)
        call = {"put": self._tier.put, "get": self._tier.get}[name]
        self._tasks.start_soon(call, [ChunkBytes(make_key(1), lease)], lambda *_: None, priority)
        await anyio.wait_all_tasks_blocked()


@asynccontextmanager
async def opened(medium: Medium, concurrency: int) -> AsyncIterator[Transfers]:
    settings = TierSettings(name="pool", type="pool", deadline=60, concurrency=concurrency)
    memory = LocalTierSettings(name="ram", type="cpu", capacity=16 * LENGTH)
    arena = CpuBackend(memory).create_arena()
    async with anyio.create_task_group() as tasks:
        tier = Tier(1, settings, medium, Catalog([LruPolicy.factory()] * 2), tasks, Sealer(checksum=False))
        yield Transfers(tier, arena, tasks)
    assert arena.leases == 0
    arena.close()


async def test_read_of_a_request_passes_queued_writes() -> None:
    medium = Medium()
    async with opened(medium, concurrency=1) as transfers:
        await transfers.start("get", Priority.AHEAD)
        for _ in range(3):
            await transfers.start("put", Priority.BACKGROUND)
        await transfers.start("get", Priority.REQUESTED)
        assert medium.calls == ["get"]
        medium.resume.set()
    assert medium.calls == ["get", "get", "put", "put", "put"]


async def test_background_leaves_slots_for_requests() -> None:
    medium = Medium()
    async with opened(medium, concurrency=4) as transfers:
        for _ in range(6):
            await transfers.start("put", Priority.BACKGROUND)
        assert medium.calls == ["put", "put"]
        await transfers.start("get", Priority.REQUESTED)
        assert medium.calls == ["put", "put", "get"]
        medium.resume.set()
    assert medium.calls == ["put", "put", "get"] + ["put"] * 4
