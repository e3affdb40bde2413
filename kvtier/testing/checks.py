"""The checks that :func:`kvtier.testing.plugin.enable_checks` adds to every async test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Set

import anyio
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
    # The coroutines, because the id of a task may be used again after its end.
    before = {task.coro for task in anyio.get_running_tasks()}
    watch = LoopWatch()
    watch.start()
    yield
    leftover = await _leftover_tasks(before)
    watch.stop()
    if leftover:
        tasks = "\n".join(f"  {_describe(task)}" for task in leftover)
        pytest.fail(f"tasks are still running:\n{tasks}", pytrace=False)
    if watch.blocks and request.node.get_closest_marker("loop_may_block") is None:
        worst = max(watch.blocks)
        pytest.fail(
            f"the event loop was blocked for {worst.seconds * 1000:.0f} ms (limit: "
            f"{watch.limit * 1000:.0f} ms) here:\n{worst.stack}",
            pytrace=False,
        )


async def _leftover_tasks(before: Set[object]) -> list[anyio.TaskInfo]:
    leftover: list[anyio.TaskInfo] = []
    for _ in range(LEFTOVER_POLLS):
        running = anyio.get_running_tasks()
        leftover = [task for task in running if task.coro not in before and not _is_runner(task)]
        if not leftover:
            break
        await anyio.sleep(POLL_SECONDS)
    return leftover


def _is_runner(task: anyio.TaskInfo) -> bool:
    """Return whether anyio's test runner created the task: one for each call into the event loop."""
    return _name(task).startswith("TestRunner.")


def _name(task: anyio.TaskInfo) -> str:
    return getattr(task.coro, "__qualname__", "")


def _describe(task: anyio.TaskInfo) -> str:
    """Return the task's name, and the function that it runs with the line where it waits."""
    frame = getattr(task.coro, "cr_frame", None)
    place = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
    return f"{task.name}: {_name(task)}(){place}"
