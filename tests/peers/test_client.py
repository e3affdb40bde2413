"""One peer that is lost, paused, replaced, mistaken or lying: told once, asked no more, and found again."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial

import anyio
import anyio.to_thread
import pytest

from kvtier.backends.base import Outcome
from kvtier.peers.authentication import Credentials
from kvtier.peers.backend import PeersBackend
from kvtier.peers.dialling import Called, Caller
from kvtier.peers.pauses import GrowingPause
from kvtier.peers.protocol import (
    NO_GRANT,
    VERSION,
    Contained,
    Contains,
    Granted,
    Hello,
    LookUp,
    Ping,
    Pong,
    Readable,
    Refused,
    Released,
    Welcome,
)
from kvtier.settings_peer import PeerSettings
from kvtier.sockets.connection import Deadline
from kvtier.sockets.frames import Message
from kvtier.testing.cancelling import Through, cancelled_at
from kvtier.threads import WorkerThreads
from tests.open_files import open_files

from .scripted import OpenDoor, ScriptedPeer, reading_from, until
from .test_backend import assert_right, blanks, connected, keys_of

pytestmark = pytest.mark.anyio

OK, MISS, FAILED = Outcome.OK, Outcome.MISS, Outcome.FAILED
HUGE = 1 << 63


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged at INFO and above, but for the peer's address."""
    caplog.set_level(logging.INFO, "kvtier")
    return lambda: [record.getMessage().partition(": ")[2] for record in caplog.records]


@pytest.fixture(autouse=True)
def _call_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.peers.client.GrowingPause", partial(GrowingPause, shortest=0.02))


def sockets() -> int:
    return sum(" socket:" in file for file in open_files())


def state(backend: PeersBackend) -> object:
    return backend.status()[0]["state"]


# Lost and found.


async def test_a_peer_that_comes_later_is_found_by_itself(told: Callable[[], list[str]]) -> None:
    peer = ScriptedPeer().hold(1)
    async with peer.serving():
        pass
    async with reading_from(peer) as backend:
        await until(lambda: state(backend) == "not connected")
        assert await backend.held_prefix(keys_of([1])) == 0
        async with peer.serving():
            await connected(backend)
            assert await backend.get(blanks([1])) == [OK]
            await until(lambda: len(told()) == 2)
    assert told() == ["it cannot be reached: Connection refused; going on without it", "answers again"]


async def test_a_peer_that_is_restarted_is_found_by_itself(told: Callable[[], list[str]]) -> None:
    before = sockets()
    peer = ScriptedPeer(instance="first life").hold(1, 2)
    async with peer.serving():
        pass
    async with reading_from(peer) as backend:
        async with peer.serving():
            await connected(backend)
            assert await backend.held_prefix(keys_of([1, 2])) == 2
            assert backend.status()[0]["instance"] == "first life"
        await until(lambda: state(backend) == "not connected")
        assert not backend.status()[0]["promises"], "promised by a process that is gone"
        assert await backend.get(blanks([1])) == [MISS]
        peer.instance = "second life"
        async with peer.serving():
            await connected(backend)
            items = blanks([1, 2])
            assert await backend.get(items) == [OK, OK]
            assert_right(items)
            assert backend.status()[0]["instance"] == "second life"
    await until(lambda: sockets() == before)


async def test_nobody_waits_for_a_peer_that_is_lost() -> None:
    peer = ScriptedPeer().hold(1)
    async with peer.serving():
        pass
    async with reading_from(peer, patience=60.0) as backend:
        await until(lambda: state(backend) == "not connected")
        with anyio.fail_after(30):
            for _ in range(100):
                assert await backend.held_prefix(keys_of([1])) == 0


async def test_a_connection_that_is_refused_ends_nothing(told: Callable[[], list[str]]) -> None:
    peer = ScriptedPeer(script=lambda message: [Refused("full up\nand \x1b[31mred " + "x" * 10_000)])
    async with peer.serving(), reading_from(peer) as backend:
        await until(lambda: state(backend) == "not connected")
        assert await backend.get(blanks([1])) == [MISS]
        await until(lambda: peer.asked["Hello"] >= 3)
    assert len(told()) == 1, "said once"
    assert told()[0].startswith("it refuses: full up?and ?[31mred xxx")
    assert len(told()[0]) < 400


# Who it is.


async def test_this_very_instance_is_left_out(told: Callable[[], list[str]]) -> None:
    other = ScriptedPeer("other").hold(1)
    peer = ScriptedPeer("here").hold(1)
    async with peer.serving(), other.serving(), reading_from(peer, other) as backend:
        await connected(backend, 1)
        assert await backend.get(blanks([1])) == [OK]
        await until(lambda: peer.asked["Hello"] >= 3)
        assert not peer.asked["LookUp"]
    assert [line for line in told() if "very instance" in line] == [
        "it is this very instance: leave it out of peer.others; going on without it"
    ]


async def test_another_transport_is_said_in_words(told: Callable[[], list[str]]) -> None:
    peer = ScriptedPeer(transport="nixl").hold(1)
    async with peer.serving(), reading_from(peer) as backend:
        await until(lambda: peer.asked["Hello"] >= 3)
        assert await backend.held_prefix(keys_of([1])) == 0
        assert backend.status()[0]["last_error"] == (
            "peer.transport is 'nixl' there and 'memory' here: write the same on both sides"
        )
        assert len(told()) == 1
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
async def test_a_greeting_that_cannot_be(greeting: Message | bytes, told: Callable[[], list[str]]) -> None:
    before = sockets()
    peer = ScriptedPeer(script=lambda message: [greeting]).hold(1)
    async with peer.serving(), reading_from(peer) as backend:
        await until(lambda: peer.asked["Hello"] >= 3)
        assert await backend.get(blanks([1])) == [MISS]
    assert len(told()) == 1, told()
    await until(lambda: sockets() == before)


async def test_a_data_connection_leads_to_the_same_process_or_nowhere() -> None:
    peer = ScriptedPeer(instance="first life")
    async with peer.serving():
        caller = Caller("127.0.0.1", peer.port, OpenDoor(), "here", WorkerThreads(1))  # type: ignore[arg-type]
        called = await caller.call()

        def dial() -> None:
            caller.dial_like(called, Deadline(10)).close()

        try:
            await anyio.to_thread.run_sync(dial)
            peer.instance = "second life"
            with pytest.raises(ConnectionError, match="another process"):
                await anyio.to_thread.run_sync(dial)
            peer.script = lambda message: [Refused("too many")]
            with pytest.raises(ConnectionError, match="it refuses: too many"):
                await anyio.to_thread.run_sync(dial)
        finally:
            called.connected.close()
    with pytest.raises(OSError, match=r".+"):
        await anyio.to_thread.run_sync(dial)


@pytest.mark.parametrize("through", ["scope", "task"])
async def test_calling_is_cancelled_at_every_await(through: Through) -> None:
    before = sockets()
    peer = ScriptedPeer()
    async with peer.serving():
        caller = Caller("localhost", peer.port, OpenDoor(), "here", WorkerThreads(1))  # type: ignore[arg-type]
        for lag in (0, 5):
            for step in itertools.count(1):
                answered: list[Called] = []

                async def call(answered: list[Called] = answered) -> None:
                    answered.append(await caller.call())

                cancelled = await cancelled_at(step, call, through=through, lag=lag)
                assert cancelled is not bool(answered)
                for called in answered:
                    called.connected.close()
                if not cancelled:
                    break
        await until(lambda: not peer.connections)
    assert sockets() == before


def knowing(secret: str) -> Credentials:
    return Credentials.of(PeerSettings(secret=secret))  # type: ignore[arg-type]


async def test_who_knows_the_secret_is_served() -> None:
    peer = ScriptedPeer(credentials=knowing("what both of them know")).hold(1)
    async with (
        peer.serving(),
        reading_from(peer, credentials=knowing("what both of them know")) as backend,
    ):
        await connected(backend)
        assert await backend.get(blanks([1])) == [OK]


async def test_the_wrong_secret_is_said_once(told: Callable[[], list[str]]) -> None:
    before = sockets()
    peer = ScriptedPeer(credentials=knowing("what one of them knows")).hold(1)
    async with (
        peer.serving(),
        reading_from(peer, credentials=knowing("and what the other knows")) as backend,
    ):
        await until(lambda: state(backend) == "not connected")
        for _ in range(3):
            assert await backend.held_prefix(keys_of([1])) == 0
            assert await backend.get(blanks([1])) == [MISS]
        await until(lambda: peer.asked["connections"] >= 3)
        assert not peer.asked["Hello"]
    assert len(told()) == 1, told()
    assert "secret" in told()[0]
    assert "knows" not in told()[0]
    await until(lambda: sockets() == before)


# What it says.


def _listed(message: Message) -> list[object]:
    return [getattr(message, name) for name in message.__struct_fields__]


LIES = {
    "another ticket": (LookUp, Granted(987654, 1, [0], [0], [5000], 1)),
    "another kind": (LookUp, Contained(0, [True])),
    "a position out of range": (LookUp, Granted(0, 1, [2], [0], [5000], 1)),
    "a negative position": (LookUp, Granted(0, 1, [-1], [0], [5000], 1)),
    "a position twice": (LookUp, Granted(0, 1, [0, 0], [0, 0], [5000, 5000], 2)),
    "a prefix with a gap": (LookUp, Granted(0, 1, [1], [0], [5000], 1)),
    "more positions than offsets": (LookUp, Granted(0, 1, [0, 1], [0], [5000, 5000], 1)),
    "fewer lengths": (LookUp, Granted(0, 1, [0, 1], [0, 0], [5000], 1)),
    "a length of 2^63": (LookUp, Granted(0, 1, [0], [0], [HUGE], 1)),
    "a length of none": (LookUp, Granted(0, 1, [0], [0], [0], 1)),
    "a negative length": (LookUp, Granted(0, 1, [0], [0], [-5000], 1)),
    "an offset of 2^63": (LookUp, Granted(0, 1, [0], [HUGE], [5000], 1)),
    "an end beyond 2^63": (LookUp, Granted(0, 1, [0], [HUGE - 4000], [5000], 1)),
    "a negative offset": (LookUp, Granted(0, 1, [0], [-4096], [5000], 1)),
    "no grant": (LookUp, Granted(0, NO_GRANT, [0], [0], [5000], 1)),
    "a grant of 2^63": (LookUp, Granted(0, HUGE, [0], [0], [5000], 1)),
    "more ready than there are": (LookUp, Granted(0, 1, [0], [0], [5000], 2)),
    "fewer ready than none": (LookUp, Granted(0, 1, [0], [0], [5000], -1)),
    "too many answers": (Contains, Contained(0, [True, True, True])),
    "too few answers": (Contains, Contained(0, [True])),
    "a welcome in between": (LookUp, Welcome(VERSION, "there", "memory", b"", 1.0)),
    "a refusal in between": (LookUp, Refused("no more")),
    "no frame": (LookUp, b"\xff\xff\xff\xff"),
    "no message": (LookUp, b"\x04\0\0\0\xc1\xc1\xc1\xc1"),
    "no MessagePack of ours": (LookUp, b"\x05\0\0\0\x94\x05\x01\xc0\xc0"),
    "a word too many": (LookUp, b"\x03\0\0\0\x01\x02\x03"),
}


@pytest.mark.parametrize("name", LIES)
async def test_what_cannot_be_ends_the_connection(name: str, told: Callable[[], list[str]]) -> None:
    """It costs a miss and no more, and another connection is tried."""
    kind, answer = LIES[name]
    peer = ScriptedPeer().hold(1, 2)
    async with peer.serving(), reading_from(peer) as backend:
        await connected(backend)
        peer.script = _lie(kind, answer)
        assert await backend.contains(keys_of([1, 2])) == [kind is LookUp] * 2
        if kind is LookUp:
            assert await backend.held_prefix(keys_of([1, 2])) == 0
        await until(lambda: backend.status()[0]["last_error"])
        peer.script = lambda _: None
        await connected(backend)
        assert await backend.get(blanks([1, 2])) == [OK, OK]
    assert [line.endswith("going on without it") for line in told()].count(True) == 1


def _lie(
    kind: type[Message], answer: Message | bytes
) -> Callable[[Message], Sequence[Message | bytes] | None]:
    def script(message: Message) -> Sequence[Message | bytes] | None:
        if not isinstance(message, kind):
            return None
        if isinstance(answer, bytes | Welcome | Refused) or answer.ticket:  # type: ignore[attr-defined]
            return [answer]
        return [type(answer)(message.ticket, *_listed(answer)[1:])]  # type: ignore[attr-defined]

    return script


@pytest.mark.parametrize("answer", [Readable(0, []), Readable(0, [True, True]), Released(0, True)])
async def test_lies_about_what_is_readable(answer: Message) -> None:
    peer = ScriptedPeer(late=frozenset(keys_of([1]))).hold(1)
    async with peer.serving(), reading_from(peer) as backend:
        await connected(backend)
        peer.script = lambda message: (
            [type(answer)(message.ticket, *_listed(answer)[1:])]
            if type(message).__name__ == "Await"
            else None
        )
        with anyio.fail_after(30):
            assert await backend.get(blanks([1])) == [FAILED]


async def test_offsets_that_do_not_fit_are_a_miss() -> None:
    peer = ScriptedPeer().hold(1)
    async with peer.serving(), reading_from(peer) as backend:
        await connected(backend)
        peer.script = _lie(LookUp, Granted(0, 1, [0], [HUGE - 5001], [5000], 1))
        assert await backend.get(blanks([1])) == [MISS]
        assert state(backend) == "connected"


# Silence.


async def test_a_peer_that_leaves_look_ups_unanswered_is_paused(told: Callable[[], list[str]]) -> None:
    """Though it answers pings."""
    peer = ScriptedPeer().hold(1)
    peer.script = lambda message: () if isinstance(message, LookUp) else None
    async with peer.serving(), reading_from(peer, patience=0.05, deadline=1.0) as backend:
        await connected(backend)

        async def paused() -> None:
            while state(backend) != "paused: leaves look-ups unanswered":
                assert await backend.held_prefix(keys_of([1])) == 0
                await anyio.sleep(0.01)

        with anyio.fail_after(30):
            await paused()
        assert peer.asked["LookUp"] == 3
        assert await backend.held_prefix(keys_of([1])) == 0
        assert peer.asked["LookUp"] == 3, "asked while it is paused"
        peer.script = lambda _: None
        await connected(backend)
        await until(lambda: len(told()) == 2)
    assert told() == ["it leaves look-ups unanswered; going on without it", "answers again"]


async def test_a_silent_peer_costs_nobody_a_wait_after_the_first() -> None:
    peer = ScriptedPeer().hold(1)
    async with peer.serving(), reading_from(peer, patience=10.0) as backend:
        await connected(backend)
        await until(lambda: peer.asked["Ping"] >= 2)
        peer.script = lambda message: ()
        assert await backend.held_prefix(keys_of([1])) == 0
        with anyio.fail_after(9.0):
            assert await backend.held_prefix(keys_of([1])) == 0
            assert await backend.contains(keys_of([1])) == [False]
            assert await backend.get(blanks([1])) == [MISS]
        peer.script = lambda _: None
        peer.hang_up()
        await until(lambda: peer.asked["Hello"] >= 2)
        await connected(backend)
        assert await backend.get(blanks([1])) == [OK]


async def test_a_peer_whose_reads_fail_is_paused(told: Callable[[], list[str]]) -> None:
    peer = ScriptedPeer(read_outcome=FAILED).hold(1)
    async with peer.serving(), reading_from(peer) as backend:
        await connected(backend)
        for _ in range(3):
            assert await backend.get(blanks([1])) == [FAILED]
        assert state(backend) == "paused: fails to send what it promised"
        assert await backend.get(blanks([1])) == [MISS]
        peer.read_outcome = None
        await connected(backend)
        assert await backend.get(blanks([1])) == [OK]
        await until(lambda: not peer.open_chunks and len(told()) == 2)
    assert told() == ["it fails to send what it promised; going on without it", "answers again"]


async def test_a_peer_that_answers_nothing_is_hung_up_on(
    told: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a network that was cut: only another connection finds it again."""
    monkeypatch.setattr("kvtier.peers.source.HANG_UP_SECONDS", 1.0)
    peer = ScriptedPeer().hold(1)
    async with peer.serving(), reading_from(peer, deadline=2.0) as backend:
        await connected(backend)
        peer.script = lambda message: None if isinstance(message, Hello) else ()
        await until(lambda: state(backend) == "does not answer")
        assert await backend.get(blanks([1])) == [MISS], "without a wait"
        await until(lambda: peer.asked["Hello"] >= 2)
        peer.script = lambda _: None
        await connected(backend)
        assert await backend.get(blanks([1])) == [OK]
        # On a busy machine it may have greeted, and been taken for well, more than once.
        await until(lambda: peer.connections == 1 and told()[-1] == "answers again")
    assert told()[0] == "it does not answer; going on without it"


async def test_silence_makes_nobody_wait_for_a_release() -> None:
    peer = ScriptedPeer().hold(*range(20))
    async with peer.serving(), reading_from(peer) as backend:
        assert await backend.held_prefix(keys_of(range(20))) == 20
        peer.script = lambda message: () if type(message).__name__ == "Release" else None
        for number in range(20):
            assert await backend.get(blanks([number])) == [OK]


async def test_a_peer_that_floods_is_hung_up_on() -> None:
    """Pongs that nobody asked for, for as long as it likes: the loop goes on, and the connection ends."""
    peer = ScriptedPeer().hold(1)
    async with peer.serving(), reading_from(peer) as backend:
        await connected(backend)
        peer.script = lambda message: [Pong(77)] * 10_000 if isinstance(message, Ping) else None
        await until(lambda: peer.asked["Hello"] >= 2)
        peer.script = lambda _: None
        await connected(backend)
