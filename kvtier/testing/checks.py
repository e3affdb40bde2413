"""The checks that :func:`kvtier.testing.plugin.enable_checks` adds to every async test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Set

import pytest

from kvtier.testing.watch import LoopWatch

LEFTOVER_POLLS, POLL_SECONDS = 100, 0.01
"""How many times, and how often, to poll for cancelled tasks to finish. The limit is a number of polls, not a
time, because a busy machine delays tasks and polls alike."""


@pytest.fixture(autouse=True)
def _check_the_loop(request: pytest.FixtureRequest) -> None:
    if "anyio_backend" in request.fixturenames:
        request.getfixturevalue("checked_loop")


@pytest.fixture
async def checked_loop(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fail the test if it, or one of its fixtures, blocks the event loop or leaves a task running."""
    before = asyncio.all_tasks()
    watch = LoopWatch()
    watch.start()
    yield
    leftover = await _leftover_tasks(before)
    watch.stop()
    if leftover:
        tasks = "\n".join(f"  {task!r}" for task in leftover)
        pytest.fail(f"tasks are still running:\n{tasks}", pytrace=False)
    if watch.blocks and request.node.get_closest_marker("loop_may_block") is None:
        worst = max(watch.blocks)
        pytest.fail(
            f"the event loop was blocked for {worst.seconds * 1000:.0f} ms (limit: "
            f"{watch.limit * 1000:.0f} ms) here:\n{worst.stack}",
            pytrace=False,
        )


async def _leftover_tasks(before: Set[asyncio.Task[object]]) -> list[asyncio.Task[object]]:
    leftover: list[asyncio.Task[object]] = []
    for _ in range(LEFTOVER_POLLS):
        leftover = [task for task in asyncio.all_tasks() if task not in before and not _is_runner(task)]
        if not leftover:
            break
        await asyncio.sleep(POLL_SECONDS)
    return leftover


def _is_runner(task: asyncio.Task[object]) -> bool:
    """Return whether anyio's test runner created the task: one for each call into the event loop."""
    return getattr(task.get_coro(), "__qualname__", "").startswith("TestRunner.")
