"""``PeersBackend`` over real sockets: lookups, leases, reads, load sharing and failover."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from kvtier.backends.base import GetItem, Outcome, SupportsPrefix
from kvtier.concurrency.tasks import DetachedTask
from kvtier.memory.keys import ChunkKey
from kvtier.peers.backend import PeersBackend
from kvtier.peers.protocol import Release
from kvtier.testing.backend import blank, is_poisoned, make_key, poison
from kvtier.testing.cancelling import Through, cancelled_at
from kvtier.tiers.breaker import CircuitBreaker
from tests.rigs.composed_backends import tier_over
from tests.rigs.scripted_peer import CHUNK, ScriptedPeer, reading_from, value
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

OK, MISS, FULL, FAILED = Outcome.OK, Outcome.MISS, Outcome.FULL, Outcome.FAILED


def keys_of(numbers: Sequence[int]) -> list[ChunkKey]:
    return [make_key(number) for number in numbers]


def blanks(numbers: Sequence[int], length: int = CHUNK) -> list[GetItem]:
    return [(make_key(number), blank(length)) for number in numbers]


def assert_intact(items: Sequence[GetItem]) -> None:
    assert all(bytes(view) == value(key, len(view)) for key, view in items)


async def connected(backend: PeersBackend, count: int | None = None) -> None:
    """Wait until ``count`` peers, or all, are connected."""
    expected = len(backend.clients) if count is None else count
    await until(lambda: sum(client.source is not None for client in backend.clients) == expected)


@asynccontextmanager
async def trio() -> AsyncIterator[list[ScriptedPeer]]:
    """Three serving scripted peers."""
    async with AsyncExitStack() as stack:
        peers = [ScriptedPeer(name) for name in ("first", "second", "third")]
        yield [await stack.enter_async_context(peer.serving()) for peer in peers]


# One peer.


async def test_looked_up_chunks_are_read_and_released() -> None:
    async with ScriptedPeer().hold(*range(5)).serving() as peer, reading_from(peer) as backend:
        assert isinstance(backend, SupportsPrefix)
        # Right after the start: the first lookup waits for the connection.
        assert await backend.held_prefix(keys_of(range(9))) == 5
        assert peer.open_chunks == 5
        items = blanks(range(5))
        assert await backend.get(items) == [OK] * 5
        assert_intact(items)
        assert peer.read_calls == 1, "a batch is one call"
        assert peer.requests["Lookup"] == 1, "leased chunks are not looked up again"
        await until(lambda: not peer.open_chunks)
        assert peer.requests["Release"] == 1, "releases are batched"


async def test_get_without_lease_sends_lookup() -> None:
    async with ScriptedPeer().hold(1, 3).serving() as peer, reading_from(peer) as backend:
        items = blanks([1, 2, 3])
        assert await backend.get(items) == [OK, MISS, OK]
        assert_intact([items[0], items[2]])
        assert peer.requests["Lookup"] == 1
        await until(lambda: not peer.open_chunks)


async def test_contains_queries_all_peers() -> None:
    async with trio() as peers, reading_from(*peers) as backend:
        for number, peer in enumerate(peers):
            peer.hold(number)
        assert await backend.contains(keys_of(range(4))) == [True, True, True, False]
        assert await backend.contains([]) == []
        assert not any(peer.requests["Lookup"] for peer in peers)


async def test_put_and_delete_do_not_change_peers() -> None:
    async with ScriptedPeer().hold(1).serving() as peer, reading_from(peer) as backend:
        assert await backend.put(blanks([1, 2])) == [FULL, FULL]
        await backend.delete(keys_of([1]))
        assert await backend.contains(keys_of([1])) == [True]
        assert (await backend.put([]), await backend.get([])) == ([], [])
        assert await backend.held_prefix([]) == 0


async def test_length_mismatch_is_a_miss() -> None:
    async with ScriptedPeer().hold(1, 2).serving() as peer, reading_from(peer) as backend:
        items = [
            (make_key(1), blank(CHUNK - 1)),
            (make_key(2), blank(CHUNK)),
            (make_key(2), blank(CHUNK + 1)),
        ]
        assert await backend.get([items[0], items[2]]) == [MISS, MISS]
        assert await backend.get([items[1]]) == [OK]
        assert is_poisoned(items[0][1])
        assert is_poisoned(items[2][1])
        await until(lambda: not peer.open_chunks)


async def test_chunks_in_flight_do_not_delay_ready_ones() -> None:
    peer = ScriptedPeer(late=frozenset(keys_of([0, 2])), landed=anyio.Event()).hold(*range(4))
    async with peer.serving(), reading_from(peer) as backend:
        assert await backend.held_prefix(keys_of(range(4))) == 4
        items = blanks(range(4))
        getting = DetachedTask(backend.get(items))
        await until(lambda: peer.requests["Await"] and peer.reads == Counter(keys_of([1, 3])))
        assert not await getting.wait(0)
        peer.landed.set()
        assert await getting.join() == [OK] * 4
        assert_intact(items)
        assert peer.read_calls == 2
        await until(lambda: not peer.open_chunks)


async def test_chunk_that_never_becomes_readable_is_a_miss() -> None:
    peer = ScriptedPeer(late=frozenset(keys_of([1]))).hold(0, 1)
    async with peer.serving(), reading_from(peer) as backend:
        assert await backend.held_prefix(keys_of([0, 1])) == 2
        peer.script = lambda message: peer.chunks.pop(make_key(1), None) and None
        assert await backend.get(blanks([0, 1])) == [OK, MISS]
        await until(lambda: not peer.open_chunks)


async def test_lease_about_to_expire_is_not_used() -> None:
    async with ScriptedPeer(lease=0.6).hold(1, 2).serving() as peer, reading_from(peer) as backend:
        assert await backend.held_prefix(keys_of([1, 2])) == 2
        await until(lambda: not backend.status()[0]["granted_chunks"])
        items = blanks([1, 2])
        assert await backend.get(items) == [OK, OK]
        assert_intact(items)
        assert peer.requests["Lookup"] == 2, "no second lookup"


async def test_expired_grant_is_requested_again() -> None:
    """The peer drops its grants without notice: reads of leased chunks miss, and request a new grant."""
    async with ScriptedPeer().hold(1, 2).serving() as peer, reading_from(peer) as backend:
        assert await backend.held_prefix(keys_of([1, 2])) == 2
        peer.granted.clear()
        items = blanks([1, 2])
        assert await backend.get(items) == [OK, OK]
        assert_intact(items)


async def test_later_lease_replaces_earlier_one() -> None:
    async with ScriptedPeer().hold(*range(6)).serving() as peer, reading_from(peer) as backend:
        for _ in range(5):
            assert await backend.held_prefix(keys_of(range(6))) == 6
        await until(lambda: peer.open_chunks == 6)
        assert len(peer.granted) == 1


async def test_requests_of_any_size() -> None:
    count = 70_000
    async with ScriptedPeer().hold(3, count - 1).serving() as peer, reading_from(peer) as backend:
        keys = keys_of(range(count))
        held = await backend.contains(keys)
        assert [number for number, is_held in enumerate(held) if is_held] == [3, count - 1]
        assert await backend.held_prefix(keys[3:]) == 1
        await until(lambda: peer.open_chunks == 1)


# One-sided reads.


async def test_one_sided_reads_count_once_the_grant_is_confirmed() -> None:
    async with ScriptedPeer().hold(1, 2).serving() as peer, reading_from(peer, one_sided=True) as backend:
        items = blanks([1, 2])
        assert await backend.get(items) == [OK, OK]
        assert not peer.open_chunks, "released before the read counts"
        assert await backend.held_prefix(keys_of([1, 2])) == 2

        peer.reading, peer.may_read = anyio.Event(), anyio.Event()
        peer.read_outcome = OK
        getting = DetachedTask(backend.get(blanks([1, 2])))
        await peer.reading.wait()
        peer.granted.clear()
        peer.may_read.set()
        # Looked up once more, and that grant is valid.
        assert await getting.join() == [OK, OK]
        assert peer.requests["Lookup"] == 3
        assert peer.read_calls == 3


async def test_one_sided_reads_that_are_never_confirmed_fail() -> None:
    peer = ScriptedPeer().hold(1)
    async with peer.serving(), reading_from(peer, one_sided=True, deadline=1.0) as backend:
        assert await backend.held_prefix(keys_of([1])) == 1
        peer.script = lambda message: () if isinstance(message, Release) else None
        assert await backend.get(blanks([1])) == [FAILED]


# Several peers.


async def test_prefix_is_assembled_from_several_peers() -> None:
    async with trio() as (first, second, third), reading_from(first, second, third) as backend:
        first.hold(*range(10))
        second.hold(*range(10, 20))
        third.hold(*range(15, 18), 25)
        await connected(backend)
        assert await backend.held_prefix(keys_of(range(30))) == 20
        # The second lookup goes to the peers that may hold chunks beyond the longest prefix.
        assert [peer.requests["Lookup"] for peer in (first, second, third)] == [1, 2, 2]
        await until(lambda: third.open_chunks == 3)
        items = blanks(range(20))
        assert await backend.get(items) == [OK] * 20
        assert_intact(items)
        await until(lambda: not any(peer.open_chunks for peer in (first, second, third)))


async def test_single_lookup_if_peers_hold_the_same_chunks() -> None:
    async with trio() as peers, reading_from(*peers) as backend:
        for peer in peers:
            peer.hold(*range(7))
        await connected(backend)
        assert await backend.held_prefix(keys_of(range(9))) == 7
        assert [peer.requests["Lookup"] for peer in peers] == [1, 1, 1]


@pytest.mark.parametrize("batch", [300, 10, 1])
async def test_peers_share_the_load(batch: int) -> None:
    async with trio() as peers, reading_from(*peers) as backend:
        for peer in peers:
            peer.hold(*range(300), length=64)
        await connected(backend)
        for client in backend.clients:
            client.throughput.round_trip = 1e-4  # Ignore the load of this machine.
        assert await backend.held_prefix(keys_of(range(300))) == 300
        for start in range(0, 300, batch):
            assert set(await backend.get(blanks(range(start, start + batch), 64))) == {OK}
        counts = [peer.reads.total() for peer in peers]
        assert sum(counts) == 300
        assert min(counts) >= 60, counts
        # Leased from three peers and read from one: released at all of them.
        await until(lambda: not any(peer.open_chunks for peer in peers))


async def test_slow_peer_gets_fewer_reads() -> None:
    async with trio() as (fast, slow, _), reading_from(fast, slow) as backend:
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


async def test_miss_or_failure_of_one_peer_is_retried_at_another() -> None:
    async with trio() as peers, reading_from(*peers) as backend:
        for peer in peers:
            peer.hold(*range(12))
        await connected(backend)
        assert await backend.held_prefix(keys_of(range(12))) == 12
        peers[0].read_outcome = MISS
        peers[1].read_outcome = FAILED
        items = blanks(range(12))
        assert await backend.get(items) == [OK] * 12
        assert_intact(items)
        assert peers[2].reads.total() == 12


async def test_read_from_dying_peer_is_rerouted() -> None:
    async with trio() as peers, reading_from(*peers) as backend:
        for peer in peers:
            peer.hold(*range(12))
        await connected(backend)
        assert await backend.held_prefix(keys_of(range(12))) == 12
        for peer in peers:
            peer.may_read = anyio.Event()
        items = blanks(range(12))
        getting = DetachedTask(backend.get(items))
        # The backend chooses which peer it reads from.
        await until(lambda: any(peer.reading.is_set() for peer in peers))
        dying = next(peer for peer in peers if peer.reading.is_set())
        dying.disconnect()
        for peer in peers:
            if peer is not dying:
                peer.may_read.set()
        assert await getting.join() == [OK] * 12
        assert_intact(items)
        assert not dying.reads


async def test_read_from_unresponsive_peer_is_rerouted() -> None:
    """Its connections stay open, as those of a stopped process. It is used again once it answers."""
    async with trio() as peers, reading_from(*peers[:2], deadline=4.0) as backend:
        for peer in peers[:2]:
            peer.hold(*range(12))
        await connected(backend)
        assert await backend.held_prefix(keys_of(range(12))) == 12
        peers[0].answering, peers[0].may_read = anyio.Event(), anyio.Event()
        items = blanks(range(12))
        assert await backend.get(items) == [OK] * 12
        assert_intact(items)
        # Late if this process waits for a CPU: all chunks may have been read from the other peer by then.
        await until(lambda: backend.status()[0]["state"] == "does not answer")
        peers[0].answering.set()
        peers[0].may_read.set()
        await connected(backend)


# No peer.


async def test_without_peers_everything_misses_without_delay() -> None:
    peers = [ScriptedPeer(name) for name in ("one", "two")]
    for peer in peers:
        async with peer.serving():
            pass  # The port is closed from here on.
    async with reading_from(*peers, timeout=60.0, deadline=60.0) as backend:
        await until(lambda: all(status["state"] == "not connected" for status in backend.status()))
        with anyio.fail_after(30):
            assert await backend.held_prefix(keys_of(range(5))) == 0
            assert await backend.contains(keys_of(range(5))) == [False] * 5
            assert await backend.get(blanks(range(5))) == [MISS] * 5


async def test_missing_peers_do_not_open_circuit_breaker() -> None:
    async with ScriptedPeer().hold(1).serving() as peer:
        pass
    async with reading_from(peer) as backend:
        tier = tier_over(backend, CircuitBreaker("peers", failures=1))
        for _ in range(10):
            assert await tier.read_items(blanks([1], 4096)) == [MISS]
            assert await tier.contains(keys_of([1])) == [False]
        assert tier.available


# Disconnect.


async def test_disconnect_fails_reads_and_leaks_nothing() -> None:
    async with ScriptedPeer().hold(1).serving() as peer, reading_from(peer) as backend:
        peer.may_read = anyio.Event()
        items = blanks([1])
        getting = DetachedTask(backend.get(items))
        await peer.reading.wait()
        await backend.close()
        await backend.close()
        assert await getting.join() == [FAILED]
        assert not peer.links
        assert await backend.held_prefix(keys_of([1])) == 0
        poison(items[0][1])
        peer.may_read.set()
        await anyio.sleep(0.01)
        assert is_poisoned(items[0][1])


# Cancellation.


@pytest.mark.parametrize("one_sided", [False, True], ids=["two-sided", "one-sided"])
@pytest.mark.parametrize("through", ["scope", "task"])
@pytest.mark.parametrize("method", ["get", "held_prefix", "contains"])
async def test_cancelled_at_every_await(method: str, through: Through, one_sided: bool) -> None:
    """No memory is written afterwards, and every grant is released or tracked as a lease."""
    peer = ScriptedPeer(late=frozenset(keys_of([2]))).hold(1, 2)
    async with peer.serving(), reading_from(peer, one_sided=one_sided) as backend:
        await connected(backend)
        for lag in (0, 7):
            for step in range(1, 200):
                items = blanks([1, 2])
                argument = items if method == "get" else keys_of([1, 2])
                cancelled = await cancelled_at(
                    step, partial(getattr(backend, method), argument), through=through, lag=lag
                )
                for _, view in items:
                    poison(view)
                await anyio.lowlevel.checkpoint()
                assert all(is_poisoned(view) for _, view in items)
                if not cancelled:
                    break
            else:
                pytest.fail("it never ended")
        items = blanks([1, 2])
        assert await backend.get(items) == [OK, OK]
        assert_intact(items)
        await until(lambda: not peer.open_chunks)


async def test_concurrent_gets_with_a_quarter_cancelled() -> None:
    async with trio() as peers, reading_from(*peers) as backend:
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
                assert_intact(batch)
            else:
                assert task.cancelled()
                assert all(is_poisoned(view) for _, view in batch)


async def test_late_lookup_reply_is_released(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvtier")
    async with ScriptedPeer().hold(1, 2).serving() as peer, reading_from(peer, timeout=1.0) as backend:
        await connected(backend)
        await until(lambda: peer.requests["Ping"] >= 2)
        peer.answering = anyio.Event()
        assert await backend.held_prefix(keys_of([1, 2])) == 0
        await until(lambda: peer.requests["Lookup"] == 1)  # The peer may be slower.
        peer.answering.set()
        await until(lambda: peer.requests["Release"] == 1)
        assert not peer.open_chunks
        assert not backend.status()[0]["granted_chunks"]
