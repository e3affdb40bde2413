"""The memory of a cache process as an engine sees it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvtier.memory.arena import Arena, ArenaMap


@pytest.fixture
def arena() -> Iterator[ArenaMap]:
    """Return an engine's mapping of an arena."""
    created = Arena.create(4 << 20)
    mapped = ArenaMap(os.dup(created.fd), created.capacity)
    yield mapped
    mapped.close()
    created.close()
