"""Host memory: chunks in a shared arena of normal pages, which as first tier engines copy to directly."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, cast

from kvtier import native
from kvtier.arena import Arena, address_of
from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, SupportsArena
from kvtier.errors import ArenaError, TierError
from kvtier.keys import ChunkKey
from kvtier.settings import LocalTierSettings, TierSettings
from kvtier.slices import Lease, Leases
from kvtier.threads import WorkerThreads, spread

INLINE_COPY_BYTES = 256 * 1024
"""Up to here a copy is done in the event loop: it takes 20 microseconds, a hop into a thread takes 60."""

THREAD_COPY_BYTES = 16 * 1024 * 1024
"""A further thread pays for each so many bytes of a batch, where Python does the copying."""


class MemoryBackend(Backend, SupportsArena):
    """Chunks in an :class:`~kvtier.arena.Arena`.

    As first tier it is the arena: ``adopt`` and ``lease`` hand slices over without a copy. As a lower
    tier, ``put`` and ``get`` copy; the larger copies run in other threads, without the GIL. A chunk
    that is replaced or deleted keeps its bytes until the last lease on it is gone. Not thread-safe.
    """

    settings_type: ClassVar[type[TierSettings]] = LocalTierSettings

    def __init__(self, settings: LocalTierSettings) -> None:
        self._settings = settings
        self._held: dict[ChunkKey, Lease] = {}
        self._hop = WorkerThreads(settings.concurrency)

    @property
    def arena(self) -> Arena:
        """The shared region. Valid from ``open`` to ``close``."""
        # AttributeError before ``open``: the one error that ``isinstance(_, SupportsArena)`` bears.
        return self._arena

    async def open(self) -> None:
        """Make the arena. Raises :class:`TierError` where the system does not give that much memory."""
        native.warn_if_missing()
        try:
            self._arena = self._make_arena()
        except ArenaError as error:
            raise TierError(f"tier {self._settings.name!r}: {error}") from error

    async def close(self) -> None:
        """Let go of every chunk and of the arena."""
        for key in list(self._held):
            self.discard(key)
        self._arena.close()

    def _make_arena(self) -> Arena:
        return Arena.create(self._settings.capacity)

    def adopt(self, key: ChunkKey, lease: Lease) -> None:
        """Hold under ``key`` what ``lease`` covers, in the place of what was held. Copies nothing."""
        self.discard(key)
        self._held[key] = lease

    def lease(self, key: ChunkKey) -> Lease | None:
        """A further lease on what is held under ``key``; the caller releases it."""
        held = self._held.get(key)
        return None if held is None else held.share()

    def lease_all(self, keys: Sequence[ChunkKey]) -> Leases:
        """A further lease on what is held under each key, up to the first that is not held."""
        held = list(map(self._held.get, keys))
        if None in held:
            del held[held.index(None) :]
        return Leases.sharing(cast("list[Lease]", held))

    def idle(self, key: ChunkKey) -> bool:
        """Whether ``key`` is held and nobody has a further lease on it."""
        held = self._held.get(key)
        return held is not None and held.sole

    def discard(self, key: ChunkKey) -> None:
        """Let go of ``key``; its bytes are freed with their last lease. One that is not held is no error."""
        held = self._held.pop(key, None)
        if held is not None:
            held.release()

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Whether each key is held."""
        return [key in self._held for key in keys]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Store copies. ``FULL`` where the arena has no contiguous room."""
        leases = [self._arena.allocate(len(view)) for _, view in items]
        pairs = zip(leases, items, strict=True)
        try:
            await self._copy([(lease.view, view) for lease, (_, view) in pairs if lease is not None])
        except BaseException:
            for lease in leases:
                if lease is not None:
                    lease.release()
            raise
        for lease, (key, _) in zip(leases, items, strict=True):
            if lease is not None:
                self.adopt(key, lease)
        return [Outcome.FULL if lease is None else Outcome.OK for lease in leases]

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Fill the views with copies."""
        leases = [self._lease_of(key, len(view)) for key, view in items]
        pairs = zip(leases, items, strict=True)
        try:
            await self._copy([(view, lease.view) for lease, (_, view) in pairs if lease is not None])
        finally:
            for lease in leases:
                if lease is not None:
                    lease.release()
        return [Outcome.MISS if lease is None else Outcome.OK for lease in leases]

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove each key."""
        for key in keys:
            self.discard(key)

    def _lease_of(self, key: ChunkKey, length: int) -> Lease | None:
        held = self._held.get(key)
        return held.share() if held is not None and held.length == length else None

    async def _copy(self, pairs: list[tuple[memoryview, memoryview]]) -> None:
        """Copy the second of each pair over the first."""
        total_bytes = sum(len(target) for target, _ in pairs)
        if total_bytes <= INLINE_COPY_BYTES:
            for pair in pairs:
                _copy_one(pair)
            return
        most = self._settings.concurrency
        if native.available():
            await spread(partial(_copy_all, threads=most), [pairs], parts=1, hop=self._hop)
            return
        parts = min(most, 1 + total_bytes // THREAD_COPY_BYTES)
        await spread(_copy_one, pairs, parts=parts, hop=self._hop)


class CpuBackend(MemoryBackend):
    """Host memory in normal pages of 4 KiB."""


def _copy_one(pair: tuple[memoryview, memoryview]) -> None:
    target, source = pair
    if source.readonly:
        target[:] = source
        return
    # Unlike an assignment of slices, a call through ctypes releases the GIL.
    ctypes.memmove(address_of(target), address_of(source), len(target))


def _copy_all(pairs: list[tuple[memoryview, memoryview]], threads: int) -> None:
    native.core.copy_buffers(pairs, threads)
