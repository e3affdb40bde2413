"""Chunk objects for benchmarks, their contents, and a cheap check that they were transferred."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from blake3 import blake3

from kvtier.lab.bench.sides import BenchFailed, Chunk
from kvtier.memory.arena import Arena
from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from kvtier.memory.keys import KEY_BYTES, ChunkKey
from kvtier.units import MIB

STAMP_BYTES = 8

Stamps = list[tuple[bytes, bytes]]


def random_keys(count: int) -> list[ChunkKey]:
    """Return random keys, which do not collide with the hashes that caches use."""
    return [ChunkKey(os.urandom(KEY_BYTES)) for _ in range(count)]


def make_chunks(arena: Arena, keys: Sequence[ChunkKey], size: int) -> list[Chunk]:
    """Return sealed chunk objects of ``size`` bytes each, in the arena until it is closed.

    Their contents differ and do not compress, because some media handle equal or compressible data at a
    different speed. Raises :class:`BenchFailed` if the arena is too small.
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
    """Zero the first and last bytes of each chunk; return the original bytes."""
    stamps = [(bytes(view[:STAMP_BYTES]), bytes(view[-STAMP_BYTES:])) for _, view in chunks]
    for _, view in chunks:
        view[:STAMP_BYTES] = view[-STAMP_BYTES:] = bytes(STAMP_BYTES)
    return stamps


def have_stamps(chunks: Sequence[Chunk], stamps: Stamps) -> bool:
    """Whether the first and last bytes of each chunk are restored."""
    return stamps == [(bytes(view[:STAMP_BYTES]), bytes(view[-STAMP_BYTES:])) for _, view in chunks]


def put_stamps(chunks: Sequence[Chunk], stamps: Stamps) -> None:
    """Undo :func:`clear_stamps`."""
    for (_, view), (head, tail) in zip(chunks, stamps, strict=True):
        view[:STAMP_BYTES], view[-STAMP_BYTES:] = head, tail


def filled(length: int) -> memoryview:
    """Return page-aligned memory with incompressible contents; see :func:`fill`."""
    view = memoryview(mmap.mmap(-1, length))
    fill(view)
    return view


def fill(view: memoryview, seed: bytes = b"") -> None:
    """Fill a view with bytes that do not compress or deduplicate, except with views of the same seed."""
    for start in range(0, len(view), MIB):
        piece = view[start : start + MIB]
        piece[:] = blake3(seed + start.to_bytes(8, "little")).digest(length=len(piece))
