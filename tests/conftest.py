"""What holds for every test: one event loop library, and nothing blocks the loop or is left on it."""

from __future__ import annotations

import signal

import pytest

from kvtier import native
from kvtier.testing.plugin import enable_checks


def pytest_configure(config: pytest.Config) -> None:
    enable_checks(config)
    # A shell starts what runs in the background with SIGINT ignored, and so would every process of a test.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
