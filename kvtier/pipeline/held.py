"""What tiers held when they were opened, in the order in which it is entered into the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvtier.backends.base import StoredObject
from kvtier.header import ChunkHeader
from kvtier.keys import ChunkKey
from kvtier.settings import LocalTierSettings, TierSettings


class HeldChunk(NamedTuple):
    """A chunk that a tier held when it was opened."""

    last_used: float
    key: ChunkKey
    length: int
    header: ChunkHeader

    @classmethod
    def of(cls, stored: StoredObject) -> HeldChunk:
        """By what the tier says of it."""
        return cls(stored.last_used, stored.key, stored.length, ChunkHeader.parse(stored.head))


def parents_first(held: list[HeldChunk]) -> Iterator[HeldChunk]:
    """The longest unused first, but none before its parent: so the eviction policy knows each one's place."""
    waiting = {chunk.key: chunk for chunk in held}
    for oldest in sorted(held):
        chain = []
        key = oldest.key
        while key in waiting:
            chain.append(waiting.pop(key))
            key = chain[-1].header.parent
        yield from reversed(chain)


def eviction_of(tier: TierSettings) -> str:
    """The policy of a tier. What is known of a shared pool is put out of mind by the usual one."""
    return tier.eviction if isinstance(tier, LocalTierSettings) else "lru"
