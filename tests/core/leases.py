"""Leases that there must be room for."""

from __future__ import annotations

from kvtier.arena import Arena
from kvtier.slices import PAGE_BYTES, Lease


def allocate(arena: Arena, pages: int) -> Lease:
    """So many pages. Fails where the arena of a test is too small."""
    lease = arena.allocate(pages * PAGE_BYTES)
    assert lease is not None
    return lease
