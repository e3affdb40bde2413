"""A copy in one thread: the limit of memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

from kvtier.arena import address_of
from kvtier.bench.sides import Chunk, Side
from kvtier.keys import ChunkKey


class Memcpy(Side):
    """memmove to memory that has been touched, and back from it."""

    def __init__(self, memory: memoryview) -> None:
        """``memory``: as long as all the chunks of a batch together."""
        self._memory = memory
        self._places: dict[ChunkKey, int] = {}

    async def put(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.put`."""
        address = address_of(self._memory)
        pairs = []
        for key, view in chunks:
            place = self._places.setdefault(key, len(self._places) * len(view))
            pairs.append((address + place, address_of(view), len(view)))
        return _copy(pairs)

    async def get(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.get`."""
        address = address_of(self._memory)
        return _copy([(address_of(view), address + self._places[key], len(view)) for key, view in chunks])

    async def look_up(self, keys: Sequence[ChunkKey]) -> float:
        """See :meth:`Side.look_up`."""
        started = time.perf_counter()
        for key in keys:
            self._places.get(key)
        return time.perf_counter() - started

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Side.forget`."""
        for key in keys:
            self._places.pop(key, None)


def _copy(pairs: Sequence[tuple[int, int, int]]) -> float:
    started = time.perf_counter()
    for target, source, length in pairs:
        ctypes.memmove(target, source, length)
    return time.perf_counter() - started
