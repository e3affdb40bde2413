"""One peer that is lost, paused, replaced, misconfigured or faulty: logged once, skipped, and reconnected."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from kvtier.backends.base import Outcome
from kvtier.concurrency.breaker import Backoff
from kvtier.concurrency.sockets.connection import Deadline
from kvtier.concurrency.threads import WorkerThreads
from kvtier.peers.backend import PeersBackend
from kvtier.peers.dialing import ControlConnection, PeerDialer
from kvtier.peers.protocol import (
    NO_GRANT,
    VERSION,
    Contained,
    Contains,
    Granted,
    Hello,
    Lookup,
    Readable,
    Released,
    Welcome,
)
from kvtier.rpc.authentication import Credentials
from kvtier.rpc.frames import Message, Ping, Pong, Refused
from kvtier.settings.peer import PeerSettings
from kvtier.testing.cancelling import Through, cancelled_at
from tests.rigs.certificates import Authority
from tests.rigs.open_files import sockets
from tests.rigs.scripted_peer import NoAuthentication, ScriptedPeer, reading_from
from tests.rigs.waiting import until

from .test_backend import assert_intact, blanks, connected, keys_of

pytestmark = pytest.mark.anyio

OK, MISS, FAILED = Outcome.OK, Outcome.MISS, Outcome.FAILED
HUGE = 1 << 63


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Log messages at INFO and above, without the address of the peer."""
    caplog.set_level(logging.INFO, "kvtier")
    return lambda: [record.getMessage().partition(": ")[2] for record in caplog.records]


@pytest.fixture(autouse=True)
def _short_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.peers.client.Backoff", partial(Backoff, shortest=0.02))


def state(backend: PeersBackend) -> object:
    return backend.status()[0]["state"]


# Reconnection.


async def test_peer_that_starts_later_is_connected(log_lines: Callable[[], list[str]]) -> None:
    peer = ScriptedPeer().hold(1)
    async with peer.serving():
        pass
    async with reading_from(peer) as backend:
        await until(lambda: state(backend) == "not connected")
        assert await backend.held_prefix(keys_of([1])) == 0
        async with peer.serving():
            await connected(backend)
            assert await backend.get(blanks([1])) == [OK]
            await until(lambda: len(log_lines()) == 2)
    assert log_lines() == ["unreachable: Connection refused; continuing without it", "answers again"]


async def test_restarted_peer_is_reconnected(log_lines: Callable[[], list[str]]) -> None:
    peer = ScriptedPeer(instance="first life").hold(1, 2)
    async with peer.serving():
        pass
    async with reading_from(peer) as backend:
        async with peer.serving():
            await connected(backend)
            assert await backend.held_prefix(keys_of([1, 2])) == 2
            assert backend.status()[0]["instance"] == "first life"
        await until(lambda: state(backend) == "not connected")
        assert not backend.status()[0]["granted_chunks"], "leases of the previous process"
        assert await backend.get(blanks([1])) == [MISS]
        peer.instance = "second life"
        async with peer.serving():
            await connected(backend)
            items = blanks([1, 2])
            assert await backend.get(items) == [OK, OK]
            assert_intact(items)
            assert backend.status()[0]["instance"] == "second life"


async def test_lost_peer_delays_no_lookup() -> None:
    peer = ScriptedPeer().hold(1)
    async with peer.serving():
        pass
    async with reading_from(peer, timeout=60.0) as backend:
        await until(lambda: state(backend) == "not connected")
        with anyio.fail_after(30):
            for _ in range(100):
                assert await backend.held_prefix(keys_of([1])) == 0


async def test_refused_connection_is_retried_and_logged_once(log_lines: Callable[[], list[str]]) -> None:
    peer = ScriptedPeer(script=lambda message: [Refused("full up\nand \x1b[31mred " + "x" * 10_000)])
    async with peer.serving(), reading_from(peer) as backend:
        await until(lambda: state(backend) == "not connected")
        assert await backend.get(blanks([1])) == [MISS]
        await until(lambda: peer.requests["Hello"] >= 3)
    assert len(log_lines()) == 1, "logged once"
    assert log_lines()[0].startswith("the peer refuses the connection: full up?and ?[31mred xxx")
    assert len(log_lines()[0]) < 400


# Identity.


async def test_own_instance_is_skipped(log_lines: Callable[[], list[str]]) -> None:
    other = ScriptedPeer("other").hold(1)
    peer = ScriptedPeer("here").hold(1)
    async with peer.serving(), other.serving(), reading_from(peer, other) as backend:
        await connected(backend, 1)
        assert await backend.get(blanks([1])) == [OK]
        await until(lambda: peer.requests["Hello"] >= 3)
        assert not peer.requests["Lookup"]
    assert [line for line in log_lines() if "this instance itself" in line] == [
        "the address is that of this instance itself: remove it from peer.others; continuing without it"
    ]


async def test_transport_mismatch_is_reported(log_lines: Callable[[], list[str]]) -> None:
    peer = ScriptedPeer(transport="nixl").hold(1)
    async with peer.serving(), reading_from(peer) as backend:
        await until(lambda: peer.requests["Hello"] >= 3)
        assert await backend.held_prefix(keys_of([1])) == 0
        assert backend.status()[0]["last_error"] == (
            "peer.transport is 'nixl' there and 'memory' here: set the same on both sides"
        )
        assert len(log_lines()) == 1
        peer.transport = "memory"
        await connected(backend)
        assert await backend.get(blanks([1])) == [OK]


@pytest.mark.parametrize(
    "greeting",
    [
        Welcome(VERSION + 1, "there", "memory", b"there", 10.0),
        Welcome(VERSION, "there", "memory", b"there", float("nan")),
        Welcome(VERSION, "there", "memory", b"there", -1.0),
        Welcome(VERSION, "there", "memory", b"there", float("inf")),
        Pong(1),
        b"\xff\xff\xff\xff",
        b"\x04\0\0\0\xc1\xc1\xc1\xc1",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
    ids=["version", "nan", "negative", "endless", "pong", "length", "no message", "http"],
)
async def test_invalid_welcome_is_a_miss_and_logged_once(
    greeting: Message | bytes, log_lines: Callable[[], list[str]]
) -> None:
    peer = ScriptedPeer(script=lambda message: [greeting]).hold(1)
    async with peer.serving(), reading_from(peer) as backend:
        await until(lambda: peer.requests["Hello"] >= 3)
        assert await backend.get(blanks([1])) == [MISS]
    assert len(log_lines()) == 1, log_lines()


async def test_data_connection_requires_the_same_process() -> None:
    peer = ScriptedPeer(instance="first life")
    async with peer.serving():
        dialer = PeerDialer("127.0.0.1", peer.port, NoAuthentication(), "here", WorkerThreads(1))  # type: ignore[arg-type]
        connection = await dialer.dial()

        def dial() -> None:
            dialer.dial_data(connection, Deadline(10)).close()

        try:
            await anyio.to_thread.run_sync(dial)
            peer.instance = "second life"
            with pytest.raises(ConnectionError, match="another process"):
                await anyio.to_thread.run_sync(dial)
            peer.script = lambda message: [Refused("too many")]
            with pytest.raises(ConnectionError, match="the peer refuses the connection: too many"):
                await anyio.to_thread.run_sync(dial)
        finally:
            connection.sock.close()
    with pytest.raises(OSError, match=r".+"):
        await anyio.to_thread.run_sync(dial)


@pytest.mark.parametrize("through", ["scope", "task"])
async def test_dial_cancelled_at_every_await(through: Through) -> None:
    before = sockets()
    peer = ScriptedPeer()
    async with peer.serving():
        dialer = PeerDialer("localhost", peer.port, NoAuthentication(), "here", WorkerThreads(1))  # type: ignore[arg-type]
        for lag in (0, 5):
            for step in itertools.count(1):
                connections: list[ControlConnection] = []

                async def dial(connections: list[ControlConnection] = connections) -> None:
                    connections.append(await dialer.dial())

                cancelled = await cancelled_at(step, dial, through=through, lag=lag)
                assert cancelled is not bool(connections)
                for connection in connections:
                    connection.sock.close()
                if not cancelled:
                    break
        await until(lambda: not peer.connections)
    assert sockets() == before


def credentials_of(secret: str) -> Credentials:
    return Credentials.from_settings(PeerSettings(secret=secret))  # type: ignore[arg-type]


async def test_shared_secret_connects() -> None:
    peer = ScriptedPeer(credentials=credentials_of("what both of them know")).hold(1)
    async with (
        peer.serving(),
        reading_from(peer, credentials=credentials_of("what both of them know")) as backend,
    ):
        await connected(backend)
        assert await backend.get(blanks([1])) == [OK]


async def test_certificates_connect(tmp_path: Path) -> None:
    """Requests and replies of many TLS records, in both directions at once."""
    authority = Authority(tmp_path, "authority")
    ours, theirs = (
        Credentials.from_settings(PeerSettings.model_validate({"tls": authority.sign(name)}))
        for name in ("ours", "theirs")
    )
    peer = ScriptedPeer(credentials=theirs).hold(0, 1, 2)
    async with peer.serving(), reading_from(peer, credentials=ours) as backend:
        await connected(backend)
        keys = keys_of(range(10_000))
        held: list[int] = []

        async def contains() -> None:
            held.append(sum(await backend.contains(keys)))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(contains)
        assert held == [3] * 8
        items = blanks([1, 2])
        assert await backend.get(items) == [OK, OK]
        assert_intact(items)


async def test_wrong_secret_is_logged_once(log_lines: Callable[[], list[str]]) -> None:
    peer = ScriptedPeer(credentials=credentials_of("what one of them knows")).hold(1)
    async with (
        peer.serving(),
        reading_from(peer, credentials=credentials_of("and what the other knows")) as backend,
    ):
        await until(lambda: state(backend) == "not connected")
        for _ in range(3):
            assert await backend.held_prefix(keys_of([1])) == 0
            assert await backend.get(blanks([1])) == [MISS]
        await until(lambda: peer.requests["connections"] >= 3)
        assert not peer.requests["Hello"]
    assert len(log_lines()) == 1, log_lines()
    assert "secret" in log_lines()[0]
    assert "knows" not in log_lines()[0]


# Invalid replies.


def _fields(message: Message) -> list[object]:
    return [getattr(message, name) for name in message.__struct_fields__]


INVALID_REPLIES = {
    "another ticket": (Lookup, Granted(987654, 1, [0], [0], [5000], 1)),
    "another kind": (Lookup, Contained(0, [True])),
    "a position out of range": (Lookup, Granted(0, 1, [2], [0], [5000], 1)),
    "a negative position": (Lookup, Granted(0, 1, [-1], [0], [5000], 1)),
    "a position twice": (Lookup, Granted(0, 1, [0, 0], [0, 0], [5000, 5000], 2)),
    "a prefix with a gap": (Lookup, Granted(0, 1, [1], [0], [5000], 1)),
    "more positions than offsets": (Lookup, Granted(0, 1, [0, 1], [0], [5000, 5000], 1)),
    "fewer lengths": (Lookup, Granted(0, 1, [0, 1], [0, 0], [5000], 1)),
    "a length of 2^63": (Lookup, Granted(0, 1, [0], [0], [HUGE], 1)),
    "a length of none": (Lookup, Granted(0, 1, [0], [0], [0], 1)),
    "a negative length": (Lookup, Granted(0, 1, [0], [0], [-5000], 1)),
    "an offset of 2^63": (Lookup, Granted(0, 1, [0], [HUGE], [5000], 1)),
    "an end beyond 2^63": (Lookup, Granted(0, 1, [0], [HUGE - 4000], [5000], 1)),
    "a negative offset": (Lookup, Granted(0, 1, [0], [-4096], [5000], 1)),
    "no grant": (Lookup, Granted(0, NO_GRANT, [0], [0], [5000], 1)),
    "a grant of 2^63": (Lookup, Granted(0, HUGE, [0], [0], [5000], 1)),
    "more ready than there are": (Lookup, Granted(0, 1, [0], [0], [5000], 2)),
    "fewer ready than none": (Lookup, Granted(0, 1, [0], [0], [5000], -1)),
    "too many answers": (Contains, Contained(0, [True, True, True])),
    "too few answers": (Contains, Contained(0, [True])),
    "a welcome in between": (Lookup, Welcome(VERSION, "there", "memory", b"", 1.0)),
    "a refusal in between": (Lookup, Refused("no more")),
    "no frame": (Lookup, b"\xff\xff\xff\xff"),
    "no message": (Lookup, b"\x04\0\0\0\xc1\xc1\xc1\xc1"),
    "MessagePack of another type": (Lookup, b"\x05\0\0\0\x94\x0b\x01\xc0\xc0"),
    "trailing bytes": (Lookup, b"\x03\0\0\0\x01\x02\x03"),
}


@pytest.mark.parametrize("name", INVALID_REPLIES)
async def test_invalid_reply_closes_connection(name: str, log_lines: Callable[[], list[str]]) -> None:
    """The lookup misses, and the client reconnects."""
    kind, reply = INVALID_REPLIES[name]
    peer = ScriptedPeer().hold(1, 2)
    async with peer.serving(), reading_from(peer) as backend:
        await connected(backend)
        peer.script = _reply_with(kind, reply)
        assert await backend.contains(keys_of([1, 2])) == [kind is Lookup] * 2
        if kind is Lookup:
            assert await backend.held_prefix(keys_of([1, 2])) == 0
        await until(lambda: backend.status()[0]["last_error"])
        peer.script = lambda _: None
        await connected(backend)
        assert await backend.get(blanks([1, 2])) == [OK, OK]
    assert [line.endswith("continuing without it") for line in log_lines()].count(True) == 1


def _reply_with(
    kind: type[Message], reply: Message | bytes
) -> Callable[[Message], Sequence[Message | bytes] | None]:
    def script(message: Message) -> Sequence[Message | bytes] | None:
        if not isinstance(message, kind):
            return None
        if isinstance(reply, bytes | Welcome | Refused) or reply.ticket:  # type: ignore[attr-defined]
            return [reply]
        return [type(reply)(message.ticket, *_fields(reply)[1:])]  # type: ignore[attr-defined]

    return script


@pytest.mark.parametrize("reply", [Readable(0, []), Readable(0, [True, True]), Released(0, True)])
async def test_invalid_readable_reply_fails_the_read(reply: Message) -> None:
    peer = ScriptedPeer(late=frozenset(keys_of([1]))).hold(1)
    async with peer.serving(), reading_from(peer) as backend:
        await connected(backend)
        peer.script = lambda message: (
            [type(reply)(message.ticket, *_fields(reply)[1:])] if type(message).__name__ == "Await" else None
        )
        with anyio.fail_after(30):
            assert await backend.get(blanks([1])) == [FAILED]


async def test_out_of_range_offset_is_a_miss() -> None:
    peer = ScriptedPeer().hold(1)
    async with peer.serving(), reading_from(peer) as backend:
        await connected(backend)
        peer.script = _reply_with(Lookup, Granted(0, 1, [0], [HUGE - 5001], [5000], 1))
        assert await backend.get(blanks([1])) == [MISS]
        assert state(backend) == "connected"


# Unresponsive peers.


async def test_peer_that_ignores_lookups_is_paused(log_lines: Callable[[], list[str]]) -> None:
    """Even though it answers pings."""
    peer = ScriptedPeer().hold(1)
    peer.script = lambda message: () if isinstance(message, Lookup) else None
    async with peer.serving(), reading_from(peer, timeout=0.05, deadline=1.0) as backend:
        await connected(backend)

        async def paused() -> None:
            while state(backend) != "paused: does not answer lookups":
                assert await backend.held_prefix(keys_of([1])) == 0
                await anyio.sleep(0.01)

        with anyio.fail_after(30):
            await paused()
        assert peer.requests["Lookup"] == 3
        assert await backend.held_prefix(keys_of([1])) == 0
        assert peer.requests["Lookup"] == 3, "lookup sent while the peer is paused"
        peer.script = lambda _: None
        await connected(backend)
        await until(lambda: len(log_lines()) == 2)
    assert log_lines() == ["does not answer lookups; continuing without it", "answers again"]


async def test_unresponsive_peer_delays_only_the_first_lookup() -> None:
    peer = ScriptedPeer().hold(1)
    async with peer.serving(), reading_from(peer, timeout=10.0) as backend:
        await connected(backend)
        await until(lambda: peer.requests["Ping"] >= 2)
        peer.script = lambda message: ()
        assert await backend.held_prefix(keys_of([1])) == 0
        with anyio.fail_after(9.0):
            assert await backend.held_prefix(keys_of([1])) == 0
            assert await backend.contains(keys_of([1])) == [False]
            assert await backend.get(blanks([1])) == [MISS]
        peer.script = lambda _: None
        peer.disconnect()
        await until(lambda: peer.requests["Hello"] >= 2)
        await connected(backend)
        assert await backend.get(blanks([1])) == [OK]


async def test_peer_with_failing_reads_is_paused(log_lines: Callable[[], list[str]]) -> None:
    peer = ScriptedPeer(read_outcome=FAILED).hold(1)
    async with peer.serving(), reading_from(peer) as backend:
        await connected(backend)
        for _ in range(3):
            assert await backend.get(blanks([1])) == [FAILED]
        assert state(backend) == "paused: fails to serve reads"
        assert await backend.get(blanks([1])) == [MISS]
        peer.read_outcome = None
        await connected(backend)
        assert await backend.get(blanks([1])) == [OK]
        await until(lambda: not peer.open_chunks and len(log_lines()) == 2)
    assert log_lines() == ["fails to serve reads; continuing without it", "answers again"]


async def test_unresponsive_peer_is_disconnected(
    log_lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a network partition: only a new connection recovers."""
    monkeypatch.setattr("kvtier.peers.source.DISCONNECT_SECONDS", 1.0)
    peer = ScriptedPeer().hold(1)
    async with peer.serving(), reading_from(peer, deadline=2.0) as backend:
        await connected(backend)
        peer.script = lambda message: None if isinstance(message, Hello) else ()
        await until(lambda: state(backend) == "does not answer")
        assert await backend.get(blanks([1])) == [MISS], "without delay"
        await until(lambda: peer.requests["Hello"] >= 2)
        peer.script = lambda _: None
        await connected(backend)
        assert await backend.get(blanks([1])) == [OK]
        # On a busy machine it may have reconnected more than once.
        await until(lambda: peer.connections == 1 and log_lines()[-1] == "answers again")
    assert log_lines()[0] == "does not answer; continuing without it"


async def test_get_does_not_wait_for_released() -> None:
    peer = ScriptedPeer().hold(*range(20))
    async with peer.serving(), reading_from(peer) as backend:
        assert await backend.held_prefix(keys_of(range(20))) == 20
        peer.script = lambda message: () if type(message).__name__ == "Release" else None
        for number in range(20):
            assert await backend.get(blanks([number])) == [OK]


async def test_flooding_peer_is_disconnected() -> None:
    """Endless unsolicited pongs: the event loop keeps running, and the connection is closed."""
    peer = ScriptedPeer().hold(1)
    async with peer.serving(), reading_from(peer) as backend:
        await connected(backend)
        peer.script = lambda message: [Pong(77)] * 10_000 if isinstance(message, Ping) else None
        await until(lambda: peer.requests["Hello"] >= 2)
        peer.script = lambda _: None
        await connected(backend)
