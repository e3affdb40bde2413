"""Peers that no settings name: borrowed, shared, asked alone, hung up on, and of no use at times."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack

import anyio
import pytest
from anyio.lowlevel import checkpoint

from kvtier.backends.base import Outcome
from kvtier.errors import PeerError
from kvtier.peers.backend import PeersBackend
from kvtier.peers.borrowed import BorrowedPeer
from kvtier.peers.protocol import Granted, LookUp, Refused
from kvtier.sockets.frames import Message
from kvtier.testing.cancelling import Through, cancelled_at

from .scripted import ScriptedPeer, reading_from, until
from .test_backend import assert_right, blanks, connected, keys_of
from .test_client import sockets

pytestmark = pytest.mark.anyio

OK, MISS, FAILED = Outcome.OK, Outcome.MISS, Outcome.FAILED


def borrowed(backend: PeersBackend) -> list[str]:
    """Where the peers are that are borrowed now."""
    return [str(status["address"]) for status in backend.status() if status["borrowed"]]


async def nothing_left(*peers: ScriptedPeer) -> None:
    """No connection, no promise, no link."""
    await until(lambda: not any(peer.connections or peer.open_chunks or peer.links for peer in peers))


# Used.


async def test_chunks_come_from_the_peer_that_is_named_and_from_no_other() -> None:
    other, named = ScriptedPeer("other").hold(*range(9)), ScriptedPeer("named").hold(1, 2, 5)
    async with (
        other.serving(),
        named.serving(),
        reading_from(other, strangers=[named]) as backend,
    ):
        await connected(backend)
        async with backend.borrow(named.address) as peer:
            assert (peer.address, peer.instance) == (named.address, "named")
            assert await peer.promise(keys_of(range(9))) == [1, 2, 5], "no prefix"
            items = blanks([1, 2])
            assert await backend.get(items) == [OK, OK]
            assert_right(items)
            named.chunks.clear()
            assert await backend.get(blanks([5])) == [MISS], (
                "another has it, but is not the one that is meant"
            )
            assert not other.reads
            assert not other.asked["LookUp"]
            assert borrowed(backend) == [named.address]
            # What nobody has bound to it comes from wherever it is.
            assert await backend.get(blanks([4])) == [OK]
        await until(lambda: not named.open_chunks)
        assert await backend.get(blanks([5])) == [OK], "nor is it bound any longer"
        assert other.reads.total() == 2
    await nothing_left(other, named)


async def test_what_was_promised_and_not_fetched_is_given_back_at_once() -> None:
    named = ScriptedPeer().hold(*range(4))
    async with named.serving(), reading_from(strangers=[named]) as backend:
        async with backend.borrow(named.address) as peer:
            assert await peer.promise(keys_of(range(4))) == [0, 1, 2, 3]
            assert named.open_chunks == 4
        await until(lambda: not named.open_chunks)
        assert named.connections, "it stays for a while"
        assert not backend._bound


async def test_a_peer_of_the_settings_is_shared() -> None:
    async with ScriptedPeer().hold(1).serving() as peer, reading_from(peer) as backend:
        # Right after the start: it is waited for.
        async with backend.borrow(peer.address) as one, backend.borrow(peer.address) as same:
            assert await one.promise(keys_of([1])) == [0]
            assert await same.promise(keys_of([1])) == [0]
        assert not borrowed(backend)
        assert peer.asked["Hello"] == 1


async def test_a_borrowed_peer_is_shared() -> None:
    async with ScriptedPeer().hold(1).serving() as peer, reading_from(strangers=[peer]) as backend:
        async with AsyncExitStack() as stack:
            many: list[BorrowedPeer] = []

            async def borrow() -> None:
                many.append(await stack.enter_async_context(backend.borrow(peer.address)))

            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(borrow)
            assert backend.status()[0]["users"] == 20
            assert [await one.promise(keys_of([1])) for one in many] == [[0]] * 20
        assert backend.status()[0]["users"] == 0
        async with backend.borrow(peer.address):
            pass
        assert peer.asked["Hello"] == 1
        await until(lambda: not peer.open_chunks)


@pytest.mark.parametrize("configured", [True, False])
async def test_one_connection_to_an_instance_that_goes_by_two_addresses(configured: bool) -> None:
    async with ScriptedPeer().hold(1).serving() as peer, AsyncExitStack() as stack:
        if configured:
            backend = await stack.enter_async_context(reading_from(peer))
            await connected(backend)
        else:
            backend = await stack.enter_async_context(reading_from(strangers=[peer]))
            await stack.enter_async_context(backend.borrow(peer.address))
        for _ in range(2):
            async with backend.borrow(f"localhost:{peer.port}") as same:
                assert await same.promise(keys_of([1])) == [0]
                assert len(backend.clients) == 1
        await until(lambda: peer.connections == 1)
        assert peer.asked["Hello"] == 2


async def test_a_peer_of_the_settings_that_is_lost_is_called_for_who_needs_it_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.peers.pauses.SHORTEST_PAUSE", 60.0)
    monkeypatch.setattr("kvtier.peers.client.GrowingPause.next", lambda _: 60.0)
    peer = ScriptedPeer().hold(1)
    async with peer.serving():
        pass
    async with reading_from(peer) as backend:
        await until(lambda: backend.status()[0]["state"] == "not connected")
        async with peer.serving(), backend.borrow(peer.address) as now:
            assert await now.promise(keys_of([1])) == [0]


# Hung up on.


async def test_who_is_not_used_any_longer_is_hung_up_on() -> None:
    before = sockets()
    peer = ScriptedPeer().hold(1)
    async with peer.serving(), reading_from(strangers=[peer], idle=0.1) as backend:
        served = sockets()
        peer.may_read = anyio.Event()
        async with anyio.create_task_group() as tasks:
            async with backend.borrow(peer.address) as named:
                await named.promise(keys_of([1]))
                await anyio.sleep(0.4)
                assert borrowed(backend), "in use"
                tasks.start_soon(backend.get, blanks([1]))
                await peer.reading.wait()
            await anyio.sleep(0.4)
            assert borrowed(backend), "read from"
            peer.may_read.set()
        await until(lambda: not borrowed(backend))
        await nothing_left(peer)
        await until(lambda: sockets() == served)
        async with backend.borrow(peer.address):
            assert borrowed(backend)
    await until(lambda: sockets() == before)


async def test_the_longest_unused_goes_where_there_are_too_many() -> None:
    peers = [ScriptedPeer(str(number)) for number in range(4)]
    async with AsyncExitStack() as stack:
        for peer in peers:
            await stack.enter_async_context(peer.serving())
        backend = await stack.enter_async_context(reading_from(strangers=peers))
        backend._roster._most = 2
        for number in (0, 1, 0):
            async with backend.borrow(peers[number].address):
                pass
        async with backend.borrow(peers[2].address):
            assert set(borrowed(backend)) == {peers[0].address, peers[2].address}
            await until(lambda: not peers[1].connections)
            async with backend.borrow(peers[3].address):
                with pytest.raises(PeerError, match="2 peers are borrowed and in use, which is the limit"):
                    async with backend.borrow(peers[1].address):
                        pass
                async with backend.borrow(peers[2].address):
                    pass
    await nothing_left(*peers)


# Of no use.


@pytest.mark.parametrize(
    "address",
    ["", "here", "here:", ":1", "a:b:1", "there:99999", "with a space:80", "x" * 9999, "\0:80", "é\n:1"],
)
async def test_what_is_no_address(address: str) -> None:
    async with reading_from() as backend:
        with pytest.raises(PeerError):
            async with backend.borrow(address):
                pass
        assert not backend.clients


async def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.peers.backend.CONNECT_SECONDS", 0.3)
    before = sockets()
    gone = ScriptedPeer()
    async with gone.serving():
        pass
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with reading_from() as backend:
            with pytest.raises(PeerError, match=rf"{gone.address}: it cannot be reached: Connection refused"):
                async with backend.borrow(gone.address):
                    pass
            with pytest.raises(PeerError, match=r"it has not answered within 0.3 s"), anyio.fail_after(30):
                async with backend.borrow(f"127.0.0.1:{mute.getsockname()[1]}"):
                    pass
            with pytest.raises(PeerError, match=r"cannot be reached|has not answered"):
                async with backend.borrow("no-such-host.invalid:1"):
                    pass
    await until(lambda: sockets() == before)


async def test_who_is_no_peer() -> None:
    itself = ScriptedPeer("here")
    stranger = ScriptedPeer(transport="another")
    refusing = ScriptedPeer(script=lambda _: [Refused("full up")])
    async with itself.serving(), stranger.serving(), refusing.serving(), reading_from() as backend:
        for peer, why in (
            (itself, "it is this very instance$"),
            (stranger, "peer.transport is 'another' there and 'memory' here"),
            (refusing, "it refuses: full up"),
        ):
            with pytest.raises(PeerError, match=f"^peer {peer.address}: {why}"):
                async with backend.borrow(peer.address):
                    pass
        await until(lambda: not borrowed(backend))
    await nothing_left(itself, stranger, refusing)


async def test_nobody_is_borrowed_before_the_start_and_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.peers.backend.CONNECT_SECONDS", 0.05)
    peer = ScriptedPeer()
    async with peer.serving(), reading_from(strangers=[peer], opened=False) as backend:
        with pytest.raises(PeerError, match="closed"):
            async with backend.borrow(peer.address):
                pass
    with pytest.raises(PeerError, match="closed"):
        async with backend.borrow(peer.address):
            pass
    assert not peer.asked


# Lost.


async def test_a_borrowed_peer_that_is_lost_in_mid_read() -> None:
    peer = ScriptedPeer().hold(*range(4))
    async with reading_from(strangers=[peer]) as backend:
        async with peer.serving():
            async with anyio.create_task_group() as tasks, backend.borrow(peer.address) as named:
                await named.promise(keys_of(range(4)))
                peer.may_read = anyio.Event()
                outcomes: list[Outcome] = []

                async def get() -> None:
                    outcomes.extend(await backend.get(blanks([0, 1])))

                tasks.start_soon(get)
                await peer.reading.wait()
                peer.hang_up()
                await until(lambda: outcomes)
                assert outcomes == [FAILED, FAILED]
                assert await backend.get(blanks([2, 3])) == [MISS, MISS]
                with pytest.raises(PeerError, match="the connection was lost"):
                    await named.promise(keys_of([2]))
                assert not backend._bound.keys() - set(keys_of(range(4)))
            peer.may_read.set()
            assert not backend._bound
            # It is there: whoever wants it anew gets it.
            async with backend.borrow(peer.address) as named:
                assert await named.promise(keys_of([2, 3])) == [0, 1]
                items = blanks([2, 3])
                assert await backend.get(items) == [OK, OK]
                assert_right(items)
        await until(lambda: not borrowed(backend))
        with pytest.raises(PeerError, match="cannot be reached"):
            async with backend.borrow(peer.address):
                pass
    await nothing_left(peer)


async def test_a_borrowed_peer_that_does_not_answer() -> None:
    peer = ScriptedPeer().hold(1)
    async with (
        peer.serving(),
        reading_from(strangers=[peer], deadline=0.5) as backend,
        backend.borrow(peer.address) as named,
    ):
        peer.answering = anyio.Event()
        with pytest.raises(PeerError, match=f"peer {peer.address}: "), anyio.fail_after(30):
            await named.promise(keys_of([1]))
        peer.answering.set()
        await until(lambda: backend.clients[0].source is not None)
        assert await named.promise(keys_of([1])) == [0], "asked again though it has left one unanswered"


async def test_a_borrowed_peer_that_lies() -> None:
    def lie(message: Message) -> list[Message] | None:
        return [Granted(message.ticket, 1, [7], [0], [5000], 1)] if isinstance(message, LookUp) else None

    peer = ScriptedPeer(script=lie)
    async with (
        peer.serving(),
        reading_from(strangers=[peer]) as backend,
        backend.borrow(peer.address) as named,
    ):
        with pytest.raises(PeerError):
            await named.promise(keys_of([1]))
        assert not backend._bound
    await nothing_left(peer)


async def test_the_way_to_peers_is_closed_while_one_is_used() -> None:
    peer = ScriptedPeer().hold(1)
    before = sockets()
    async with (
        peer.serving(),
        reading_from(strangers=[peer]) as backend,
        backend.borrow(peer.address) as named,
    ):
        await backend.disconnect()
        with pytest.raises(PeerError):
            await named.promise(keys_of([1]))
    await nothing_left(peer)
    await until(lambda: sockets() == before)


@pytest.mark.parametrize("through", ["scope", "task"])
async def test_cancelled_anywhere_nothing_is_left(through: Through) -> None:
    before = sockets()
    peer = ScriptedPeer().hold(*range(3))

    async with peer.serving():
        step, cancelled = 0, True
        while cancelled:
            step += 1
            async with reading_from(strangers=[peer]) as backend:

                async def fetch(backend: PeersBackend = backend) -> None:
                    async with backend.borrow(peer.address) as named:
                        await named.promise(keys_of(range(3)))
                        await backend.get(blanks([0, 1]))

                await checkpoint()
                cancelled = await cancelled_at(step, fetch, through=through)
                assert not backend._bound
                await until(lambda: not peer.open_chunks)
                # And it goes on as if nothing had been.
                async with backend.borrow(peer.address) as named:
                    assert await named.promise(keys_of([0])) == [0]
                    assert backend.status()[0]["users"] == 1
            await nothing_left(peer)
        assert step > 3
    await until(lambda: sockets() == before)
