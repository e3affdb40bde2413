"""A directory that names holders: asked beside the peers, never waited for, its word taken for no fact."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest

from kvtier.backends.base import Outcome
from kvtier.keys import ChunkKey
from kvtier.peers.backend import HOLDERS_ASKED, PeersBackend
from kvtier.peers.directory import MOST_NAMED, AskedDirectory
from kvtier.peers.protocol import Hello

from .scripted import ScriptedPeer, reading_from, until
from .test_backend import assert_right, blanks, connected, keys_of
from .test_borrowing import borrowed, nothing_left
from .test_client import sockets

pytestmark = pytest.mark.anyio

OK, MISS = Outcome.OK, Outcome.MISS


class ScriptedDirectory:
    """Names what a test tells it to."""

    def __init__(self, *named: tuple[ScriptedPeer | str, int]) -> None:
        self.named = list(named)
        self.asked: list[Sequence[ChunkKey]] = []
        self.may_answer = anyio.Event()
        self.may_answer.set()
        self.error: Exception | None = None

    async def who_holds(self, keys: Sequence[ChunkKey]) -> Sequence[tuple[str, int]]:
        self.asked.append(keys)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return [(one if isinstance(one, str) else one.address, count) for one, count in self.named]


@asynccontextmanager
async def asking(
    directory: ScriptedDirectory, *peers: ScriptedPeer, strangers: Sequence[ScriptedPeer] = (), **more: Any
) -> AsyncIterator[PeersBackend]:
    """A backend with a directory; ``strangers`` serve, too, and only the directory may name them."""
    async with AsyncExitStack() as stack:
        for peer in (*peers, *strangers):
            await stack.enter_async_context(peer.serving())
        backend = await stack.enter_async_context(reading_from(*peers, strangers=strangers, **more))
        backend.ask_directory(directory)
        await connected(backend)
        yield backend
    await nothing_left(*peers, *strangers)


# Asked.


async def test_a_holder_that_is_named_is_asked_in_the_same_look_up() -> None:
    holder = ScriptedPeer().hold(*range(5))
    directory = ScriptedDirectory((holder, 5))
    async with asking(directory, strangers=[holder]) as backend:
        for _ in range(2):
            assert await backend.held_prefix(keys_of(range(9))) == 5
            items = blanks(range(5))
            assert await backend.get(items) == [OK] * 5
            assert_right(items)
        assert directory.asked == [keys_of(range(9))] * 2
        assert holder.asked["Hello"] == 1, "the connection stays for later"
        assert borrowed(backend) == [holder.address]
        await until(lambda: not holder.open_chunks)


async def test_where_it_knows_nothing_nobody_is_asked_but_the_usual_peers() -> None:
    usual, other = ScriptedPeer("usual"), ScriptedPeer("other").hold(1)
    directory = ScriptedDirectory((other, 1))
    async with asking(directory, usual, strangers=[other]) as backend:
        assert await backend.held_prefix(keys_of([1])) == 1
        asked = other.asked["LookUp"]
        directory.named = []
        for number in range(2, 12):
            assert await backend.held_prefix(keys_of([number])) == 0
        assert usual.asked["LookUp"] == 11
        assert other.asked["LookUp"] == asked, "borrowed peers are asked when they are named"
        backend.ask_directory(None)
        assert await backend.held_prefix(keys_of([1])) == 0
        assert len(directory.asked) == 11


async def test_the_best_holders_are_asked_and_not_all() -> None:
    holders = [ScriptedPeer(str(number)).hold(*range(number)) for number in range(1, 7)]
    directory = ScriptedDirectory(*((holder, len(holder.chunks)) for holder in holders))
    async with asking(directory, strangers=holders) as backend:
        assert await backend.held_prefix(keys_of(range(9))) == 6
        assert [one for one in holders if one.asked["LookUp"]] == holders[-HOLDERS_ASKED:]


async def test_peers_and_named_holders_give_a_prompt_together() -> None:
    usual, named = ScriptedPeer("usual").hold(*range(6)), ScriptedPeer("named").hold(0, 1, 6, 7, 8)
    directory = ScriptedDirectory((named, 2))
    async with asking(directory, usual, strangers=[named]) as backend:
        usual.answering = anyio.Event()
        async with anyio.create_task_group() as tasks:

            async def look_up() -> None:
                assert await backend.held_prefix(keys_of(range(12))) == 9

            tasks.start_soon(look_up)
            await until(lambda: named.asked["LookUp"])
            usual.answering.set()
        items = blanks(range(9))
        assert await backend.get(items) == [OK] * 9
        assert_right(items)
        await until(lambda: not usual.open_chunks and not named.open_chunks)


async def test_who_has_no_more_than_is_known_already_is_not_asked() -> None:
    usual, named = ScriptedPeer("usual").hold(0, 1), ScriptedPeer("named").hold(0, 1)
    directory = ScriptedDirectory((named, 2))
    async with asking(directory, usual, strangers=[named]) as backend:
        directory.may_answer = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(backend.held_prefix, keys_of(range(4)))
            await until(lambda: backend.status()[0]["promises"] == 2)
            directory.may_answer.set()
        assert not named.asked


async def test_peers_of_the_settings_are_not_asked_twice() -> None:
    usual = ScriptedPeer().hold(0, 1)
    directory = ScriptedDirectory((usual, 2), (f"localhost:{usual.port}", 2))
    async with asking(directory, usual) as backend:
        directory.named = [(usual, 2), (f"localhost:{usual.port}", 2)]
        usual.answering = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(backend.held_prefix, keys_of(range(4)))
            await until(lambda: usual.asked["Hello"] == 2)
            usual.answering.set()
        assert usual.asked["LookUp"] == 1
        assert not borrowed(backend), "the same instance by another address"
        for _ in range(3):
            assert await backend.held_prefix(keys_of(range(4))) == 2
        assert usual.asked["LookUp"] == 4
        assert usual.asked["Hello"] == 2, "that is remembered"


# Wrong.

GARBAGE = ["", ":", "nowhere", "a:b:c", "x" * 5000 + ":1", "tab\there:1", "\0:80", "host:999999", "host:-1"]


async def test_garbage_itself_and_the_dead_hide_nobody() -> None:
    before = sockets()
    itself, dead, holder = ScriptedPeer("here"), ScriptedPeer("dead"), ScriptedPeer("holder").hold(*range(3))
    async with dead.serving():
        pass
    directory = ScriptedDirectory(
        *((address, 99) for address in GARBAGE), (itself, 50), (dead, 40), (dead, 30), (holder, 3)
    )
    async with asking(directory, strangers=[itself, holder]) as backend:
        with anyio.fail_after(30):
            while await backend.held_prefix(keys_of(range(9))) < 3:
                pass
        assert len(directory.asked) <= 3, "who was of no use is passed over at once"
        hellos = itself.asked["Hello"]
        for _ in range(10):
            assert await backend.held_prefix(keys_of(range(9))) == 3
        assert itself.asked["Hello"] == hellos
        assert borrowed(backend) == [holder.address]
    await until(lambda: sockets() == before)


async def test_ten_thousand_holders_are_not_called() -> None:
    before = sockets()
    directory = ScriptedDirectory()
    async with asking(directory) as backend:
        directory.named = [(f"127.0.0.1:{port}", 10) for port in range(20_000, 30_000)]
        for _ in range(30):
            assert await backend.held_prefix(keys_of(range(9))) == 0
        assert len(borrowed(backend)) <= 64
        assert len(backend._roster._unusable) <= MOST_NAMED
    await until(lambda: sockets() == before)


async def test_a_holder_that_has_less_than_was_said() -> None:
    liar, honest = ScriptedPeer("liar"), ScriptedPeer("honest").hold(0)
    directory = ScriptedDirectory((liar, 9), (honest, 1), ("negative:1", -5), ("zero:1", 0))
    async with asking(directory, strangers=[liar, honest]) as backend:
        assert await backend.held_prefix(keys_of(range(9))) == 1
        assert await backend.get(blanks([0])) == [OK]


# Late.


async def test_a_slow_directory_costs_patience_once_and_is_left_alone() -> None:
    usual = ScriptedPeer().hold(0)
    directory = ScriptedDirectory()
    async with asking(directory, usual, patience=1.0) as backend:
        directory.may_answer = anyio.Event()
        for _ in range(3):
            async with anyio.create_task_group() as tasks:  # Many at once: one failure.
                for _ in range(20):
                    tasks.start_soon(backend.held_prefix, keys_of([0]))
        asked = backend._directory
        assert asked is not None
        asked._pause.next()
        asked._not_before = float("inf")
        before = len(directory.asked)
        with anyio.fail_after(10):  # Half of what these take if each waits.
            for _ in range(20):
                assert await backend.held_prefix(keys_of([0])) == 1
        assert len(directory.asked) == before
        asked._not_before = 0.0
        directory.may_answer.set()
        await backend.held_prefix(keys_of([0]))
        await backend.held_prefix(keys_of([0]))
        assert len(directory.asked) == before + 2, "it answers again"


async def test_it_is_asked_again_later_and_later_while_it_fails() -> None:
    now = 0.0
    directory = ScriptedDirectory()
    asked = AskedDirectory(directory, clock=lambda: now)

    async def ask() -> bool:
        count = len(directory.asked)
        await asked.holders([], anyio.current_time() + 5)
        return len(directory.asked) > count

    directory.error = RuntimeError("out of order")
    pauses = []
    for _ in range(8):
        assert await ask()
        began = now
        while not await ask():
            now += 0.05
        now -= 0.05
        pauses.append(now - began)
        now += 20.0
    assert pauses[0] < 0.3
    assert 7 < max(pauses) < 11
    directory.error = None
    assert await ask()
    assert await ask(), "at once"


async def test_a_directory_that_raises_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    usual = ScriptedPeer().hold(0)
    directory = ScriptedDirectory()
    directory.error = RuntimeError("out of order")
    async with asking(directory, usual) as backend:
        for _ in range(5):
            assert await backend.held_prefix(keys_of([0])) == 1
            assert backend._directory is not None
            backend._directory._not_before = 0.0
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "out of order" in told[0]
    assert len(directory.asked) == 5


async def test_a_holder_that_is_slow_to_connect_is_there_for_the_next_look_up() -> None:
    gate = anyio.Event()
    holder = ScriptedPeer().hold(0)
    holder.answering = gate
    directory = ScriptedDirectory((holder, 1))
    async with asking(directory, strangers=[holder], patience=0.2) as backend:
        assert await backend.held_prefix(keys_of([0])) == 0
        gate.set()
        await connected(backend, 1)
        assert await backend.held_prefix(keys_of([0])) == 1
        assert holder.asked["Hello"] == 1


async def test_a_holder_that_leaves_look_ups_unanswered_costs_patience_once() -> None:
    holder = ScriptedPeer().hold(0)
    directory = ScriptedDirectory((holder, 1))
    async with asking(directory, strangers=[holder], patience=1.0) as backend:
        assert await backend.held_prefix(keys_of([0])) == 1
        holder.answering = anyio.Event()
        assert await backend.held_prefix(keys_of([0])) == 0
        with anyio.fail_after(10):  # Half of what these take if each waits.
            for _ in range(20):
                assert await backend.held_prefix(keys_of([0])) == 0
        holder.answering.set()
        await until(lambda: backend.clients[0].source is not None)
        with anyio.fail_after(30):
            while await backend.held_prefix(keys_of([0])) == 0:
                await anyio.sleep(0.02)


async def test_holders_that_never_answer_keep_nobody_else_waiting() -> None:
    """More of them than there are threads to connect by; a peer of the settings comes back meanwhile."""
    usual = ScriptedPeer("usual").hold(0)
    mutes = [ScriptedPeer(f"mute {number}") for number in range(12)]
    for mute in mutes:
        mute.answering = anyio.Event()
    directory = ScriptedDirectory(*((mute, 5) for mute in mutes))
    async with asking(directory, usual, strangers=mutes, patience=0.2) as backend:
        directory.named = [(mute, 5) for mute in mutes]
        for at in range(0, 12, 3):
            directory.named = [(mute, 5) for mute in mutes[at : at + 3]]
            assert await backend.held_prefix(keys_of([0])) == 1
        usual.hang_up()
        await until(lambda: usual.asked["Hello"] == 2)
        await until(lambda: backend.clients[0].source is not None)
        assert await backend.held_prefix(keys_of([0])) == 1


@pytest.mark.parametrize("when", ["asked", "connecting", "looked up"])
async def test_a_look_up_that_is_cancelled_leaves_nothing(when: str) -> None:
    before = sockets()
    holder = ScriptedPeer().hold(0)
    directory = ScriptedDirectory((holder, 1))
    reached: Callable[[], object]
    async with asking(directory, strangers=[holder]) as backend:
        if when == "asked":
            directory.may_answer, reached = anyio.Event(), lambda: directory.asked
        else:
            name = Hello.__name__ if when == "connecting" else "LookUp"
            if when == "looked up":
                async with backend.borrow(holder.address):
                    pass
            holder.answering, reached = anyio.Event(), lambda: holder.asked[name]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(backend.held_prefix, keys_of([0]))
            await until(reached)
            tasks.cancel_scope.cancel()
        holder.answering.set()
        directory.may_answer.set()
        assert all(status["users"] == 0 for status in backend.status())
        assert await backend.held_prefix(keys_of([0])) == 1
        assert await backend.get(blanks([0])) == [OK]
        await until(lambda: not holder.open_chunks)
    await until(lambda: sockets() == before)
