"""What tests of the core share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier import native
from kvtier.arena import Arena
from kvtier.slices import PAGE_BYTES


@pytest.fixture(scope="module", params=["native", "python"])
def either_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the native core, then without it."""
    if request.param == "native":
        if not native.available():
            pytest.skip(native.summary())
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", lambda: False)
        yield


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Of sixteen pages."""
    arena = Arena.create(16 * PAGE_BYTES)
    yield arena
    arena.close()
