"""What has a native path behaves alike without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier import native


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
