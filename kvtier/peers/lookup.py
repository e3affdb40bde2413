"""Look up chunks in this host's own tiers for a peer, and seal them for reading."""

from __future__ import annotations

from collections.abc import Sequence

import anyio.lowlevel
from anyio import CancelScope

from kvtier.cache import TieredCache
from kvtier.concurrency.tasks import Changes
from kvtier.memory.header import is_sealed
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease
from kvtier.peers.grants import Grant
from kvtier.pipeline.found import FoundChunk
from kvtier.pipeline.query import Query
from kvtier.tiers.planner import FIRST
from kvtier.units import MIB

KEYS_PER_STEP = 512
"""Keys looked up before yielding to the event loop."""
PART_BYTES, PART_CHUNKS = 16 * MIB, 4
"""Minimum size of a batch that is sealed in one executor call; readable before the next is sealed."""


class PeerLookup:
    """Looks up chunks, and seals those without a checksum. Bound to one event loop."""

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._local = sum(1 << tier.index for tier in cache.tiers if not tier.shared)
        self._sealer = cache.memory.sealer

    async def held(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which of ``keys`` this host's own tiers hold. Shared tiers do not count."""
        held: list[bool] = []
        for start in range(0, len(keys), KEYS_PER_STEP):
            if start:
                await anyio.lowlevel.checkpoint()
            part = keys[start : start + KEYS_PER_STEP]
            held += [bool(ready & self._local) for ready, _ in self._cache.catalog.places(part)]
        return held

    async def find(
        self, keys: Sequence[ChunkKey], *, prefix: bool, max_bytes: int
    ) -> tuple[list[int], list[FoundChunk]]:
        """Lease the held chunks among ``keys``, and start promoting those below memory.

        Return their positions in ``keys``, and the chunks, whose leases belong to the caller. With
        ``prefix``, stop at the first miss. Returns little more than fits into ``max_bytes``.
        """
        positions: list[int] = []
        chunks: list[FoundChunk] = []
        try:
            for start in range(0, len(keys), KEYS_PER_STEP):
                if start:
                    await anyio.lowlevel.checkpoint()
                part = keys[start : start + KEYS_PER_STEP]
                length = self._length_of_first(part)
                found_at, found = self._find(part, prefix=prefix, limit=max_bytes // length + 1)
                positions += [start + at for at in found_at]
                chunks += found
                max_bytes -= len(found) * length
                if max_bytes <= 0 or (prefix and len(found) < len(part)):
                    break
        except BaseException:
            for chunk in chunks:
                chunk.lease.release()
            raise
        return positions, chunks

    def _length_of_first(self, keys: Sequence[ChunkKey]) -> int:
        """Return the length of the first held chunk, as an estimate: most chunks are equally long."""
        catalog = self._cache.catalog
        return next((catalog.length(key) for key in keys if key in catalog), 1)

    def _find(
        self, keys: Sequence[ChunkKey], *, prefix: bool, limit: int
    ) -> tuple[list[int], list[FoundChunk]]:
        if prefix:
            chunks = self._cache.look_up(Query(keys[:limit], local=True)).chunks
            return list(range(len(chunks))), chunks
        places = list(self._cache.catalog.places(keys))
        at = [index for index, (ready, _) in enumerate(places) if ready & self._local][:limit]
        chunks = self._cache.look_up(Query([keys[index] for index in at], local=True)).chunks
        # If memory has no room for one chunk from below, it has room for none; those in memory need none.
        rest = [index for index in at[len(chunks) :] if places[index][0] >> FIRST & 1]
        del at[len(chunks) :]
        more = self._cache.look_up(Query([keys[index] for index in rest], local=True)).chunks if rest else []
        return at + rest[: len(more)], chunks + more

    def late(self, chunks: Sequence[FoundChunk]) -> list[int]:
        """Return the indexes of chunks that are not readable yet: in flight, or without a checksum."""
        if not self._sealer.checksum:
            return [index for index, chunk in enumerate(chunks) if not chunk.arrived]
        memory = self._cache.arena.view(0, self._cache.arena.capacity)
        return [
            index
            for index, chunk in enumerate(chunks)
            if chunk.flight is not None or not is_sealed(memory, chunk.lease.offset)
        ]

    async def seal(self, chunks: Sequence[tuple[ChunkKey, Lease]]) -> list[bool]:
        """Add missing checksums if enabled in the settings. Return whether each chunk is valid.

        The chunks must be complete. Corrupt ones are evicted from the first tier.
        """
        held = [lease.share() for _, lease in chunks]
        items = [(key, lease.view) for (key, _), lease in zip(chunks, held, strict=True)]
        try:
            return [seal is not None for seal in await self._sealer.seal(items)]
        finally:
            items.clear()  # Otherwise the traceback of a cancelled call keeps the arena mapped.
            for lease in held:
                lease.release()


class PendingGrant:
    """The chunks of a grant that are in flight or lack a checksum, until they can be read."""

    def __init__(self, lookup: PeerLookup, grant: Grant, late: dict[int, FoundChunk]) -> None:
        self._lookup = lookup
        self._grant = grant
        self._late = late
        """Neither readable nor given up, by index in the grant."""
        self._progress = Changes()
        self._scope = CancelScope()
        grant.unready.update(late)
        grant.on_end = self._end
        grant.until_ready = self._wait

    async def run(self) -> None:
        """Make chunks readable as they arrive, until all have arrived or the grant has ended."""
        with self._scope:
            # Chunks that only lack a checksum do not wait for those in flight.
            await self._seal([index for index, chunk in self._late.items() if chunk.arrived])
            while self._late:
                first = next(iter(self._late.values()))
                if first.flight is not None:
                    await first.flight.done.wait()
                landed = [
                    index for index, chunk in self._late.items() if chunk.flight is None or chunk.flight.ended
                ]
                await self._seal(landed)

    async def _wait(self, chunks: Sequence[int]) -> None:
        waiting = self._late.keys() & set(chunks)
        while waiting:
            await self._progress.after(self._progress.count)
            waiting &= self._late.keys()

    def _end(self) -> None:
        self._late.clear()
        self._scope.cancel()
        self._progress.notify()

    async def _seal(self, indexes: Sequence[int]) -> None:
        for part in self._parts(indexes):
            # Some may have been released meanwhile, and their memory may be in use again.
            chunks = {
                index: (self._late[index].key, lease)
                for index in part
                if index in self._late and (lease := self._grant.leases[index]) is not None
            }
            arrived = [index for index in chunks if self._late[index].arrived]
            valid = await self._lookup.seal([chunks[index] for index in arrived])
            self._grant.unready.difference_update(
                index for index, ok in zip(arrived, valid, strict=True) if ok
            )
            for index in part:
                self._late.pop(index, None)
            self._progress.notify()

    def _parts(self, indexes: Sequence[int]) -> list[list[int]]:
        parts: list[list[int]] = []
        length = 0
        for index in indexes:
            if not parts or (length >= PART_BYTES and len(parts[-1]) >= PART_CHUNKS):
                parts.append([])
                length = 0
            parts[-1].append(index)
            length += self._late[index].lease.length
        return parts
