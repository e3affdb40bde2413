"""Allocate leases in tests."""

from __future__ import annotations

from kvtier.memory.arena import Arena
from kvtier.memory.slices import PAGE_BYTES, Lease


def allocate(arena: Arena, pages: int) -> Lease:
    """Allocate a number of pages. Fails the test if the arena is full."""
    lease = arena.allocate(pages * PAGE_BYTES)
    assert lease is not None
    return lease
