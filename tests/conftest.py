"""Fixtures and checks for every test: asyncio only, and nothing may block the event loop or stay on it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest

from kvtier import native
from kvtier.catalog.catalog import POLICY_FAILED
from kvtier.testing.plugin import enable_checks


def pytest_configure(config: pytest.Config) -> None:
    enable_checks(config)
    # A shell starts background jobs with SIGINT ignored, which every child process would inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def failed_policies() -> Iterator[list[str]]:
    """Fail a test in which an eviction policy fails at a lookup, unless it expects that and clears the list.

    A cache only logs it.
    """
    failed: list[str] = []

    class Failures(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if str(record.msg).startswith(POLICY_FAILED):
                failed.append(record.getMessage())

    handler = Failures()
    logging.getLogger("kvtier").addHandler(handler)
    yield failed
    logging.getLogger("kvtier").removeHandler(handler)
    assert not failed


@pytest.fixture(params=["native", "python"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test once with the native core and once with the Python fallback."""
    if request.param == "python":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip(native.summary())
    implementation: str = request.param
    return implementation


@pytest.fixture(scope="module", params=["native", "python"])
def either_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the module's tests with the native core, then without it."""
    if request.param == "native":
        if not native.available():
            pytest.skip(native.summary())
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", lambda: False)
        yield
