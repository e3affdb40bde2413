"""The checks that :func:`kvtier.testing.plugin.enable_checks` adds to every test on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Set

import pytest

from kvtier.testing.watch import LoopWatch

LEFTOVER_LOOKS, LOOK_SECONDS = 100, 0.01
"""So often, and so far apart, a task that the test has cancelled may still be seen. Looks are counted rather
than seconds: a busy machine delays both."""


@pytest.fixture(autouse=True)
def _check_the_loop(request: pytest.FixtureRequest) -> None:
    if "anyio_backend" in request.fixturenames:
        request.getfixturevalue("checked_loop")


@pytest.fixture
async def checked_loop(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fail the test, or a fixture of its own, that blocks the loop or leaves a task behind."""
    before = asyncio.all_tasks()
    watch = LoopWatch()
    watch.start()
    yield
    leftover = await _leftover_tasks(before)
    watch.stop()
    if leftover:
        tasks = "\n".join(f"  {task!r}" for task in leftover)
        pytest.fail(f"tasks are left over:\n{tasks}", pytrace=False)
    if watch.blocks and request.node.get_closest_marker("loop_may_block") is None:
        worst = max(watch.blocks)
        pytest.fail(
            f"the event loop was blocked for {worst.seconds * 1000:.0f} ms (at most "
            f"{watch.limit * 1000:.0f} ms are allowed) here:\n{worst.stack}",
            pytrace=False,
        )


async def _leftover_tasks(before: Set[asyncio.Task[object]]) -> list[asyncio.Task[object]]:
    leftover: list[asyncio.Task[object]] = []
    for _ in range(LEFTOVER_LOOKS):
        leftover = [task for task in asyncio.all_tasks() if task not in before and not _is_the_runner(task)]
        if not leftover:
            break
        await asyncio.sleep(LOOK_SECONDS)
    return leftover


def _is_the_runner(task: asyncio.Task[object]) -> bool:
    """Whether anyio runs tests and fixtures in it: it makes one such task for each call into the loop."""
    return getattr(task.get_coro(), "__qualname__", "").startswith("TestRunner.")
