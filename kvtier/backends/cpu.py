"""Host memory: chunks in an arena of normal or huge pages."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from pydantic import Field

from kvtier import native
from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, SupportsArena
from kvtier.concurrency.threads import WorkerThreads, spread
from kvtier.errors import ArenaError, TierError
from kvtier.memory.arena import Arena, address_of
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease
from kvtier.settings import LocalTierSettings, TierSettings

INLINE_COPY_BYTES = 256 * 1024
"""Copies up to this size run in the event loop: 20 µs, against 60 µs for a worker thread round trip."""
THREAD_COPY_BYTES = 16 * 1024 * 1024
"""Bytes of a batch that justify one more thread, when Python does the copying."""


class MemoryBackend(Backend, SupportsArena):
    """Chunks in an :class:`~kvtier.memory.arena.Arena`.

    As the first tier it only creates the arena. As a lower tier, ``put`` and ``get`` copy; large copies run
    in worker threads, without the GIL. A replaced or deleted chunk keeps its memory while a ``get`` reads it.
    Not thread-safe.
    """

    arena: Arena
    """Where chunks are stored, from ``open`` to ``close``."""

    settings_type: ClassVar[type[TierSettings]] = LocalTierSettings

    def __init__(self, settings: LocalTierSettings) -> None:
        self._settings = settings
        self._held: dict[ChunkKey, Lease] = {}
        self._executor = WorkerThreads(settings.concurrency)

    def create_arena(self) -> Arena:
        """Create an arena. Raises :class:`TierError` if the system cannot provide that much memory."""
        native.warn_if_missing()
        try:
            return self._make_arena()
        except ArenaError as error:
            raise TierError(f"tier {self._settings.name!r}: {error}") from error

    def _make_arena(self) -> Arena:
        return Arena.create(self._settings.capacity)

    async def open(self) -> None:
        """Create the arena. Raises :class:`TierError` if the system cannot provide that much memory."""
        self.arena = self.create_arena()

    async def close(self) -> None:
        """Release every chunk and the arena."""
        await self.delete(list(self._held))
        self.arena.close()

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return whether each key is held."""
        return [key in self._held for key in keys]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Store copies. ``FULL`` if the arena has no contiguous room."""
        leases = [self.arena.allocate(len(view)) for _, view in items]
        pairs = zip(leases, items, strict=True)
        try:
            await self._copy([(lease.view, view) for lease, (_, view) in pairs if lease is not None])
        except BaseException:
            _release_all(leases)
            raise
        for lease, (key, _) in zip(leases, items, strict=True):
            if lease is not None:
                self._replace(key, lease)
        return [Outcome.FULL if lease is None else Outcome.OK for lease in leases]

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Fill the views with copies."""
        leases = [self._lease_of(key, len(view)) for key, view in items]
        pairs = zip(leases, items, strict=True)
        try:
            await self._copy([(view, lease.view) for lease, (_, view) in pairs if lease is not None])
        finally:
            _release_all(leases)
        return [Outcome.MISS if lease is None else Outcome.OK for lease in leases]

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove each key."""
        for key in keys:
            self._replace(key, None)

    def _replace(self, key: ChunkKey, lease: Lease | None) -> None:
        """Store the memory of ``lease`` under ``key``, or nothing, and release the previous value."""
        held = self._held.pop(key, None)
        if held is not None:
            held.release()
        if lease is not None:
            self._held[key] = lease

    def _lease_of(self, key: ChunkKey, length: int) -> Lease | None:
        held = self._held.get(key)
        return held.share() if held is not None and held.length == length else None

    async def _copy(self, pairs: list[tuple[memoryview, memoryview]]) -> None:
        """Copy each ``(target, source)`` pair."""
        total_bytes = sum(len(target) for target, _ in pairs)
        if total_bytes <= INLINE_COPY_BYTES:
            for pair in pairs:
                _copy_one(pair)
            return
        max_threads = self._settings.concurrency
        if native.available():
            await spread(partial(_copy_all, threads=max_threads), [pairs], parts=1, executor=self._executor)
            return
        parts = min(max_threads, 1 + total_bytes // THREAD_COPY_BYTES)
        await spread(_copy_one, pairs, parts=parts, executor=self._executor)


class CpuBackend(MemoryBackend):
    """Host memory in normal pages of 4 KiB."""


class HugePageSettings(LocalTierSettings):
    """Settings of a tier of type ``hugepage``."""

    fallback: bool = Field(
        default=True,
        description=(
            "Fall back to normal pages, with a warning, if the system does not have enough free huge pages. "
            "`false`: refuse to start."
        ),
        examples=[False],
    )


class HugePageBackend(MemoryBackend):
    """Host memory in pages of 2 MiB, which the administrator reserves with ``sysctl vm.nr_hugepages``."""

    settings_type: ClassVar[type[TierSettings]] = HugePageSettings

    def __init__(self, settings: HugePageSettings) -> None:
        super().__init__(settings)
        self._fallback = settings.fallback

    def _make_arena(self) -> Arena:
        return Arena.create(self._settings.capacity, huge=True, fallback=self._fallback)


def _release_all(leases: Sequence[Lease | None]) -> None:
    for lease in leases:
        if lease is not None:
            lease.release()


def _copy_one(pair: tuple[memoryview, memoryview]) -> None:
    target, source = pair
    if source.readonly:
        target[:] = source
        return
    # Unlike slice assignment, a ctypes call releases the GIL.
    ctypes.memmove(address_of(target), address_of(source), len(target))


def _copy_all(pairs: list[tuple[memoryview, memoryview]], threads: int) -> None:
    native.core.copy_buffers(pairs, threads)
