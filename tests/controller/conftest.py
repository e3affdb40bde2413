"""What the controller's tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.controller.registering import RunningRegistry, running_registry


@pytest.fixture
async def running() -> AsyncIterator[RunningRegistry]:
    """A registry behind a real server; it is patient."""
    async with running_registry(heartbeat=2.0, silence=60.0) as registry:
        yield registry
