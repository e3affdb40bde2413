"""An arena to allocate from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.memory.arena import Arena
from kvtier.memory.slices import PAGE_BYTES


@pytest.fixture
def arena() -> Iterator[Arena]:
    """An arena of 16 pages."""
    arena = Arena.create(16 * PAGE_BYTES)
    yield arena
    arena.close()
