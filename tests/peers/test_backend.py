"""What several peers hold together, over real sockets: looked up, promised, read, shared, routed around."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from kvtier.backends.base import GetItem, Outcome, SupportsPrefix
from kvtier.backends.guarded import GuardedBackend
from kvtier.backends.sealed import SealedBackend
from kvtier.keys import ChunkKey
from kvtier.peers.backend import PeersBackend
from kvtier.peers.protocol import Release
from kvtier.testing.backend import blank, is_stained, make_key, stain
from kvtier.testing.cancelling import Through, cancelled_at

from .scripted import CHUNK, ScriptedPeer, reading_from, until, value

pytestmark = pytest.mark.anyio

OK, MISS, FULL, FAILED = Outcome.OK, Outcome.MISS, Outcome.FULL, Outcome.FAILED


def keys_of(numbers: Sequence[int]) -> list[ChunkKey]:
    return [make_key(number) for number in numbers]


def blanks(numbers: Sequence[int], length: int = CHUNK) -> list[GetItem]:
    return [(make_key(number), blank(length)) for number in numbers]


def assert_right(items: Sequence[GetItem]) -> None:
    assert all(bytes(view) == value(key, len(view)) for key, view in items)


async def connected(backend: PeersBackend, count: int | None = None) -> None:
    """Wait until so many peers, or all, can be asked."""
    wanted = len(backend.clients) if count is None else count
    await until(lambda: sum(client.source is not None for client in backend.clients) == wanted)


class Trio:
    """Three scripted peers that serve for as long as a test lasts."""

    def __init__(self) -> None:
        self.peers = [ScriptedPeer(name) for name in ("first", "second", "third")]
        self.stack = AsyncExitStack()

    async def __aenter__(self) -> list[ScriptedPeer]:
        for peer in self.peers:
            await self.stack.enter_async_context(peer.serving())
        return self.peers

    async def __aexit__(self, *error: object) -> None:
        await self.stack.aclose()


# One peer.


async def test_what_is_looked_up_is_read_and_given_back() -> None:
    async with ScriptedPeer().hold(*range(5)).serving() as peer:
        async with reading_from(peer) as backend:
            assert isinstance(backend, SupportsPrefix)
            # Right after the start: the first question waits for the connection.
            assert await backend.held_prefix(keys_of(range(9))) == 5
            assert peer.open_chunks == 5
            items = blanks(range(5))
            assert await backend.get(items) == [OK] * 5
            assert_right(items)
            assert peer.read_calls == 1, "a batch is one call"
            assert peer.asked["LookUp"] == 1, "what is promised is not asked for again"
            await until(lambda: not peer.open_chunks)
            assert peer.asked["Release"] == 1, "releases go together"
        await until(lambda: not peer.connections)


async def test_what_nobody_promised_is_asked_for() -> None:
    async with ScriptedPeer().hold(1, 3).serving() as peer, reading_from(peer) as backend:
        items = blanks([1, 2, 3])
        assert await backend.get(items) == [OK, MISS, OK]
        assert_right([items[0], items[2]])
        assert peer.asked["LookUp"] == 1
        await until(lambda: not peer.open_chunks)


async def test_contains_asks_all() -> None:
    async with Trio() as peers, reading_from(*peers) as backend:
        for number, peer in enumerate(peers):
            peer.hold(number)
        assert await backend.contains(keys_of(range(4))) == [True, True, True, False]
        assert await backend.contains([]) == []
        assert not any(peer.asked["LookUp"] for peer in peers)


async def test_nothing_is_stored_at_a_peer_nor_deleted() -> None:
    async with ScriptedPeer().hold(1).serving() as peer, reading_from(peer) as backend:
        assert await backend.put(blanks([1, 2])) == [FULL, FULL]
        await backend.delete(keys_of([1]))
        assert await backend.contains(keys_of([1])) == [True]
        assert (await backend.put([]), await backend.get([])) == ([], [])
        assert await backend.held_prefix([]) == 0


async def test_another_length_is_a_miss() -> None:
    async with ScriptedPeer().hold(1, 2).serving() as peer, reading_from(peer) as backend:
        items = [
            (make_key(1), blank(CHUNK - 1)),
            (make_key(2), blank(CHUNK)),
            (make_key(2), blank(CHUNK + 1)),
        ]
        assert await backend.get([items[0], items[2]]) == [MISS, MISS]
        assert await backend.get([items[1]]) == [OK]
        assert is_stained(items[0][1])
        assert is_stained(items[2][1])
        await until(lambda: not peer.open_chunks)


async def test_chunks_on_their_way_up_hold_up_no_others() -> None:
    peer = ScriptedPeer(late=frozenset(keys_of([0, 2])), landed=anyio.Event()).hold(*range(4))
    async with peer.serving(), reading_from(peer) as backend:
        assert await backend.held_prefix(keys_of(range(4))) == 4
        items = blanks(range(4))
        async with anyio.create_task_group() as tasks:
            answers: list[Outcome] = []

            async def get() -> None:
                answers.extend(await backend.get(items))

            tasks.start_soon(get)
            await until(lambda: peer.asked["Await"] and peer.reads == Counter(keys_of([1, 3])))
            assert not answers
            peer.landed.set()
        assert answers == [OK] * 4
        assert_right(items)
        assert peer.read_calls == 2
        await until(lambda: not peer.open_chunks)


async def test_what_never_arrives_is_a_miss() -> None:
    peer = ScriptedPeer(late=frozenset(keys_of([1]))).hold(0, 1)
    async with peer.serving(), reading_from(peer) as backend:
        assert await backend.held_prefix(keys_of([0, 1])) == 2
        peer.script = lambda message: peer.chunks.pop(make_key(1), None) and None
        assert await backend.get(blanks([0, 1])) == [OK, MISS]
        await until(lambda: not peer.open_chunks)


async def test_a_promise_about_to_end_is_not_used() -> None:
    async with ScriptedPeer(lease=0.6).hold(1, 2).serving() as peer, reading_from(peer) as backend:
        assert await backend.held_prefix(keys_of([1, 2])) == 2
        await until(lambda: not backend.status()[0]["promises"])
        items = blanks([1, 2])
        assert await backend.get(items) == [OK, OK]
        assert_right(items)
        assert peer.asked["LookUp"] == 2, "not asked again"


async def test_a_grant_that_is_over_is_asked_for_again() -> None:
    """The peer has dropped its grants without a word: what was promised misses, and is promised anew."""
    async with ScriptedPeer().hold(1, 2).serving() as peer, reading_from(peer) as backend:
        assert await backend.held_prefix(keys_of([1, 2])) == 2
        peer.granted.clear()
        items = blanks([1, 2])
        assert await backend.get(items) == [OK, OK]
        assert_right(items)


async def test_a_later_promise_replaces_an_earlier() -> None:
    async with ScriptedPeer().hold(*range(6)).serving() as peer, reading_from(peer) as backend:
        for _ in range(5):
            assert await backend.held_prefix(keys_of(range(6))) == 6
        await until(lambda: peer.open_chunks == 6)
        assert len(peer.granted) == 1


async def test_questions_of_any_size() -> None:
    count = 70_000
    async with ScriptedPeer().hold(3, count - 1).serving() as peer, reading_from(peer) as backend:
        keys = keys_of(range(count))
        held = await backend.contains(keys)
        assert [number for number, there in enumerate(held) if there] == [3, count - 1]
        assert await backend.held_prefix(keys[3:]) == 1
        await until(lambda: peer.open_chunks == 1)


# A read that goes on without the peer's taking part.


async def test_one_sided_reads_count_once_the_grant_is_confirmed() -> None:
    async with ScriptedPeer().hold(1, 2).serving() as peer, reading_from(peer, one_sided=True) as backend:
        items = blanks([1, 2])
        assert await backend.get(items) == [OK, OK]
        assert not peer.open_chunks, "released before it counted"
        assert await backend.held_prefix(keys_of([1, 2])) == 2

        async def end_the_grants() -> None:
            await peer.reading.wait()
            peer.granted.clear()
            peer.may_read.set()

        peer.reading, peer.may_read = anyio.Event(), anyio.Event()
        peer.read_outcome = OK
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end_the_grants)
            # Asked for once more, and that stood.
            assert await backend.get(blanks([1, 2])) == [OK, OK]
        assert peer.asked["LookUp"] == 3
        assert peer.read_calls == 3


async def test_one_sided_reads_that_are_never_confirmed_fail() -> None:
    peer = ScriptedPeer().hold(1)
    async with peer.serving(), reading_from(peer, one_sided=True, deadline=1.0) as backend:
        assert await backend.held_prefix(keys_of([1])) == 1
        peer.script = lambda message: () if isinstance(message, Release) else None
        assert await backend.get(blanks([1])) == [FAILED]


# Several peers.


async def test_a_prefix_spread_over_peers() -> None:
    async with Trio() as (first, second, third), reading_from(first, second, third) as backend:
        first.hold(*range(10))
        second.hold(*range(10, 20))
        third.hold(*range(15, 18), 25)
        await connected(backend)
        assert await backend.held_prefix(keys_of(range(30))) == 20
        # The second question goes to those that may hold what comes after the longest prefix.
        assert [peer.asked["LookUp"] for peer in (first, second, third)] == [1, 2, 2]
        await until(lambda: third.open_chunks == 3)
        items = blanks(range(20))
        assert await backend.get(items) == [OK] * 20
        assert_right(items)
        await until(lambda: not any(peer.open_chunks for peer in (first, second, third)))


async def test_one_question_where_peers_hold_the_same() -> None:
    async with Trio() as peers, reading_from(*peers) as backend:
        for peer in peers:
            peer.hold(*range(7))
        await connected(backend)
        assert await backend.held_prefix(keys_of(range(9))) == 7
        assert [peer.asked["LookUp"] for peer in peers] == [1, 1, 1]


@pytest.mark.parametrize("batch", [300, 10, 1])
async def test_peers_share_the_load(batch: int) -> None:
    async with Trio() as peers, reading_from(*peers) as backend:
        for peer in peers:
            peer.hold(*range(300), length=64)
        await connected(backend)
        for client in backend.clients:
            client.pace.round_trip = 1e-4  # Whatever this machine was busy with.
        assert await backend.held_prefix(keys_of(range(300))) == 300
        for start in range(0, 300, batch):
            assert set(await backend.get(blanks(range(start, start + batch), 64))) == {OK}
        counts = [peer.reads.total() for peer in peers]
        assert sum(counts) == 300
        assert min(counts) >= 60, counts
        # What was promised by three and read from one is given back by all.
        await until(lambda: not any(peer.open_chunks for peer in peers))


async def test_a_slow_peer_gets_less() -> None:
    async with Trio() as (fast, slow, _), reading_from(fast, slow) as backend:
        for peer in (fast, slow):
            peer.hold(*range(40), length=1 << 20)
        await connected(backend)

        read = slow.read

        async def read_slowly(span, view):
            await anyio.sleep(0.05)
            return await read(span, view)

        slow.read = read_slowly  # type: ignore[method-assign]
        for start in range(0, 40, 4):
            assert await backend.get(blanks(range(start, start + 4), 1 << 20)) == [OK] * 4
        assert slow.reads.total() < fast.reads.total() / 2


async def test_what_one_peer_misses_another_gives() -> None:
    async with Trio() as peers, reading_from(*peers) as backend:
        for peer in peers:
            peer.hold(*range(12))
        await connected(backend)
        assert await backend.held_prefix(keys_of(range(12))) == 12
        peers[0].read_outcome = MISS
        peers[1].read_outcome = FAILED
        items = blanks(range(12))
        assert await backend.get(items) == [OK] * 12
        assert_right(items)
        assert peers[2].reads.total() == 12


async def test_a_peer_that_dies_in_mid_read_is_routed_around() -> None:
    async with Trio() as peers, reading_from(*peers) as backend:
        for peer in peers:
            peer.hold(*range(12))
        await connected(backend)
        assert await backend.held_prefix(keys_of(range(12))) == 12
        for peer in peers:
            peer.may_read = anyio.Event()
        items = blanks(range(12))
        async with anyio.create_task_group() as tasks:
            answers: list[Outcome] = []

            async def get() -> None:
                answers.extend(await backend.get(items))

            tasks.start_soon(get)
            # Who is asked first, or at all, is for the backend to choose.
            await until(lambda: any(peer.reading.is_set() for peer in peers))
            dying = next(peer for peer in peers if peer.reading.is_set())
            dying.hang_up()
            for peer in peers:
                if peer is not dying:
                    peer.may_read.set()
        assert answers == [OK] * 12
        assert_right(items)
        assert not dying.reads


async def test_a_peer_that_falls_silent_in_mid_read_is_routed_around() -> None:
    """Its connections stand, as those of a stopped process do; it is used again when it answers again."""
    async with Trio() as peers, reading_from(*peers[:2], deadline=4.0) as backend:
        for peer in peers[:2]:
            peer.hold(*range(12))
        await connected(backend)
        assert await backend.held_prefix(keys_of(range(12))) == 12
        peers[0].answering, peers[0].may_read = anyio.Event(), anyio.Event()
        items = blanks(range(12))
        assert await backend.get(items) == [OK] * 12
        assert_right(items)
        assert backend.status()[0]["state"] == "does not answer"
        peers[0].answering.set()
        peers[0].may_read.set()
        await connected(backend)


# None at all.


async def test_without_any_peer_everything_is_a_miss_at_once() -> None:
    peers = [ScriptedPeer(name) for name in ("one", "two")]
    for peer in peers:
        async with peer.serving():
            pass  # Nobody serves on the port any longer.
    async with reading_from(*peers, patience=60.0, deadline=60.0) as backend:
        await until(lambda: all(status["state"] == "not connected" for status in backend.status()))
        with anyio.fail_after(30):
            assert await backend.held_prefix(keys_of(range(5))) == 0
            assert await backend.contains(keys_of(range(5))) == [False] * 5
            assert await backend.get(blanks(range(5))) == [MISS] * 5


async def test_a_guard_around_it_never_trips_for_want_of_peers() -> None:
    async with ScriptedPeer().hold(1).serving() as peer:
        pass
    async with reading_from(peer) as backend:
        guarded = GuardedBackend(SealedBackend(backend), failures=1)
        for _ in range(10):
            assert await guarded.get(blanks([1], 4096)) == [MISS]
            assert await guarded.contains(keys_of([1])) == [False]
        assert guarded.available


# Promises are kept within bounds.


async def test_disconnect_ends_reads_and_leaves_nothing() -> None:
    async with ScriptedPeer().hold(1).serving() as peer, reading_from(peer) as backend:
        peer.may_read = anyio.Event()
        items = blanks([1])
        async with anyio.create_task_group() as tasks:
            answers: list[Outcome] = []

            async def get() -> None:
                answers.extend(await backend.get(items))

            tasks.start_soon(get)
            await peer.reading.wait()
            await backend.disconnect()
            await backend.disconnect()
        assert answers == [FAILED]
        assert not peer.links
        assert await backend.held_prefix(keys_of([1])) == 0
        stain(items[0][1])
        peer.may_read.set()
        await anyio.sleep(0.01)
        assert is_stained(items[0][1])


# Cancelled.


@pytest.mark.parametrize("one_sided", [False, True], ids=["two-sided", "one-sided"])
@pytest.mark.parametrize("through", ["scope", "task"])
@pytest.mark.parametrize("method", ["get", "held_prefix", "contains"])
async def test_cancelled_at_every_await(method: str, through: Through, one_sided: bool) -> None:
    """Memory is left alone, and what the peers have granted is given back or known to be promised."""
    peer = ScriptedPeer(late=frozenset(keys_of([2]))).hold(1, 2)
    async with peer.serving(), reading_from(peer, one_sided=one_sided) as backend:
        await connected(backend)
        for lag in (0, 7):
            for step in range(1, 200):
                items = blanks([1, 2])
                question = items if method == "get" else keys_of([1, 2])
                cancelled = await cancelled_at(
                    step, partial(getattr(backend, method), question), through=through, lag=lag
                )
                for _, view in items:
                    stain(view)
                await anyio.lowlevel.checkpoint()
                assert all(is_stained(view) for _, view in items)
                if not cancelled:
                    break
            else:
                pytest.fail("it never ended")
        items = blanks([1, 2])
        assert await backend.get(items) == [OK, OK]
        assert_right(items)
        await until(lambda: not peer.open_chunks)


async def test_many_at_once_with_a_quarter_cancelled() -> None:
    async with Trio() as peers, reading_from(*peers) as backend:
        for peer in peers:
            peer.hold(*range(64 * 3))
            peer.may_read = anyio.Event()
        await connected(backend)
        batches = [blanks(range(3 * index, 3 * index + 3)) for index in range(64)]
        tasks = [asyncio.ensure_future(backend.get(batch)) for batch in batches]
        await until(lambda: any(peer.reading.is_set() for peer in peers))
        for task in tasks[::4]:
            task.cancel()
        await asyncio.wait(tasks, timeout=0.05)
        for peer in peers:
            peer.may_read.set()
        await asyncio.wait(tasks)
        for index, (batch, task) in enumerate(zip(batches, tasks, strict=True)):
            if index % 4:
                assert task.result() == [OK] * 3
                assert_right(batch)
            else:
                assert task.cancelled()
                assert all(is_stained(view) for _, view in batch)
        # Looked up by the cancelled, and promised still.
        await backend.disconnect()
        await until(lambda: not any(peer.open_chunks for peer in peers))
        assert not any(peer.links for peer in peers)


async def test_an_answer_that_nobody_waits_for_is_given_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvtier")
    async with ScriptedPeer().hold(1, 2).serving() as peer, reading_from(peer, patience=0.05) as backend:
        await connected(backend)
        await until(lambda: peer.asked["Ping"] >= 2)
        peer.answering = anyio.Event()
        assert await backend.held_prefix(keys_of([1, 2])) == 0
        assert peer.asked["LookUp"] == 1
        peer.answering.set()
        await until(lambda: peer.asked["Release"] == 1)
        assert not peer.open_chunks
        assert not backend.status()[0]["promises"]
