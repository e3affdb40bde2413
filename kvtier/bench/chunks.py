"""Chunk objects to be moved, and a cheap way to see that they were."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvtier.arena import Arena
from kvtier.bench.errors import BenchFailed
from kvtier.bench.sides import Chunk
from kvtier.bench.timing import fill
from kvtier.header import HEADER_BYTES, ChunkHeader
from kvtier.keys import KEY_BYTES, ChunkKey

STAMP_BYTES = 8

Stamps = list[tuple[bytes, bytes]]


def own_keys(count: int) -> list[ChunkKey]:
    """Keys that nobody else has: random ones, where others' are hashes of as many bits."""
    return [ChunkKey(os.urandom(KEY_BYTES)) for _ in range(count)]


def make_chunks(arena: Arena, keys: Sequence[ChunkKey], size: int) -> list[Chunk]:
    """Sealed chunk objects of ``size`` bytes each, of which no medium has bytes alike: some are slower then.

    They lie in the arena until that is closed. Raises :class:`BenchFailed` where it has no room for them.
    """
    chunks = []
    for key in keys:
        lease = arena.allocate(size)
        if lease is None:
            raise BenchFailed("the arena has no room for the chunks")
        view = lease.view
        fill(view, key)
        ChunkHeader(key, key, bytes(KEY_BYTES), size - HEADER_BYTES).seal(view)
        chunks.append((key, view))
    arena.settle()
    return chunks


def clear_stamps(chunks: Sequence[Chunk]) -> Stamps:
    """Both ends of each chunk, which are not there any longer."""
    stamps = [(bytes(view[:STAMP_BYTES]), bytes(view[-STAMP_BYTES:])) for _, view in chunks]
    for _, view in chunks:
        view[:STAMP_BYTES] = view[-STAMP_BYTES:] = bytes(STAMP_BYTES)
    return stamps


def have_stamps(chunks: Sequence[Chunk], stamps: Stamps) -> bool:
    """Whether both ends are there again."""
    return stamps == [(bytes(view[:STAMP_BYTES]), bytes(view[-STAMP_BYTES:])) for _, view in chunks]


def put_stamps(chunks: Sequence[Chunk], stamps: Stamps) -> None:
    """The inverse of :func:`clear_stamps`."""
    for (_, view), (head, tail) in zip(chunks, stamps, strict=True):
        view[:STAMP_BYTES], view[-STAMP_BYTES:] = head, tail
