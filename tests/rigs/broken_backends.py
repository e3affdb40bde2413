"""Backends with one fault each, to check that the conformance suite detects it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio
import anyio.lowlevel

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, StoredObject
from kvtier.backends.cpu import CpuBackend
from kvtier.memory.header import HEADER_BYTES
from kvtier.memory.keys import ChunkKey
from kvtier.settings import LocalTierSettings
from kvtier.testing.backend import BackendConformance
from tests.rigs.chunks import DictBackend


class ListedBackend(DictBackend):
    """Has no fault. It lists its chunks, too."""

    async def scan(self) -> AsyncIterator[Sequence[StoredObject]]:
        yield [
            StoredObject(key, len(value), time.time(), value[: HEADER_BYTES + 44])
            for key, value in self.held.items()
        ]


class ReversesResults(ListedBackend):
    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        return list(await super().get(items))[::-1]


class RaisesOnMiss(ListedBackend):
    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        for key, _ in items:
            self.held[key]
        return await super().get(items)


class NeverOverwrites(ListedBackend):
    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        return await super().put([item for item in items if item[0] not in self.held]) or [Outcome.OK]


class ReadsPartially(ListedBackend):
    def fill(self, key: ChunkKey, view: memoryview) -> Outcome:
        value = self.held.get(key, b"")[: len(view)]
        view[: len(value)] = value
        return Outcome.OK if value else Outcome.MISS


class KeepsCallerMemory(ListedBackend):
    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        self.held.update(items)
        return [Outcome.OK for _ in items]


class IgnoresDelete(ListedBackend):
    async def delete(self, keys: Sequence[ChunkKey]) -> None: ...


class FailsBatchOnMiss(ListedBackend):
    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        outcomes = await super().get(items)
        return [Outcome.MISS] * len(items) if Outcome.MISS in outcomes else outcomes


class WritesInPlace(ListedBackend):
    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        for key, view in items:
            half = len(view) // 2
            value = self.held.setdefault(key, bytes(view))
            self.held[key] = bytes(view[:half]) + value[half:]
            await asyncio.sleep(0)
            self.held[key] = self.held.get(key, bytes(view))[:half] + bytes(view[half:])
        return [Outcome.OK for _ in items]


class WritesAfterCancellation(ListedBackend):
    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        # A separate task, like a worker thread: a cancelled call does not wait for it.
        self.task = asyncio.ensure_future(self.get_later(items))
        return await asyncio.shield(self.task)

    async def get_later(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        await anyio.sleep(0.01)
        return await super().get(items)


class DeletesBeforeReplacing(ListedBackend):
    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        await self.delete([key for key, _ in items])
        return await super().put(items)


class ClearsOnCancellation(ListedBackend):
    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        try:
            return await super().put(items)
        except asyncio.CancelledError:
            self.held.clear()
            raise


class ClearsOnClose(ListedBackend):
    async def close(self) -> None:
        self.held.clear()


class ScansTwice(ListedBackend):
    async def scan(self) -> AsyncIterator[Sequence[StoredObject]]:
        for _ in range(2):
            async for batch in super().scan():
                yield batch


class MishandlesEmptyBatch(ListedBackend):
    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [True] if not keys else await super().contains(keys)


class LeaksLease(CpuBackend):
    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        self.leaked = self.arena.allocate(1)
        return await super().get(items)


class Suite(BackendConformance):
    """The conformance suite for one of these backends. Not collected: tests are called individually."""

    persistent = True

    def __init__(self, broken: type[Backend]) -> None:
        self.broken = broken
        self.folders: dict[Path, dict[ChunkKey, bytes]] = {}

    def make_backend(self, path: Path) -> Backend:
        if issubclass(self.broken, ListedBackend):
            return self.broken(self.folders.setdefault(path, {}))
        return self.broken(LocalTierSettings(name="ram", type="cpu", capacity=64 << 20))
