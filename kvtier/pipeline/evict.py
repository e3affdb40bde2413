"""Evict: keep the arena below its watermark in the background, coldest leaves first.

What no lower tier holds is demoted. Room in lower tiers is made by :mod:`kvtier.pipeline.write`.
"""

from __future__ import annotations

import anyio

from kvtier.catalog.tenants import EvictionScope
from kvtier.concurrency.breaker import Backoff
from kvtier.events import Evict
from kvtier.pipeline.allocate import SCAN_LIMIT, Allocator
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.write import Writer
from kvtier.tiers.batches import BATCH_BYTES, concurrently

RETRY_SECONDS = 0.01
MAX_RETRY_SECONDS = 1.0
"""Initial and maximum back-off while all cold chunks are leased or pinned."""


class EvictStage:
    """Makes room in the arena, between a high and a low watermark."""

    def __init__(self, hierarchy: Hierarchy, allocator: Allocator, writer: Writer) -> None:
        self._hierarchy = hierarchy
        self._memory = hierarchy.memory
        self._allocator = allocator
        self._writer = writer
        self._leaving_bytes = 0
        """Bytes of the arena that are being evicted."""

    async def run(self) -> None:
        """Keep the arena below its high watermark and allocatable, while the cache is open."""
        await concurrently(self._evict_excess)

    async def _evict_excess(self) -> None:
        backoff = Backoff(RETRY_SECONDS, MAX_RETRY_SECONDS)
        while True:
            await self._allocator.needed.wait()
            self._allocator.needed = anyio.Event()
            backoff.reset()
            while (excess := self._excess_bytes()) > 0:
                if await self._evict(excess):
                    self._allocator.refused_bytes = 0
                    backoff.reset()
                else:
                    await anyio.sleep(backoff.next())
            # If these are in use, the next allocation tries again.
            scope = EvictionScope.OVER_MAXIMUM
            while (over := self._memory.over_maximum_bytes) and await self._evict(over, scope):
                pass

    def _excess_bytes(self) -> int:
        """Return the number of bytes to evict from the arena, in addition to those that are leaving.

        Allocations can fail below the watermark: the free space may be less than a chunk, or fragmented.
        """
        refused = self._allocator.refused_bytes
        return max(self._memory.excess_bytes(refused), refused) - self._leaving_bytes

    async def _evict(self, excess: int, scope: EvictionScope = EvictionScope.ALL) -> int:
        """Evict up to ``excess`` bytes, at most one batch, from the arena. Return the number of chunks."""
        hierarchy = self._hierarchy
        victims = self._memory.victims(SCAN_LIMIT, min(excess, BATCH_BYTES), scope)
        event = Evict(keys=victims, tier=self._memory.index)
        length = sum(map(hierarchy.length, victims))
        evicted = 0
        self._leaving_bytes += length
        try:
            for transfer in hierarchy.planner.evict(event):
                if transfer.target is not None:
                    # A tier that accepts nothing must not keep the arena full of cold chunks: after one
                    # attempt the chunk is dropped, demoted or not.
                    await self._writer.demote(event, transfer)
                idle = [key for key in transfer.keys if self._memory.is_idle(key)]
                self._allocator.drop(idle, admitted=transfer.admitted)
                evicted += len(idle)
        finally:
            self._leaving_bytes -= length
        return evicted
