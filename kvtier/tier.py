"""A tier: one backend with a name, a capacity, a deadline and a bounded number of calls under way.

Here a call to a backend gets its deadline, and here rule 3 is kept: whoever waits may give up, but the
memory under a transfer stays leased, and the catalog undecided, until the backend itself has let go.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from kvtier.arena import Lease
from kvtier.backends.base import GetItem, Outcome
from kvtier.backends.guarded import GuardedBackend
from kvtier.catalog import Catalog
from kvtier.keys import ChunkKey
from kvtier.settings import TierSettings

Settle = Callable[[Sequence[Outcome]], None]
"""Told the outcomes once the backend has let go of the memory, be it after the deadline."""


class ChunkBytes(NamedTuple):
    """A chunk object in memory, leased as long as the transfer lasts."""

    key: ChunkKey
    lease: Lease


class Tier:
    """One level of the hierarchy. Every method is called from the event loop."""

    def __init__(
        self, index: int, settings: TierSettings, backend: GuardedBackend, catalog: Catalog, tasks: TaskGroup
    ) -> None:
        self.index = index
        self.settings = settings
        self.backend = backend
        self._catalog = catalog
        self._tasks = tasks
        self._slots = anyio.Semaphore(settings.concurrency)
        self._deleting_bytes = 0

    @property
    def name(self) -> str:
        """The tier's name in the settings."""
        return self.settings.name

    @property
    def write(self) -> str:
        """When it wants chunks from above: ``through``, ``on_evict`` or ``never``."""
        return self.settings.write

    @property
    def available(self) -> bool:
        """False while the circuit breaker is open."""
        return self.backend.available

    @property
    def used_bytes(self) -> int:
        """Bytes of chunk objects held here, on their way in, or not yet out."""
        return self._catalog.used(self.index) + self._deleting_bytes

    def excess_bytes(self, incoming: int) -> int:
        """How many bytes must go so that ``incoming`` more stay under the high watermark; 0 if they do.

        Down to the low watermark where any must go, so that eviction comes in batches.
        """
        high = self.settings.capacity * self.settings.high_watermark
        if self.used_bytes + incoming <= high:
            return 0
        return max(0, int(self.used_bytes + incoming - self.settings.capacity * self.settings.low_watermark))

    def fits(self, length: int) -> bool:
        """Whether ``length`` more bytes stay within the capacity."""
        return self.used_bytes + length <= self.settings.capacity

    async def put(self, chunks: Sequence[ChunkBytes], settle: Settle) -> Sequence[Outcome]:
        """Write chunk objects; takes over their leases. ``FAILED`` for all where the deadline passes."""
        return await self._carry(self.backend.put, chunks, settle)

    async def get(self, chunks: Sequence[ChunkBytes], settle: Settle) -> Sequence[Outcome]:
        """Fill the leased memory with chunk objects; takes over the leases."""
        return await self._carry(self.backend.get, chunks, settle)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove chunks from catalog and backend; their bytes count as used until they are gone."""
        doomed = sum(self._catalog.length(key) for key in keys)
        self._deleting_bytes += doomed
        for key in keys:
            self._catalog.remove(key, self.index)

        async def run() -> None:
            try:
                await self.backend.delete(keys)
            finally:
                self._deleting_bytes -= doomed
                done.set()

        done = anyio.Event()
        self._tasks.start_soon(run)
        with anyio.move_on_after(self.settings.deadline) as scope:
            await done.wait()
        if scope.cancelled_caught:
            self.backend.record_failure()

    async def _carry(
        self,
        operation: Callable[[Sequence[GetItem]], Awaitable[Sequence[Outcome]]],
        chunks: Sequence[ChunkBytes],
        settle: Settle,
    ) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome] = [Outcome.FAILED] * len(chunks)
        done = anyio.Event()

        async def run() -> None:
            nonlocal outcomes
            try:
                async with self._slots:
                    outcomes = await operation([(chunk.key, chunk.lease.view) for chunk in chunks])
            finally:
                settle(outcomes)
                for chunk in chunks:
                    chunk.lease.release()
                done.set()

        self._tasks.start_soon(run)
        with anyio.move_on_after(self.settings.deadline):
            await done.wait()
        if not done.is_set():
            self.backend.record_failure()
            return [Outcome.FAILED] * len(chunks)
        return outcomes
