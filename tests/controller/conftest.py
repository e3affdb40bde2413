"""What the controller's tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.controller.controlling import RunningController, running_controller
from tests.controller.registering import RunningRegistry, running_registry

if TYPE_CHECKING:
    from playwright.async_api import Browser


@pytest.fixture(scope="module")
async def patient_registry() -> AsyncIterator[RunningRegistry]:
    """A registry behind a real server, which takes a while to end."""
    async with running_registry(heartbeat=2.0, silence=60.0) as running:
        yield running


@pytest.fixture
async def running(patient_registry: RunningRegistry) -> AsyncIterator[RunningRegistry]:
    """The same for every test of a module, but without any instances."""
    yield patient_registry
    registry = patient_registry.registry
    for member in list(registry.members.values()):
        registry.leave(member, "the test is over")
    await patient_registry.until(lambda: len(registry.holders) == 0)


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Chromium; the tests of a module that ask for it are skipped where there is none."""
    from tests.controller.visiting import chromium

    async with chromium() as started:
        yield started


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[RunningController]:
    """A whole controller, without a token."""
    async with running_controller(tmp_path) as running:
        yield running
