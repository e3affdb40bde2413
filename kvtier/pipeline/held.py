"""The chunks that tiers held when they were opened, in the order to add them to the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvtier.backends.base import StoredObject
from kvtier.catalog.siblings import marks_of
from kvtier.memory.header import ChunkHeader, StoredHeader
from kvtier.memory.keys import ChunkKey


class HeldChunk(NamedTuple):
    """A chunk that a tier held when it was opened."""

    last_used: float
    key: ChunkKey
    length: int
    """Bytes of the object in the medium."""
    header: ChunkHeader
    """Without block hashes, of which :attr:`marks` suffice."""
    marks: bytes

    @classmethod
    def of(cls, stored: StoredObject) -> HeldChunk:
        """Parse the header of a stored object."""
        header = StoredHeader.parse(stored.head).chunk
        marks = marks_of(header.block_hashes)
        return cls(stored.last_used, stored.key, stored.length, header._replace(block_hashes=b""), marks)


def parents_first(held: list[HeldChunk]) -> Iterator[HeldChunk]:
    """Yield the least recently used first, but parents before children, so that eviction can order them."""
    waiting = {chunk.key: chunk for chunk in held}
    for oldest in sorted(held):
        chain = []
        key = oldest.key
        while key in waiting:
            chain.append(waiting.pop(key))
            key = chain[-1].header.parent
        yield from reversed(chain)
