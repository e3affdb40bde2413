"""A tier: one backend with a name, a capacity, a deadline and a bounded number of calls under way.

Here a call to a backend gets its deadline, and here rule 3 is kept: whoever waits may give up, but the
memory under a transfer stays leased, and the catalog undecided, until the backend itself has let go.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from kvtier.backends.base import GetItem, Outcome, PutItem, SupportsPrefix
from kvtier.backends.guarded import GuardedBackend
from kvtier.backends.logs import RareWarning
from kvtier.catalog import Catalog
from kvtier.costs import ReadCost
from kvtier.keys import ChunkKey
from kvtier.settings import LocalTierSettings, TierSettings
from kvtier.slices import Lease
from kvtier.tasks import set_within
from kvtier.units import MIB, format_duration, format_size

logger = logging.getLogger("kvtier")

DEADLINE_BYTES = 16 * MIB
"""The deadline of a tier is for a batch of this size, and longer in proportion for a larger one."""
KNOWN_CHUNKS = 1_000_000
"""Of what a shared pool holds so many are kept in mind, some 200 MB; others are asked for when wanted."""

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
        self._refused_bytes = 0
        """What the last batch that was written here found no room for."""
        self._batches_returned = 0
        """Batches that have come back from the medium."""
        self._warn = RareWarning(logger)
        self.reading = ReadCost()
        """What the reads from here have cost of late."""

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
    def shared(self) -> bool:
        """Whether it is a pool that others fill and empty, too: of what is in it the catalog knows a part."""
        return not isinstance(self.settings, LocalTierSettings)

    @property
    def keeps(self) -> bool:
        """Whether what is here may be relied on. Not what others put here and this host never does."""
        return not self.shared or self.write != "never"

    def cost(self, length: int) -> float | None:
        """Seconds that reading ``length`` bytes should take by what was measured of late, if anything was."""
        return self.reading.expected(length)

    @property
    def capacity(self) -> int | None:
        """The most bytes that it may take; ``None`` where that is the medium's own business."""
        return self.settings.capacity if isinstance(self.settings, LocalTierSettings) else None

    @property
    def used_bytes(self) -> int:
        """Bytes of chunk objects known to be here, on their way in, or not yet out."""
        return self._catalog.used(self.index) + self._deleting_bytes

    def excess_bytes(self, incoming: int) -> int:
        """How many bytes must go so that ``incoming`` more stay under the high watermark; 0 if they do.

        Down to the low watermark where any must go, so that eviction comes in batches. Where the medium has
        less room than its capacity, as much as it has just refused.
        """
        settings, wanted = self.settings, self.used_bytes + incoming
        if not isinstance(settings, LocalTierSettings):
            return 0
        if wanted <= settings.capacity * settings.high_watermark:
            return self._refused_bytes
        return max(self._refused_bytes, int(wanted - settings.capacity * settings.low_watermark))

    def fits(self, length: int) -> bool:
        """Whether ``length`` more bytes stay within the capacity."""
        return self.capacity is None or self.used_bytes + length <= self.capacity

    @property
    def surplus_chunks(self) -> int:
        """How many chunks of a shared pool the catalog should put out of its mind."""
        return max(0, self._catalog.count(self.index) - KNOWN_CHUNKS) if self.shared else 0

    async def held_prefix(self, keys: Sequence[ChunkKey]) -> int:
        """Ask the medium how many leading keys it holds; 0 where it does not say so within the deadline."""
        held = 0

        async def run() -> None:
            nonlocal held
            if isinstance(self.backend, SupportsPrefix):
                held = await self.backend.held_prefix(keys)
            else:
                there = await self.backend.contains(keys)
                held = next((index for index, one in enumerate(there) if not one), len(there))

        doing = f"looking up {len(keys)} chunks"
        in_time = self._in_time(self._start(run), self.settings.deadline, doing, "they count as missing")
        return held if await in_time else 0

    async def put(self, chunks: Sequence[ChunkBytes], settle: Settle) -> Sequence[Outcome]:
        """Write chunk objects; takes over their leases. ``FAILED`` for all where the deadline passes."""
        return await self._carry(self._put, chunks, settle, "writing", "it counts as failed")

    async def get(self, chunks: Sequence[ChunkBytes], settle: Settle) -> Sequence[Outcome]:
        """Fill the leased memory with chunk objects; takes over the leases."""
        return await self._carry(self._get, chunks, settle, "reading", "they count as missing")

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

        doing = f"deleting {len(keys)} chunks"
        await self._in_time(self._start(run), self.settings.deadline, doing, "they go later")

    async def _put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Write a batch, and note how much of it the medium had no room for."""
        outcomes = await self.backend.put(items)
        answered = zip(items, outcomes, strict=True)
        self._refused_bytes = sum(len(view) for (_, view), outcome in answered if outcome is Outcome.FULL)
        return outcomes

    async def _get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Read a batch and learn what that costs. How long it waited for its turn does not count."""
        started = time.monotonic()
        outcomes = await self.backend.get(items)
        seconds = time.monotonic() - started
        answered = zip(items, outcomes, strict=True)
        read_bytes = sum(len(view) for (_, view), outcome in answered if outcome is Outcome.OK)
        self.reading.succeeded(read_bytes, seconds)
        if Outcome.FAILED in outcomes:
            self.reading.failed()
        return outcomes

    async def _carry(
        self,
        operation: Callable[[Sequence[GetItem]], Awaitable[Sequence[Outcome]]],
        chunks: Sequence[ChunkBytes],
        settle: Settle,
        verb: str,
        consequence: str,
    ) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome] = [Outcome.FAILED] * len(chunks)
        total = sum(chunk.lease.length for chunk in chunks)
        doing = f"{verb} {format_size(total)} ({len(chunks)} chunks)"
        begun, queue, returned_before = anyio.Event(), anyio.CancelScope(), self._batches_returned

        async def run() -> None:
            nonlocal outcomes
            try:
                with queue:
                    async with self._slots:
                        begun.set()
                        outcomes = await operation([(chunk.key, chunk.lease.view) for chunk in chunks])
                        self._batches_returned += 1
            finally:
                begun.set()
                settle(outcomes)
                for chunk in chunks:
                    chunk.lease.release()

        ended = self._start(run)
        if not await set_within(begun, self.settings.deadline):
            # It has not reached the medium: its memory is free at once, for another tier to read into.
            queue.cancel()
            waited = f"no turn within {format_duration(self.settings.deadline)} for {doing}"
            self._warn("tier %s: %s", self.name, waited)
            if self._batches_returned == returned_before:  # No other batch has come back: the medium hangs.
                self.backend.record_failure(waited)
            await ended.wait()
            return outcomes
        seconds = self.settings.deadline * max(1.0, total / DEADLINE_BYTES)
        if await self._in_time(ended, seconds, doing, consequence):
            return outcomes
        return [Outcome.FAILED] * len(chunks)

    def _start(self, run: Callable[[], Awaitable[None]]) -> anyio.Event:
        """Start a call to the backend in a task of its own; the event is set when it has ended."""
        ended = anyio.Event()

        async def call() -> None:
            try:
                await run()
            finally:
                ended.set()

        self._tasks.start_soon(call)
        return ended

    async def _in_time(self, ended: anyio.Event, seconds: float, doing: str, consequence: str) -> bool:
        """Wait for a call to the backend; whether it ended within ``seconds``. If not, it goes on.

        Then a warning names ``doing``, and ``consequence``, at most once a minute.
        """
        started = time.monotonic()
        if await set_within(ended, seconds):
            return True
        missed = f"deadline of {format_duration(seconds)} exceeded {doing}"
        elapsed = format_duration(time.monotonic() - started)
        self._warn("tier %s: %s after %s; %s", self.name, missed, elapsed, consequence)
        self.backend.record_failure(missed)
        self.reading.failed()
        return False
