"""An instance registered with two scripted controllers that share their state: terms, questions, status."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from kvtier.fleet.member.protocol import Command, Delete, DeleteAll, Fetch, Pin, Tokenize, Unpin
from kvtier.fleet.member.session import NO_LEASE, NO_SHARED_STATE, Term
from kvtier.memory.keys import join_keys
from kvtier.testing.backend import make_key
from tests.fleet.member.conftest import Node, OpenNode
from tests.rigs.scripted_controller import Conversation, ScriptedController, scripted_controller
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

RAM = 0


@asynccontextmanager
async def registered_with_two(
    open_node: OpenNode, **settings: Any
) -> AsyncIterator[tuple[list[ScriptedController], list[Conversation], Node]]:
    async with scripted_controller() as first, scripted_controller() as second:
        both = [first, second]
        urls = {"url": [each.url for each in both]}
        async with open_node(first, controller=urls, **settings) as one:
            yield both, [await each.up_to_date() for each in both], one


COMMANDS: dict[str, Callable[[int, bytes, int], Command]] = {
    "Delete": lambda ticket, keys, term: Delete(ticket, RAM, keys, term=term),
    "DeleteAll": lambda ticket, _, term: DeleteAll(ticket, None, term=term),
    "Fetch": lambda ticket, keys, term: Fetch(ticket, RAM, None, b"n" * 32, keys, [1] * 4, None, term=term),
    "Pin": lambda ticket, keys, term: Pin(ticket, keys, None, term=term),
    "Unpin": lambda ticket, keys, term: Unpin(ticket, keys, term=term),
}


@pytest.mark.parametrize("name", COMMANDS)
async def test_command_of_an_earlier_term_is_refused(name: str, open_node: OpenNode) -> None:
    async with registered_with_two(open_node) as (_, (old, new), one):
        keys = await one.store(4)
        joined = join_keys(keys)
        for conversation, term in ((old, 7), (new, 8), (new, 8)):
            await conversation.done(lambda ticket, term=term: Pin(ticket, joined, 60.0, term=term))
        assert await old.failed(lambda ticket: COMMANDS[name](ticket, joined, 7)) == NO_LEASE
        assert await old.failed(lambda ticket: COMMANDS[name](ticket, joined, 0)) == NO_SHARED_STATE
        assert one.holds(keys, RAM) == [0, 1, 2, 3]
        assert one.cache.catalog.pinned == 4
        await new.done(lambda ticket: DeleteAll(ticket, None, term=9))


async def test_running_command_of_an_earlier_term_is_cancelled(
    open_node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with registered_with_two(open_node) as (_, (old, new), one):
        keys = await one.store(4)
        clearing = anyio.Event()

        async def clear(*_: object, **__: object) -> None:
            clearing.set()
            await anyio.sleep_forever()

        monkeypatch.setattr(one.cache, "clear", clear)
        ticket = await old.start_command(lambda ticket: DeleteAll(ticket, None, term=7))
        with anyio.fail_after(60):
            await clearing.wait()
        await new.done(lambda ticket: Pin(ticket, join_keys(keys), None, term=8))
        answer = await old.wait_for_answer(ticket)
        assert answer.reason == "it was cancelled"
        assert one.holds(keys, RAM) == [0, 1, 2, 3]


async def test_only_running_commands_of_earlier_terms_are_cancelled() -> None:
    term, ended, running, same = Term(), *(anyio.CancelScope() for _ in range(3))
    with term.executing(Pin(1, b"", None, term=7), ended):
        pass
    with (
        term.executing(Pin(2, b"", None, term=7), running),
        term.executing(Pin(3, b"", None, term=7), same),
    ):
        assert not running.cancel_called
        with term.executing(Tokenize(4, b"n" * 32, "a prompt"), anyio.CancelScope()):
            assert not running.cancel_called
        with term.executing(Pin(5, b"", None, term=8), anyio.CancelScope()):
            assert running.cancel_called
            assert same.cancel_called
    assert not ended.cancel_called


async def test_questions_are_asked_of_those_that_can_answer(open_node: OpenNode) -> None:
    async with registered_with_two(open_node, peer={"timeout": "10s"}) as (both, conversations, one):
        controllers = one.instance._controllers
        assert controllers is not None
        for conversation, peer in zip(conversations, ("a:1", "b:1"), strict=True):
            conversation.holders = ([peer], [1])
        answers = [await controllers.who_holds([make_key(1)]) for _ in range(4)]
        assert sorted(answers) == [[("a:1", 1)]] * 2 + [[("b:1", 1)]] * 2
        await both[0].kill()
        await until(lambda: [each["connected"] for each in controllers.status()] == [False, True])
        assert [await controllers.who_holds([make_key(1)]) for _ in range(3)] == [[("b:1", 1)]] * 3
        await both[1].kill()
        await until(lambda: not any(each["connected"] for each in controllers.status()))
        assert await controllers.who_holds([make_key(1)]) == []


async def test_status_is_of_each(open_node: OpenNode) -> None:
    async with registered_with_two(open_node) as (both, _, one):
        listed: Any = one.instance.status()["controllers"]
        assert [each["url"] for each in listed] == [each.url for each in both]
        assert one.instance.status()["controller"] == listed[0]
