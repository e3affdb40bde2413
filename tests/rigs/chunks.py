"""Chunk objects and backends for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio.lowlevel

from kvtier import native
from kvtier.backends.base import Backend, GetItem, Outcome, PutItem
from kvtier.backends.cpu import CpuBackend
from kvtier.backends.disk.backend import DiskBackend, DiskSettings
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.settings import LocalTierSettings
from kvtier.testing.backend import blank, make_key, noise

PAYLOAD = 20_000
OK, MISS, FULL, FAILED = Outcome.OK, Outcome.MISS, Outcome.FULL, Outcome.FAILED

BackendT = TypeVar("BackendT", bound=Backend)


def chunk(key: ChunkKey, payload: int = PAYLOAD, *, seed: bytes = b"") -> memoryview:
    """Return a chunk object as an engine leaves it in the arena: sealed without a checksum."""
    view = blank(object_bytes(payload))
    ChunkHeader(key, make_key(0), bytes(32), payload).seal(view, checksum=False)
    view[HEADER_BYTES : HEADER_BYTES + payload] = noise(seed + key, payload)
    return view


def chunks(numbers: Sequence[int], payload: int = PAYLOAD) -> list[PutItem]:
    return [(make_key(number), chunk(make_key(number), payload)) for number in numbers]


def blanks(numbers: Sequence[int], payload: int = PAYLOAD) -> list[GetItem]:
    return [(make_key(number), blank(object_bytes(payload))) for number in numbers]


def memory(capacity: int = 16 << 20) -> CpuBackend:
    return CpuBackend(LocalTierSettings(name="ram", type="cpu", capacity=capacity))


def filled(length: int, seed: bytes = b"") -> memoryview:
    view = blank(length)
    view[:] = noise(seed, length)
    return view


class DictBackend(Backend):
    """Chunks in a dictionary, the simplest backend that meets the contract."""

    def __init__(self, held: dict[ChunkKey, bytes] | None = None) -> None:
        self.held = {} if held is None else held

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [key in self.held for key in keys]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        await anyio.lowlevel.checkpoint()
        self.held.update((key, bytes(view)) for key, view in items)
        return [Outcome.OK for _ in items]

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        await anyio.lowlevel.checkpoint()
        return [self.fill(key, view) for key, view in items]

    def fill(self, key: ChunkKey, view: memoryview) -> Outcome:
        if len(self.held.get(key, b"")) != len(view):
            return Outcome.MISS
        view[:] = self.held[key]
        return Outcome.OK

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.held.pop(key, None)


def disk_engines() -> list[str]:
    """Return the values of the setting `io` that work on this machine."""
    try:
        native.core.DiskEngine(1)
    except (OSError, AttributeError):
        return ["threads"]
    return ["uring", "threads"]


def disk(path: Path, **more: Any) -> DiskBackend:
    return DiskBackend(DiskSettings(name="ssd", type="disk", capacity=1 << 30, path=path, **more))


@asynccontextmanager
async def opened(backend: BackendT) -> AsyncIterator[BackendT]:
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()
