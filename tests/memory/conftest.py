"""An arena to allocate from, and leases of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.memory.arena import Arena
from kvtier.memory.slices import PAGE_BYTES, Lease


@pytest.fixture
def arena() -> Iterator[Arena]:
    """An arena of 16 pages."""
    arena = Arena.create(16 * PAGE_BYTES)
    yield arena
    arena.close()


def allocate(arena: Arena, pages: int) -> Lease:
    """Allocate a number of pages. Fails the test if the arena is full."""
    lease = arena.allocate(pages * PAGE_BYTES)
    assert lease is not None
    return lease
