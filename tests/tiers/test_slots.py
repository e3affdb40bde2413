"""Slots: bounded, by priority, and without starving the background."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest
from anyio.abc import TaskGroup

from kvtier.events import Priority
from kvtier.tiers.slots import MAX_PASSED, Slots

pytestmark = pytest.mark.anyio
REQUESTED, AHEAD, BACKGROUND = Priority.REQUESTED, Priority.AHEAD, Priority.BACKGROUND


class Calls:
    """Calls that take a slot until they are ended by name."""

    def __init__(self, slots: Slots, tasks: TaskGroup) -> None:
        self.slots = slots
        self.running: list[str] = []
        self._tasks = tasks
        self._ends: dict[str, anyio.Event] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}

    async def start(self, name: str, priority: Priority) -> None:
        self._ends[name], self._scopes[name] = anyio.Event(), anyio.CancelScope()
        self._tasks.start_soon(self._run, name, priority)
        await anyio.wait_all_tasks_blocked()

    async def _run(self, name: str, priority: Priority) -> None:
        with self._scopes[name]:
            async with self.slots.taken(priority):
                self.running.append(name)
                try:
                    await self._ends[name].wait()
                finally:
                    self.running.remove(name)

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await anyio.wait_all_tasks_blocked()

    async def cancel(self, name: str) -> None:
        self._scopes[name].cancel()
        await anyio.wait_all_tasks_blocked()


@pytest.fixture
async def calls() -> AsyncIterator[Calls]:
    async with anyio.create_task_group() as tasks:
        yield Calls(Slots(4), tasks)
        tasks.cancel_scope.cancel()


async def test_calls_in_flight_are_bounded(calls: Calls) -> None:
    for number in range(6):
        await calls.start(f"r{number}", REQUESTED)
    assert calls.running == ["r0", "r1", "r2", "r3"]
    assert calls.slots.waiting(REQUESTED) == 2
    await calls.end("r1")
    assert calls.running == ["r0", "r2", "r3", "r4"], "the oldest waiting call is the next"


async def test_most_urgent_call_is_the_next(calls: Calls) -> None:
    for number in range(4):
        await calls.start(f"r{number}", REQUESTED)
    await calls.start("background", BACKGROUND)
    await calls.start("ahead", AHEAD)
    await calls.start("requested", REQUESTED)
    assert [calls.slots.waiting(priority) for priority in Priority] == [1, 2, 3]
    await calls.end("r0")
    await calls.end("r1")
    assert calls.running == ["r2", "r3", "requested", "ahead"]
    await calls.end("r2")
    assert calls.running == ["r3", "requested", "ahead", "background"]


async def test_background_leaves_half_of_the_slots(calls: Calls) -> None:
    for number in range(4):
        await calls.start(f"b{number}", BACKGROUND)
    assert calls.running == ["b0", "b1"]
    await calls.start("r0", REQUESTED)
    await calls.start("r1", REQUESTED)
    assert calls.running == ["b0", "b1", "r0", "r1"], "a request does not wait for background work"


async def test_one_background_call_beside_more_urgent_ones(calls: Calls) -> None:
    await calls.start("r0", REQUESTED)
    for number in range(3):
        await calls.start(f"b{number}", BACKGROUND)
    assert calls.running == ["r0", "b0"]
    await calls.end("b0")
    assert calls.running == ["r0", "b1"], "the background goes on"
    await calls.end("r0")
    assert calls.running == ["b1", "b2"]


async def test_steady_reads_do_not_starve_the_background(calls: Calls) -> None:
    for number in range(4):
        await calls.start(f"r{number}", REQUESTED)
    await calls.start("b0", BACKGROUND)
    for number in range(MAX_PASSED):
        await calls.start(f"r{number + 4}", REQUESTED)
        await calls.end(f"r{number}")
        assert "b0" not in calls.running
    await calls.start("late", REQUESTED)
    await calls.end(f"r{MAX_PASSED}")
    assert "b0" in calls.running
    assert "late" not in calls.running
    await calls.end("b0")
    assert "late" in calls.running


async def test_background_work_has_a_slot_even_if_there_is_only_one(calls: Calls) -> None:
    calls.slots = Slots(1)
    await calls.start("b0", BACKGROUND)
    await calls.start("b1", BACKGROUND)
    await calls.start("r0", REQUESTED)
    assert calls.running == ["b0"]
    await calls.end("b0")
    assert calls.running == ["r0"]
    await calls.end("r0")
    assert calls.running == ["b1"]


async def test_cancelled_calls_give_their_place_to_others(calls: Calls) -> None:
    for number in range(4):
        await calls.start(f"r{number}", REQUESTED)
    await calls.start("waiting", REQUESTED)
    await calls.start("next", REQUESTED)
    await calls.cancel("waiting")
    assert calls.slots.waiting(BACKGROUND) == 1
    await calls.cancel("r0")
    assert calls.running == ["r1", "r2", "r3", "next"]
    for name in ("r1", "r2", "r3", "next"):
        await calls.end(name)
    await calls.start("b0", BACKGROUND)
    await calls.start("b1", BACKGROUND)
    assert calls.running == ["b0", "b1"], "a slot was lost"


async def test_call_cancelled_when_it_is_admitted_gives_its_slot_back() -> None:
    slots = Slots(1)
    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def wait() -> None:
            with scope:
                async with slots.taken(REQUESTED):
                    raise AssertionError("cancelled before")

        async with slots.taken(REQUESTED):
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
        await anyio.wait_all_tasks_blocked()
    async with slots.taken(BACKGROUND):
        pass
