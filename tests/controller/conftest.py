"""What the controller's tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from tests.controller.registering import RunningRegistry, running_registry

if TYPE_CHECKING:
    from playwright.async_api import Browser


@pytest.fixture
async def running() -> AsyncIterator[RunningRegistry]:
    """A registry behind a real server; it is patient."""
    async with running_registry(heartbeat=2.0, silence=60.0) as registry:
        yield registry


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Chromium; the tests of a module that ask for it are skipped where there is none."""
    from tests.controller.visiting import chromium

    async with chromium() as started:
        yield started
