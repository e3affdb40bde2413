"""What this host's own tiers hold of what a peer asks for, made ready to be read by it."""

from __future__ import annotations

from collections.abc import Sequence

import anyio.lowlevel

from kvtier.cache import TieredCache
from kvtier.header import is_sealed
from kvtier.keys import ChunkKey
from kvtier.pipeline.found import FoundChunk
from kvtier.router import FIRST
from kvtier.slices import Lease
from kvtier.units import MIB

KEYS_A_STEP = 512
"""That are looked up before the loop may do something else."""
PART_BYTES, PART_CHUNKS = 16 * MIB, 4
"""At least so much is sealed in one hop, and may be read before the next is."""


class Holdings:
    """Looks up, and seals what has no checksum yet. Belongs to one event loop."""

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._local = sum(1 << tier.index for tier in cache.hierarchy.tiers if not tier.shared)
        self._sealer = cache.hierarchy.sealer

    async def held(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of ``keys`` a tier of this host alone holds."""
        held: list[bool] = []
        for start in range(0, len(keys), KEYS_A_STEP):
            if start:
                await anyio.lowlevel.checkpoint()
            part = keys[start : start + KEYS_A_STEP]
            held += [bool(ready & self._local) for ready, _ in self._cache.hierarchy.catalog.places(part)]
        return held

    async def find(
        self, keys: Sequence[ChunkKey], *, prefix: bool, most_bytes: int
    ) -> tuple[list[int], list[FoundChunk]]:
        """Lease those of ``keys`` that are held, and start fetching into memory what is below.

        Their positions in ``keys``, and the chunks, whose leases are the caller's. With ``prefix`` only up to
        the first that is not held. Not many more than fit into ``most_bytes``.
        """
        positions: list[int] = []
        chunks: list[FoundChunk] = []
        try:
            for start in range(0, len(keys), KEYS_A_STEP):
                if start:
                    await anyio.lowlevel.checkpoint()
                part = keys[start : start + KEYS_A_STEP]
                length = self._length_of_first(part)
                found_at, found = self._find(part, prefix=prefix, most=most_bytes // length + 1)
                positions += [start + at for at in found_at]
                chunks += found
                most_bytes -= len(found) * length
                if most_bytes <= 0 or (prefix and len(found) < len(part)):
                    break
        except BaseException:
            for chunk in chunks:
                chunk.lease.release()
            raise
        return positions, chunks

    def _length_of_first(self, keys: Sequence[ChunkKey]) -> int:
        """Chunks are mostly equally long."""
        catalog = self._cache.hierarchy.catalog
        return next((catalog.length(key) for key in keys if key in catalog), 1)

    def _find(
        self, keys: Sequence[ChunkKey], *, prefix: bool, most: int
    ) -> tuple[list[int], list[FoundChunk]]:
        if prefix:
            chunks = self._cache.look_up(keys[:most], local=True).chunks
            return list(range(len(chunks))), chunks
        places = list(self._cache.hierarchy.catalog.places(keys))
        at = [index for index, (ready, _) in enumerate(places) if ready & self._local][:most]
        chunks = self._cache.look_up([keys[index] for index in at], local=True).chunks
        # Where memory has no room for one that is below, it has for none; what is in memory needs none.
        rest = [index for index in at[len(chunks) :] if places[index][0] >> FIRST & 1]
        del at[len(chunks) :]
        more = self._cache.look_up([keys[index] for index in rest], local=True).chunks if rest else []
        return at + rest[: len(more)], chunks + more

    def late(self, chunks: Sequence[FoundChunk]) -> list[int]:
        """Which of these may not be read yet, by their numbers: on their way, or without a checksum."""
        if not self._sealer.checksum:
            return [index for index, chunk in enumerate(chunks) if not chunk.arrived]
        memory = self._cache.arena.view(0, self._cache.arena.capacity)
        return [
            index
            for index, chunk in enumerate(chunks)
            if chunk.flight is not None or not is_sealed(memory, chunk.lease.offset)
        ]

    async def seal(self, chunks: Sequence[tuple[ChunkKey, Lease]]) -> list[bool]:
        """Give each a checksum, unless it has one or the settings want none; whether it is what it should be.

        For chunks that are whole. What is corrupt leaves the first tier.
        """
        held = [lease.share() for _, lease in chunks]
        items = [(key, lease.view) for (key, _), lease in zip(chunks, held, strict=True)]
        try:
            return [seal is not None for seal in await self._sealer.seal(items)]
        finally:
            items.clear()  # Else the traceback of a cancelled call would keep the arena mapped.
            for lease in held:
                lease.release()
