"""Shadow caches: what another policy would have hit, from a sample of the chunks.

Chunks are sampled by their keys, as in C. Waldspurger et al., "Efficient MRC construction with SHARDS" (FAST
2015): of 1/n of the keys a cache of 1/n of the capacity keeps the same part. The sampled chunks of a prompt
form a chain again, so that a policy that knows prompts sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress

from kvtier import native
from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import ChunkColumns, IncomingPrompt, MakePolicy, RemovalReason
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
    """A catalog of one tier without bytes. It stores all that its policy does not decline."""

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
        if new := [at for at, key in enumerate(keys) if key not in catalog]:
            self._store(keys, lengths, new, parent)
        return held

    def _store(
        self, keys: Sequence[ChunkKey], lengths: Sequence[int], new: Sequence[int], parent: ChunkKey | None
    ) -> None:
        """Add the chunks at the positions ``new``, up to the first without room."""
        catalog, sizes = self._catalog, [lengths[at] for at in new]
        others = sum(lengths) - sum(sizes)
        fitting = _fitting(sizes, self.capacity_bytes - others)
        if fitting:
            self._make_room(self._incoming_prompt(keys, lengths, new[:fitting], parent), keys)
            fitting = _fitting(sizes[:fitting], self.capacity_bytes - catalog.used(0))
        first, stop = new[0], new[0] + fitting
        if new[:fitting] == list(range(first, stop)):
            if fitting:
                before = keys[first - 1] if first else parent
                catalog.add_chain(keys[first:stop], 0, sizes[:fitting], State.READY, before)
        else:
            for at in new[:fitting]:
                catalog.add(keys[at], 0, lengths[at], State.READY, keys[at - 1] if at else parent)
        if rest := new[fitting:]:
            catalog.decline(0, self._incoming_prompt(keys, lengths, rest, parent))

    def _incoming_prompt(
        self, keys: Sequence[ChunkKey], lengths: Sequence[int], new: Sequence[int], parent: ChunkKey | None
    ) -> IncomingPrompt:
        before = keys[new[0] - 1] if new[0] else parent
        return self._catalog.incoming_prompt([keys[at] for at in new], [lengths[at] for at in new], before)

    def _make_room(self, prompt: IncomingPrompt, used: Sequence[ChunkKey]) -> None:
        """Evict other chunks than those in use, unless the policy prefers them to the new ones."""
        catalog = self._catalog
        excess = catalog.used(0) + sum(prompt.lengths) - self.capacity_bytes
        if excess > 0:
            busy = {catalog.row(key) for key in used}
            victims = catalog.victims(0, excess, busy.__contains__, prompt=prompt)
            catalog.remove_all(victims, 0, RemovalReason.EVICTED)

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Remove chunks that were cleared."""
        held = [key for key in keys if key in self._catalog]
        self._catalog.remove_all(held, 0, RemovalReason.CLEARED)


def _fitting(lengths: Sequence[int], room: int) -> int:
    """Return how many of the first chunks fit."""
    return sum(total <= room for total in accumulate(lengths))
