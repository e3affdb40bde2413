"""What holds for every test: one event loop library, and nothing blocks the loop or is left on it."""

from __future__ import annotations

import pytest

from kvtier import native
from kvtier.testing.plugin import enable_checks


def pytest_configure(config: pytest.Config) -> None:
    enable_checks(config)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the native core and without it, where there are both."""
    if request.param == "python":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip(native.summary())
    way: str = request.param
    return way
