"""What holds for every test: one event loop library, and nothing blocks the loop or is left on it."""

from __future__ import annotations

import pytest

from kvtier.testing.plugin import enable_checks


def pytest_configure(config: pytest.Config) -> None:
    enable_checks(config)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
