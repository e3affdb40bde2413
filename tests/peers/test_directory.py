"""A directory that names holders: queried besides the peers, with a timeout, and never trusted."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest

from kvtier.backends.base import Outcome
from kvtier.concurrency.breaker import MAX_PAUSE, MIN_PAUSE
from kvtier.memory.keys import ChunkKey
from kvtier.peers.backend import MAX_HOLDERS, MAX_HOLDERS_ASKED, DirectoryClient, PeersBackend
from kvtier.peers.protocol import Hello
from tests.rigs.clock import Clock
from tests.rigs.scripted_peer import ScriptedPeer, reading_from
from tests.rigs.waiting import until

from .test_backend import assert_intact, blanks, connected, keys_of
from .test_temporary import temporary_addresses

pytestmark = pytest.mark.anyio

OK, MISS = Outcome.OK, Outcome.MISS


class ScriptedDirectory:
    """Names the holders that a test sets."""

    def __init__(self, *named: tuple[ScriptedPeer | str, int]) -> None:
        self.named = list(named)
        self.queries: list[Sequence[ChunkKey]] = []
        self.may_answer = anyio.Event()
        self.may_answer.set()
        self.error: Exception | None = None

    async def who_holds(self, keys: Sequence[ChunkKey]) -> Sequence[tuple[str, int]]:
        self.queries.append(keys)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return [
            (holder if isinstance(holder, str) else holder.address, count) for holder, count in self.named
        ]


@asynccontextmanager
async def asking(
    directory: ScriptedDirectory,
    *peers: ScriptedPeer,
    unauthenticated: Sequence[ScriptedPeer] = (),
    **more: Any,
) -> AsyncIterator[PeersBackend]:
    """Open a backend with a directory. Only the directory may name the ``unauthenticated`` peers."""
    async with AsyncExitStack() as stack:
        for peer in (*peers, *unauthenticated):
            await stack.enter_async_context(peer.serving())
        backend = await stack.enter_async_context(
            reading_from(*peers, unauthenticated=unauthenticated, **more)
        )
        backend.set_directory(directory)
        await connected(backend)
        yield backend


async def until_found(backend: PeersBackend) -> None:
    """Look a chunk up until it is found: on a busy machine, a configured peer may exceed a short timeout."""
    with anyio.fail_after(60):
        while await backend.held_prefix(keys_of([0])) != 1:
            await anyio.sleep(0.01)


# Queries.


async def test_named_holder_is_queried_in_the_same_lookup() -> None:
    holder = ScriptedPeer().hold(*range(5))
    directory = ScriptedDirectory((holder, 5))
    async with asking(directory, unauthenticated=[holder]) as backend:
        for _ in range(2):
            assert await backend.held_prefix(keys_of(range(9))) == 5
            items = blanks(range(5))
            assert await backend.get(items) == [OK] * 5
            assert_intact(items)
        assert directory.queries == [keys_of(range(9))] * 2
        assert holder.requests["Hello"] == 1, "the connection is kept"
        assert temporary_addresses(backend) == [holder.address]
        await until(lambda: not holder.open_chunks)


async def test_without_named_holders_only_configured_peers_are_queried() -> None:
    usual, other = ScriptedPeer("usual"), ScriptedPeer("other").hold(1)
    directory = ScriptedDirectory((other, 1))
    async with asking(directory, usual, unauthenticated=[other]) as backend:
        assert await backend.held_prefix(keys_of([1])) == 1
        lookups = other.requests["Lookup"]
        directory.named = []
        for number in range(2, 12):
            assert await backend.held_prefix(keys_of([number])) == 0
        assert usual.requests["Lookup"] == 11
        assert other.requests["Lookup"] == lookups, "temporary peers are queried only if named"
        backend.set_directory(None)
        assert await backend.held_prefix(keys_of([1])) == 0
        assert len(directory.queries) == 11


async def test_only_the_best_holders_are_queried() -> None:
    holders = [ScriptedPeer(str(number)).hold(*range(number)) for number in range(1, 7)]
    directory = ScriptedDirectory(*((holder, len(holder.chunks)) for holder in holders))
    async with asking(directory, unauthenticated=holders) as backend:
        assert await backend.held_prefix(keys_of(range(9))) == 6
        assert [holder for holder in holders if holder.requests["Lookup"]] == holders[-MAX_HOLDERS_ASKED:]


async def test_configured_peers_and_named_holders_combine_to_a_prefix() -> None:
    usual, named = ScriptedPeer("usual").hold(*range(6)), ScriptedPeer("named").hold(0, 1, 6, 7, 8)
    directory = ScriptedDirectory((named, 2))
    async with asking(directory, usual, unauthenticated=[named]) as backend:
        usual.answering = anyio.Event()
        async with anyio.create_task_group() as tasks:

            async def look_up() -> None:
                assert await backend.held_prefix(keys_of(range(12))) == 9

            tasks.start_soon(look_up)
            await until(lambda: named.requests["Lookup"])
            usual.answering.set()
        items = blanks(range(9))
        assert await backend.get(items) == [OK] * 9
        assert_intact(items)
        await until(lambda: not usual.open_chunks and not named.open_chunks)


async def test_holder_without_additional_chunks_is_not_queried() -> None:
    usual, named = ScriptedPeer("usual").hold(0, 1), ScriptedPeer("named").hold(0, 1)
    directory = ScriptedDirectory((named, 2))
    async with asking(directory, usual, unauthenticated=[named]) as backend:
        directory.may_answer = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(backend.held_prefix, keys_of(range(4)))
            await until(lambda: backend.status()[0]["granted_chunks"] == 2)
            directory.may_answer.set()
        assert not named.requests


async def test_configured_peers_are_not_queried_twice() -> None:
    usual = ScriptedPeer().hold(0, 1)
    directory = ScriptedDirectory((usual, 2), (f"localhost:{usual.port}", 2))
    async with asking(directory, usual) as backend:
        directory.named = [(usual, 2), (f"localhost:{usual.port}", 2)]
        usual.answering = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(backend.held_prefix, keys_of(range(4)))
            await until(lambda: usual.requests["Hello"] == 2)
            usual.answering.set()
        assert usual.requests["Lookup"] == 1
        assert not temporary_addresses(backend), "the same instance under another address"
        for _ in range(3):
            assert await backend.held_prefix(keys_of(range(4))) == 2
        assert usual.requests["Lookup"] == 4
        assert usual.requests["Hello"] == 2, "the alias is cached"


# Wrong answers.

GARBAGE = ["", ":", "nowhere", "a:b:c", "x" * 5000 + ":1", "tab\there:1", "\0:80", "host:999999", "host:-1"]


async def test_invalid_own_and_dead_addresses_do_not_hide_holders() -> None:
    itself, dead, holder = ScriptedPeer("here"), ScriptedPeer("dead"), ScriptedPeer("holder").hold(*range(3))
    async with dead.serving():
        pass
    directory = ScriptedDirectory(
        *((address, 99) for address in GARBAGE), (itself, 50), (dead, 40), (dead, 30), (holder, 3)
    )
    async with asking(directory, unauthenticated=[itself, holder]) as backend:
        with anyio.fail_after(30):
            while await backend.held_prefix(keys_of(range(9))) < 3:
                pass
        assert len(directory.queries) <= 3, "unusable addresses are skipped without delay"
        hellos = itself.requests["Hello"]
        for _ in range(10):
            assert await backend.held_prefix(keys_of(range(9))) == 3
        assert itself.requests["Hello"] == hellos
        assert temporary_addresses(backend) == [holder.address]


async def test_ten_thousand_holders_are_not_all_dialled() -> None:
    directory = ScriptedDirectory()
    async with asking(directory) as backend:
        directory.named = [(f"127.0.0.1:{port}", 10) for port in range(20_000, 30_000)]
        used = await DirectoryClient(directory).holders([], anyio.current_time() + 60)
        assert len(used) == MAX_HOLDERS
        for _ in range(30):
            assert await backend.held_prefix(keys_of(range(9))) == 0
        assert len(temporary_addresses(backend)) <= 64


async def test_holder_with_fewer_chunks_than_reported() -> None:
    empty, truthful = ScriptedPeer("liar"), ScriptedPeer("honest").hold(0)
    directory = ScriptedDirectory((empty, 9), (truthful, 1), ("negative:1", -5), ("zero:1", 0))
    async with asking(directory, unauthenticated=[empty, truthful]) as backend:
        assert await backend.held_prefix(keys_of(range(9))) == 1
        assert await backend.get(blanks([0])) == [OK]


# Slow and failing.


async def asked(client: DirectoryClient, directory: ScriptedDirectory) -> bool:
    """Return whether a lookup queries the directory."""
    count = len(directory.queries)
    await client.holders([], anyio.current_time() + 5)
    return len(directory.queries) > count


async def test_slow_directory_times_out_once_and_is_backed_off() -> None:
    clock, directory = Clock(), ScriptedDirectory()
    client = DirectoryClient(directory, clock)
    directory.may_answer = anyio.Event()
    async with anyio.create_task_group() as tasks:  # Concurrent timeouts count as one failure.
        for _ in range(20):
            tasks.start_soon(client.holders, [], anyio.current_time() + 0.2)
    assert len(directory.queries) == 20
    directory.may_answer.set()
    assert not await asked(client, directory)
    clock.now += MIN_PAUSE
    assert await asked(client, directory)
    assert await asked(client, directory), "it answers again"


async def test_configured_peers_are_queried_while_the_directory_does_not_answer() -> None:
    usual, directory = ScriptedPeer().hold(0), ScriptedDirectory()
    async with asking(directory, usual, timeout=0.5) as backend:
        directory.may_answer = anyio.Event()
        await until_found(backend)


async def test_failing_directory_is_retried_with_growing_back_off() -> None:
    clock, directory = Clock(), ScriptedDirectory()
    client = DirectoryClient(directory, clock)
    directory.error = RuntimeError("out of order")
    pauses = []
    for _ in range(8):
        assert await asked(client, directory)
        began = clock.now
        while not await asked(client, directory):
            clock.now += 0.05
        clock.now -= 0.05
        pauses.append(clock.now - began)
        clock.now += 20.0
    assert pauses[0] < 0.3
    assert 7 < max(pauses) < 11
    directory.error = None
    assert await asked(client, directory)
    assert await asked(client, directory), "without back-off"


async def test_directory_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    clock, directory = Clock(), ScriptedDirectory()
    client = DirectoryClient(directory, clock)
    directory.error = RuntimeError("out of order")
    for _ in range(5):
        assert await asked(client, directory)
        clock.now += MAX_PAUSE
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "out of order" in warning


async def test_slow_holder_is_connected_for_the_next_lookup() -> None:
    gate = anyio.Event()
    holder = ScriptedPeer().hold(0)
    holder.answering = gate
    directory = ScriptedDirectory((holder, 1))
    async with asking(directory, unauthenticated=[holder], timeout=0.5) as backend:
        assert await backend.held_prefix(keys_of([0])) == 0
        gate.set()
        await connected(backend, 1)
        await until_found(backend)
        assert holder.requests["Hello"] == 1


async def test_unresponsive_holder_times_out_once() -> None:
    holder = ScriptedPeer().hold(0)
    directory = ScriptedDirectory((holder, 1))
    async with asking(directory, unauthenticated=[holder], timeout=0.5) as backend:
        await until_found(backend)
        holder.answering = anyio.Event()
        lookups = holder.requests["Lookup"]
        for _ in range(20):
            assert await backend.held_prefix(keys_of([0])) == 0
        assert holder.requests["Lookup"] <= lookups + 1
        holder.answering.set()
        await until_found(backend)


async def test_unresponsive_holders_do_not_delay_other_peers() -> None:
    """More holders than connecting threads; a configured peer reconnects in the meantime."""
    usual = ScriptedPeer("usual").hold(0)
    stalled_peers = [ScriptedPeer(f"mute {number}") for number in range(12)]
    for stalled in stalled_peers:
        stalled.answering = anyio.Event()
    directory = ScriptedDirectory(*((stalled, 5) for stalled in stalled_peers))
    async with asking(directory, usual, unauthenticated=stalled_peers, timeout=0.5) as backend:
        directory.named = [(stalled, 5) for stalled in stalled_peers]
        for at in range(0, 12, 3):
            directory.named = [(stalled, 5) for stalled in stalled_peers[at : at + 3]]
            await until_found(backend)
        usual.disconnect()
        await until(lambda: usual.requests["Hello"] == 2)
        await until(lambda: backend.clients[0].source is not None)
        await until_found(backend)


@pytest.mark.parametrize("when", ["asked", "connecting", "looked up"])
async def test_cancelled_lookup_leaks_nothing(when: str) -> None:
    holder = ScriptedPeer().hold(0)
    directory = ScriptedDirectory((holder, 1))
    reached: Callable[[], object]
    async with asking(directory, unauthenticated=[holder]) as backend:
        if when == "asked":
            directory.may_answer, reached = anyio.Event(), lambda: directory.queries
        else:
            name = Hello.__name__ if when == "connecting" else "Lookup"
            if when == "looked up":
                async with backend.temporary_peer(holder.address):
                    pass
            holder.answering, reached = anyio.Event(), lambda: holder.requests[name]
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
