"""Limit of a memory tier: a single-threaded copy."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

from kvtier.lab.bench.sides import Chunk, Side
from kvtier.memory.arena import address_of
from kvtier.memory.keys import ChunkKey


class Memcpy(Side):
    """``memmove`` into memory that is already faulted in, and back."""

    title = "memcpy"

    def __init__(self, memory: memoryview) -> None:
        """``memory``: room for all chunks."""
        self._memory = memory
        self._offsets: dict[ChunkKey, int] = {}

    async def put(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.put`."""
        address = address_of(self._memory)
        pairs = []
        for key, view in chunks:
            offset = self._offsets.setdefault(key, len(self._offsets) * len(view))
            pairs.append((address + offset, address_of(view), len(view)))
        return _copy(pairs)

    async def get(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.get`."""
        address = address_of(self._memory)
        return _copy([(address_of(view), address + self._offsets[key], len(view)) for key, view in chunks])

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Side.forget`."""
        for key in keys:
            self._offsets.pop(key, None)


def _copy(pairs: Sequence[tuple[int, int, int]]) -> float:
    started = time.perf_counter()
    for target, source, length in pairs:
        ctypes.memmove(target, source, length)
    return time.perf_counter() - started
