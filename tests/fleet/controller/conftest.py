"""Fixtures of the controller's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier.fleet.controller.state import FileState
from tests.rigs.running_controller import RunningController, running_controller
from tests.rigs.waiting import until

if TYPE_CHECKING:
    from playwright.async_api import Browser


@pytest.fixture(scope="module")
async def module_controller(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningController]:
    """A controller shared by a module, because it takes a while to stop."""
    async with running_controller(tmp_path_factory.mktemp("controller")) as running:
        yield running


@pytest.fixture
async def running(module_controller: RunningController) -> AsyncIterator[RunningController]:
    """The controller of the module, without instances at the start of each test."""
    yield module_controller
    registry = module_controller.registry
    for member in list(registry.members.values()):
        registry.leave(member, "the test is over")
    await until(lambda: len(registry.holders) == 0)


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


@pytest.fixture
async def state(anyio_backend: str, tmp_path: Path) -> AsyncIterator[FileState]:
    """An open state file."""
    async with FileState.open(tmp_path / "state.sqlite") as opened:
        yield opened
