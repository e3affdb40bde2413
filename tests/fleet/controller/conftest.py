"""Fixtures of the controller's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fleet.controller.controlling import RunningController, running_controller
from tests.fleet.controller.registering import RunningRegistry, running_registry

if TYPE_CHECKING:
    from playwright.async_api import Browser


@pytest.fixture(scope="module")
async def module_registry() -> AsyncIterator[RunningRegistry]:
    """A registry behind a real server, shared by a module because it takes a while to stop."""
    async with running_registry(heartbeat=2.0, idle_timeout=60.0) as running:
        yield running


@pytest.fixture
async def running(module_registry: RunningRegistry) -> AsyncIterator[RunningRegistry]:
    """The registry of the module, without instances at the start of each test."""
    yield module_registry
    registry = module_registry.registry
    for member in list(registry.members.values()):
        registry.leave(member, "the test is over")
    await module_registry.wait_until(lambda: len(registry.holders) == 0)


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Chromium. Tests that use it are skipped if it is not installed."""
    from tests.fleet.controller.browser import chromium

    async with chromium() as started:
        yield started


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[RunningController]:
    """A complete controller without a token."""
    async with running_controller(tmp_path) as running:
        yield running
