"""Test and benchmark data: pseudo-random bytes, or a constant byte. Does not import pytest."""

from __future__ import annotations

from blake3 import blake3
from xxhash import xxh3_128_digest

from kvtier.units import MIB

SENTINEL = 0xA5

_STAINED = memoryview(bytes([SENTINEL]) * MIB)


def noise(seed: bytes, length: int) -> bytes:
    """Return pseudo-random bytes that depend on the seed only."""
    return blake3(seed).digest(length=length)


def poison(view: memoryview) -> None:
    """Fill memory with :data:`SENTINEL`."""
    for start in range(0, len(view), MIB):
        piece = view[start : start + MIB]
        piece[:] = _STAINED[: len(piece)]


def is_poisoned(view: memoryview) -> bool:
    """Return whether every byte is the sentinel byte."""
    pieces = (view[start : start + MIB] for start in range(0, len(view), MIB))
    return all(same(piece, _STAINED[: len(piece)]) for piece in pieces)


def same(first: memoryview | bytes, second: memoryview | bytes) -> bool:
    """Compare two buffers without holding the GIL for long."""
    return len(first) == len(second) and xxh3_128_digest(first) == xxh3_128_digest(second)
