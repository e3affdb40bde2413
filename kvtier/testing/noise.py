"""Test and benchmark data: pseudo-random bytes, or a constant byte. Does not import pytest."""

from __future__ import annotations

from blake3 import blake3

from kvtier.units import MIB

SENTINEL = 0xA5


def noise(seed: bytes, length: int) -> bytes:
    """Return pseudo-random bytes that depend on the seed only."""
    return blake3(seed).digest(length=length)


def poison(view: memoryview) -> None:
    """Fill memory with :data:`SENTINEL`."""
    for start in range(0, len(view), MIB):
        view[start : start + MIB] = bytes([SENTINEL]) * len(view[start : start + MIB])
