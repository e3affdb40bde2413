"""Shadow caches: what another policy would have hit, from a sample of the chunks.

Chunks are sampled by their keys, as in C. Waldspurger et al., "Efficient MRC construction with SHARDS" (FAST
2015): of 1/n of the keys a cache of 1/n of the capacity keeps the same part. The sampled chunks of a prompt
form a chain again, so that a policy that knows prompts sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from kvtier import native
from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import ChunkColumns, MakePolicy, RemovalReason
from kvtier.memory.keys import ChunkKey

SAMPLED = 0x10000
"""Sampling rates are multiples of one in so many."""


def sampled(keys: Sequence[ChunkKey], threshold: int) -> list[bool]:
    """Return which keys belong to the sample. ``threshold``: how many of :data:`SAMPLED` parts it has."""
    return [key[1] << 8 | key[2] < threshold for key in keys]


def sampled_rows(chunks: ChunkColumns, rows: Sequence[int], threshold: int) -> list[int]:
    """Return those of the rows whose chunks belong to the sample."""
    if native.available():
        return native.core.sampled_rows(chunks.keys, rows, threshold)
    return list(compress(rows, sampled(chunks.keys_of(rows), threshold)))


class ShadowCache:
    """A catalog of one tier without bytes, which stores every chunk that it is asked for."""

    def __init__(self, make: MakePolicy, capacity_bytes: int) -> None:
        self.now = 0.0
        self.capacity_bytes = capacity_bytes
        self._catalog = Catalog([make], clock=lambda: self.now)

    def access(self, keys: Sequence[ChunkKey], lengths: Sequence[int], parent: ChunkKey | None) -> int:
        """Look up consecutive chunks of a prompt, and add those that are missing. Return the hits.

        ``parent``: the sampled chunk before the first. Without it in the cache, none of them is a hit.
        """
        catalog = self._catalog
        held = len(catalog.prefix(keys)) if parent is None or parent in catalog else 0
        catalog.touch(keys)
        absent = [key not in catalog for key in keys]
        room = self.capacity_bytes - sum(compress(lengths, [not missing for missing in absent]))
        for at, length in enumerate(lengths):  # Of a prompt that does not fit, the beginning is stored.
            if absent[at] and room < length:
                absent[at:] = [False] * (len(absent) - at)
                break
            room -= length * absent[at]
        if any(absent):
            self._make_room(sum(compress(lengths, absent)), keys)
            self._add(keys, absent, lengths, parent)
        return held

    def _add(
        self,
        keys: Sequence[ChunkKey],
        absent: Sequence[bool],
        lengths: Sequence[int],
        parent: ChunkKey | None,
    ) -> None:
        first, count = absent.index(True), absent.count(True)
        stop = first + count
        if all(absent[first:stop]):
            before = keys[first - 1] if first else parent
            self._catalog.add_chain(keys[first:stop], 0, lengths[first:stop], State.READY, before)
            return
        for key, missing, length in zip(keys, absent, lengths, strict=True):
            if missing:
                self._catalog.add(key, 0, length, State.READY, parent)
            parent = key

    def _make_room(self, length: int, used: Sequence[ChunkKey]) -> None:
        """Evict other chunks than those in use."""
        catalog = self._catalog
        excess = catalog.used(0) + length - self.capacity_bytes
        if excess > 0:
            busy = {catalog.row(key) for key in used}
            catalog.remove_all(catalog.victims(0, excess, busy.__contains__), 0, RemovalReason.EVICTED)

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Remove chunks that were cleared."""
        held = [key for key in keys if key in self._catalog]
        self._catalog.remove_all(held, 0, RemovalReason.CLEARED)
