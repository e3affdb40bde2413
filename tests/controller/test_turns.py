"""Operations on the same chunks come one after the other where one of them may delete."""

from __future__ import annotations

import itertools

import anyio
import anyio.lowlevel
import pytest

from kvtier.controller.turns import Claim, Turns
from kvtier.keys import ChunkKey
from tests.controller.registering import keys_of

pytestmark = pytest.mark.anyio

ONE, TWO = keys_of("prompts", 2)


def claim(instances: str, *roots: ChunkKey, deletes: bool = True) -> Claim:
    return Claim(frozenset(instances), frozenset(roots) if roots else None, deletes=deletes)


@pytest.mark.parametrize(
    ("first", "second", "excluded"),
    [
        (claim("ab", ONE), claim("ba", ONE), True),
        (claim("ab", ONE), claim("ab", TWO), False),
        (claim("ab", ONE), claim("cd", ONE), True),
        (claim("ab", ONE, deletes=False), claim("ab", ONE, deletes=False), False),
        (claim("ab", ONE, deletes=False), claim("ab", ONE), True),
        (claim("a"), claim("ab", ONE), True),
        (claim("a"), claim("bc", ONE), False),
        (claim("a"), claim("a"), True),
        (claim("a"), claim("a", ONE, deletes=False), True),
    ],
)
async def test_who_waits_for_whom(first: Claim, second: Claim, excluded: bool) -> None:
    assert first.excludes(second) == second.excludes(first) == excluded
    turns = Turns()
    turns.claim(first)
    assert turns.is_free(second) != excluded


async def test_everybody_gets_a_turn_in_the_order_of_asking_and_nobody_beside_another() -> None:
    turns = Turns()
    under_way: set[int] = set()
    order: list[int] = []

    async def work(number: int, mine: Claim) -> None:
        async with turns.turn(mine):
            under_way.add(number)
            assert under_way == {number}
            await anyio.lowlevel.checkpoint()
            under_way.discard(number)
            order.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            mine = claim("ab", ONE, deletes=number % 3 > 0) if number % 2 else claim("b")
            turns.claim(mine)
            tasks.start_soon(work, number, mine)
    assert order == list(range(20))


async def test_copies_go_side_by_side_and_what_deletes_waits_for_all_of_them() -> None:
    turns = Turns()
    together = anyio.Event()
    inside = itertools.count(1)
    order: list[str] = []

    async def copy(mine: Claim) -> None:
        async with turns.turn(mine):
            if next(inside) == 3:
                together.set()
            await together.wait()
            order.append("copy")

    async def move(mine: Claim) -> None:
        async with turns.turn(mine):
            order.append("move")

    copies = [claim("ab", ONE, deletes=False) for _ in range(3)]
    last = claim("ab", ONE)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for mine in copies:
                turns.claim(mine)
            turns.claim(last)
            tasks.start_soon(move, last)
            for mine in copies:
                tasks.start_soon(copy, mine)
    assert order == ["copy"] * 3 + ["move"]


async def test_who_gives_up_is_waited_for_no_longer() -> None:
    turns = Turns()
    first, second, third = (claim("ab", ONE) for _ in range(3))
    for mine in (first, second, third):
        turns.claim(mine)

    async def wait_for_second(scope: anyio.CancelScope) -> None:
        with scope:
            async with turns.turn(second):
                raise AssertionError

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()
            tasks.start_soon(wait_for_second, scope)
            await anyio.lowlevel.checkpoint()
            scope.cancel()
        turns.withdraw(first)
        async with turns.turn(third):
            pass
    assert turns.is_free(claim("ab", ONE))
