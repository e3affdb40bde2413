"""Temporary peers, which the settings do not name: checkout, sharing, idle timeout, errors."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack

import anyio
import pytest
from anyio.lowlevel import checkpoint

from kvtier.backends.base import Outcome
from kvtier.errors import PeerError
from kvtier.peers.backend import PeersBackend, TemporaryPeer
from kvtier.peers.protocol import Granted, Lookup
from kvtier.rpc.frames import Message, Refused
from kvtier.testing.cancelling import Through, cancelled_at
from tests.rigs.open_files import sockets
from tests.rigs.scripted_peer import ScriptedPeer, reading_from
from tests.rigs.waiting import until

from .test_backend import assert_intact, blanks, connected, keys_of

pytestmark = pytest.mark.anyio

OK, MISS, FAILED = Outcome.OK, Outcome.MISS, Outcome.FAILED


def temporary_addresses(backend: PeersBackend) -> list[str]:
    """Return the addresses of the current temporary peers."""
    return [str(status["address"]) for status in backend.status() if status["temporary"]]


async def visit(backend: PeersBackend, address: str) -> None:
    """Connect to a peer, and use it no further."""
    async with backend.temporary_peer(address):
        pass


# Use.


async def test_promised_chunks_are_read_from_the_temporary_peer_only() -> None:
    other, named = ScriptedPeer("other").hold(*range(9)), ScriptedPeer("named").hold(1, 2, 5)
    async with (
        other.serving(),
        named.serving(),
        reading_from(other, unauthenticated=[named]) as backend,
    ):
        await connected(backend)
        async with backend.temporary_peer(named.address) as peer:
            assert peer.address == named.address
            assert await peer.lease(keys_of(range(9))) == [1, 2, 5], "no prefix"
            items = blanks([1, 2])
            assert await backend.get(items) == [OK, OK]
            assert_intact(items)
            named.chunks.clear()
            assert await backend.get(blanks([5])) == [MISS], (
                "another peer has it, but the chunk is bound to this one"
            )
            assert not other.reads
            assert not other.requests["Lookup"]
            assert temporary_addresses(backend) == [named.address]
            # A chunk that is not bound comes from any peer.
            assert await backend.get(blanks([4])) == [OK]
        await until(lambda: not named.open_chunks)
        assert await backend.get(blanks([5])) == [OK], "the binding ends with the checkout"
        assert other.reads.total() == 2


async def test_unread_leases_are_released_on_exit() -> None:
    named = ScriptedPeer().hold(*range(4))
    async with named.serving(), reading_from(unauthenticated=[named]) as backend:
        async with backend.temporary_peer(named.address) as peer:
            assert await peer.lease(keys_of(range(4))) == [0, 1, 2, 3]
            assert named.open_chunks == 4
        await until(lambda: not named.open_chunks)
        assert named.connections, "the connection stays open until the idle timeout"


async def test_configured_peer_is_reused() -> None:
    async with ScriptedPeer().hold(1).serving() as peer, reading_from(peer) as backend:
        # Right after the start: waits for the connection.
        async with (
            backend.temporary_peer(peer.address) as first,
            backend.temporary_peer(peer.address) as alias,
        ):
            assert await first.lease(keys_of([1])) == [0]
            assert await alias.lease(keys_of([1])) == [0]
        assert not temporary_addresses(backend)
        assert peer.requests["Hello"] == 1


async def test_temporary_peer_is_shared() -> None:
    async with ScriptedPeer().hold(1).serving() as peer, reading_from(unauthenticated=[peer]) as backend:
        async with AsyncExitStack() as stack:
            temporaries: list[TemporaryPeer] = []

            async def check_out() -> None:
                temporaries.append(await stack.enter_async_context(backend.temporary_peer(peer.address)))

            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(check_out)
            assert backend.status()[0]["users"] == 20
            assert [await temporary.lease(keys_of([1])) for temporary in temporaries] == [[0]] * 20
        assert backend.status()[0]["users"] == 0
        await visit(backend, peer.address)
        assert peer.requests["Hello"] == 1
        await until(lambda: not peer.open_chunks)


@pytest.mark.parametrize("configured", [True, False])
async def test_two_addresses_of_one_instance_share_a_connection(configured: bool) -> None:
    async with ScriptedPeer().hold(1).serving() as peer, AsyncExitStack() as stack:
        if configured:
            backend = await stack.enter_async_context(reading_from(peer))
            await connected(backend)
        else:
            backend = await stack.enter_async_context(reading_from(unauthenticated=[peer]))
            await stack.enter_async_context(backend.temporary_peer(peer.address))
        for _ in range(2):
            async with backend.temporary_peer(f"localhost:{peer.port}") as alias:
                assert await alias.lease(keys_of([1])) == [0]
                assert len(backend.clients) == 1
        await until(lambda: peer.connections == 1)
        assert peer.requests["Hello"] == 2


async def test_lost_configured_peer_reconnects_without_back_off_on_demand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.peers.client.Backoff.next", lambda _: 60.0)
    peer = ScriptedPeer().hold(1)
    async with peer.serving():
        pass
    async with reading_from(peer) as backend:
        await until(lambda: backend.status()[0]["state"] == "not connected")
        async with peer.serving(), backend.temporary_peer(peer.address) as named:
            assert await named.lease(keys_of([1])) == [0]


# Idle timeout and limit.


async def test_idle_temporary_peer_is_disconnected() -> None:
    peer = ScriptedPeer().hold(1)
    async with peer.serving(), reading_from(unauthenticated=[peer], idle=0.1) as backend:
        served = sockets()
        peer.may_read = anyio.Event()
        async with anyio.create_task_group() as tasks:
            async with backend.temporary_peer(peer.address) as named:
                await named.lease(keys_of([1]))
                await anyio.sleep(0.4)
                assert temporary_addresses(backend), "in use"
                tasks.start_soon(backend.get, blanks([1]))
                await peer.reading.wait()
            await anyio.sleep(0.4)
            assert temporary_addresses(backend), "read from"
            peer.may_read.set()
        await until(lambda: not temporary_addresses(backend))
        await until(lambda: sockets() == served)
        async with backend.temporary_peer(peer.address):
            assert temporary_addresses(backend)


async def test_least_recently_used_peer_is_disconnected_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.peers.roster.MAX_TEMPORARY_PEERS", 2)
    peers = [ScriptedPeer(str(number)) for number in range(4)]
    async with AsyncExitStack() as stack:
        for peer in peers:
            await stack.enter_async_context(peer.serving())
        backend = await stack.enter_async_context(reading_from(unauthenticated=peers))
        for number in (0, 1, 0):
            await visit(backend, peers[number].address)
        async with backend.temporary_peer(peers[2].address):
            assert set(temporary_addresses(backend)) == {peers[0].address, peers[2].address}
            await until(lambda: not peers[1].connections)
            async with backend.temporary_peer(peers[3].address):
                with pytest.raises(PeerError, match="all 2 temporary peer connections are in use"):
                    await visit(backend, peers[1].address)
                await visit(backend, peers[2].address)


# Unusable.


@pytest.mark.parametrize(
    "address",
    ["", "here", "here:", ":1", "a:b:1", "there:99999", "with a space:80", "x" * 9999, "\0:80", "é\n:1"],
)
async def test_invalid_address_is_refused(address: str) -> None:
    async with reading_from() as backend:
        with pytest.raises(PeerError):
            await visit(backend, address)
        assert not backend.clients


async def test_unreachable_peer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.peers.backend.CONNECT_SECONDS", 0.3)
    closed = ScriptedPeer()
    async with closed.serving():
        pass
    with socket.create_server(("127.0.0.1", 0)) as unresponsive:
        async with reading_from() as backend:
            with pytest.raises(PeerError, match=rf"{closed.address}: unreachable: Connection refused"):
                await visit(backend, closed.address)
            with pytest.raises(PeerError, match=r"no answer within 0.3 s"), anyio.fail_after(30):
                await visit(backend, f"127.0.0.1:{unresponsive.getsockname()[1]}")
            with pytest.raises(PeerError, match=r"unreachable|no answer"):
                await visit(backend, "no-such-host.invalid:1")


async def test_unsuitable_peer_is_refused() -> None:
    itself = ScriptedPeer("here")
    mismatched = ScriptedPeer(transport="another")
    refusing = ScriptedPeer(script=lambda _: [Refused("full up")])
    async with (
        itself.serving(),
        mismatched.serving(),
        refusing.serving(),
        reading_from(unauthenticated=[itself, mismatched, refusing]) as backend,
    ):
        for peer, reason in (
            (itself, "the address is that of this instance itself$"),
            (mismatched, "peer.transport is 'another' there and 'memory' here"),
            (refusing, "the peer refuses the connection: full up"),
        ):
            with pytest.raises(PeerError, match=f"^peer {peer.address}: {reason}"):
                await visit(backend, peer.address)
        await until(lambda: not temporary_addresses(backend))


async def test_temporary_peer_requires_open_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.peers.backend.CONNECT_SECONDS", 0.05)
    peer = ScriptedPeer()
    async with peer.serving(), reading_from(unauthenticated=[peer], opened=False) as backend:
        with pytest.raises(PeerError, match="closed"):
            await visit(backend, peer.address)
    with pytest.raises(PeerError, match="closed"):
        await visit(backend, peer.address)
    assert not peer.requests


# Errors during use.


async def test_temporary_peer_lost_during_read() -> None:
    peer = ScriptedPeer().hold(*range(4))
    async with reading_from(unauthenticated=[peer]) as backend:
        async with peer.serving():
            async with anyio.create_task_group() as tasks, backend.temporary_peer(peer.address) as named:
                await named.lease(keys_of(range(4)))
                peer.may_read = anyio.Event()
                outcomes: list[Outcome] = []

                async def get() -> None:
                    outcomes.extend(await backend.get(blanks([0, 1])))

                tasks.start_soon(get)
                await peer.reading.wait()
                peer.disconnect()
                await until(lambda: outcomes)
                assert outcomes == [FAILED, FAILED]
                assert await backend.get(blanks([2, 3])) == [MISS, MISS]
                with pytest.raises(PeerError, match=r"connection (was )?lost"):
                    await named.lease(keys_of([2]))
            peer.may_read.set()
            # The peer still serves: a new checkout succeeds.
            async with backend.temporary_peer(peer.address) as named:
                assert await named.lease(keys_of([2, 3])) == [0, 1]
                items = blanks([2, 3])
                assert await backend.get(items) == [OK, OK]
                assert_intact(items)
        await until(lambda: not temporary_addresses(backend))
        with pytest.raises(PeerError, match="unreachable"):
            await visit(backend, peer.address)


async def test_temporary_peer_does_not_answer() -> None:
    peer = ScriptedPeer().hold(1)
    async with (
        peer.serving(),
        reading_from(unauthenticated=[peer], deadline=0.5) as backend,
        backend.temporary_peer(peer.address) as named,
    ):
        peer.answering = anyio.Event()
        with pytest.raises(PeerError, match=f"peer {peer.address}: "), anyio.fail_after(30):
            await named.lease(keys_of([1]))
        peer.answering.set()
        await until(lambda: backend.clients[0].source is not None)
        assert await named.lease(keys_of([1])) == [0], "a peer with an unanswered request is used again"


async def test_temporary_peer_sends_invalid_grant() -> None:
    def reply_wrongly(message: Message) -> list[Message] | None:
        return [Granted(message.ticket, 1, [7], [0], [5000], 1)] if isinstance(message, Lookup) else None

    peer = ScriptedPeer(script=reply_wrongly)
    async with (
        peer.serving(),
        reading_from(unauthenticated=[peer]) as backend,
        backend.temporary_peer(peer.address) as named,
    ):
        with pytest.raises(PeerError):
            await named.lease(keys_of([1]))


async def test_backend_disconnects_while_temporary_peer_is_in_use() -> None:
    peer = ScriptedPeer().hold(1)
    async with (
        peer.serving(),
        reading_from(unauthenticated=[peer]) as backend,
        backend.temporary_peer(peer.address) as named,
    ):
        await backend.close()
        with pytest.raises(PeerError):
            await named.lease(keys_of([1]))


@pytest.mark.parametrize("through", ["scope", "task"])
async def test_cancelled_at_every_await_leaks_nothing(through: Through) -> None:
    peer = ScriptedPeer().hold(*range(3))

    async with peer.serving():
        step, cancelled = 0, True
        while cancelled:
            step += 1
            async with reading_from(unauthenticated=[peer]) as backend:

                async def fetch(backend: PeersBackend = backend) -> None:
                    async with backend.temporary_peer(peer.address) as named:
                        await named.lease(keys_of(range(3)))
                        await backend.get(blanks([0, 1]))

                await checkpoint()
                cancelled = await cancelled_at(step, fetch, through=through)
                await until(lambda: not peer.open_chunks)
                # The backend keeps working.
                async with backend.temporary_peer(peer.address) as named:
                    assert await named.lease(keys_of([0])) == [0]
                    assert backend.status()[0]["users"] == 1
        assert step > 3
