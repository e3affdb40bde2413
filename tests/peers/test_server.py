"""The server against clients that are scripted message by message, over real sockets and a real cache."""

from __future__ import annotations

import socket
from contextlib import suppress

import anyio
import pytest

from kvtier.errors import PeerError
from kvtier.peers import server as server_module
from kvtier.peers import session as session_module
from kvtier.peers.authentication import receive_exactly
from kvtier.peers.protocol import (
    VERSION,
    Await,
    Contains,
    Hello,
    LookUp,
    Ping,
    Pong,
    Refused,
    Welcome,
)
from kvtier.sockets.frames import encode
from kvtier.testing.backend import make_key

from .serving import EchoTransport, RawClient, serving, until

pytestmark = pytest.mark.anyio


async def test_welcome_says_who_and_how() -> None:
    async with serving(lease="3s") as door:
        client = RawClient(await door.authenticated())
        welcome = await client.ask(Hello(VERSION, "a test", "control"))
        assert welcome == Welcome(VERSION, "there", "none", b"an endpoint", 3.0)
        assert door.server.status()["connections"] == {"control": 1}


async def test_a_ping_is_answered() -> None:
    async with serving() as door:
        client = await door.client()
        assert await client.ask(Ping(7)) == Pong(7)


WRONG_IN_CONVERSATION = {
    "Hello twice": Hello(VERSION, "again", "control"),
    "half a key": LookUp(1, b"x" * 33, True),
    "half a key, asked for": Contains(1, b"x" * 31),
    "a server's message": Pong(1),
    "an unknown message": b"\x02\x00\x00\x00\x91\x63",
    "garbage": b"\x10\x00\x00\x00" + b"\xc1" * 16,
    "an empty frame": bytes(4),
    "a frame of 2^31": b"\x00\x00\x00\x80" + b"x" * 100,
    "a frame of 4 GiB": b"\xff\xff\xff\xff",
}


@pytest.mark.parametrize("name", WRONG_IN_CONVERSATION)
async def test_what_may_not_be_said_ends_the_conversation_and_its_grants(name: str) -> None:
    async with serving(checksum=False) as door:
        keys = door.store(1)
        client = await door.client()
        assert (await client.look_up(keys)).grant
        await client.say(WRONG_IN_CONVERSATION[name])
        refused = await client.hear()
        assert isinstance(refused, Refused)
        assert refused.reason
        await client.closed()
        assert door.grants.open == 0
        assert door.refused() == {"no protocol": 1}


async def test_more_numbers_than_were_granted_end_the_conversation() -> None:
    async with serving(checksum=False) as door:
        client = await door.client()
        granted = await client.look_up(door.store(1))
        refused = await client.ask(Await(1, granted.grant, [0] * 2))
        assert refused == Refused("it names more chunks than it was granted")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            Hello(VERSION + 1, "new", "control"),
            f"version {VERSION} of the protocol and the peer {VERSION + 1}",
        ),
        (Hello(VERSION, "a test", "data"), "none, takes no connections for data"),
        (Ping(1), "Ping before Hello"),
        (b"\x00\x20\x00\x00", "over 4096"),
        (b"\x03\x00\x00\x00abc", "not a message"),
    ],
)
async def test_a_greeting_is_refused_in_words(message: Hello, reason: str) -> None:
    async with serving() as door:
        assert reason in await door.refusal(message)
        assert sum(door.refused().values()) == 1


async def test_a_connection_for_data_is_the_transports() -> None:
    transport = EchoTransport()
    async with serving(transport=transport) as door:
        client = await door.client("data")
        await until(lambda: transport.serving)
        assert door.server.status()["connections"] == {"data": 1}
        await client.say(b"echo")
        assert await receive_exactly(client.socket, 4) == b"echo"
        client.close()
        await until(lambda: not transport.serving)


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 3)
    async with serving() as door:
        clients = [await door.client() for _ in range(3)]
        assert "3 connections" in await door.refusal(Hello(VERSION, "one more", "control"))
        assert door.refused() == {"too many connections": 1}
        clients[0].close()
        await until(lambda: door.server.status()["connections"] == {"control": 2})
        await door.client()


async def test_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "SILENCE_SECONDS", 0.2)
    async with serving(checksum=False) as door:
        client = await door.client()
        assert (await client.look_up(door.store(1))).grant
        assert await client.closed() == b""
        assert door.grants.open == 0


async def test_who_takes_nothing_in_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "SILENCE_SECONDS", 0.3)
    async with serving() as door:
        client = await door.client()
        question = encode(Contains(1, bytes(32 * 100_000)))
        with suppress(OSError):
            while door.server.status()["connections"]:
                with anyio.move_on_after(0.05):
                    await client.say(question)
        await until(lambda: not door.server.status()["connections"])


async def test_who_says_nothing_after_proving_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ACCEPT_SECONDS", 0.2)
    async with serving() as door:
        client = RawClient(await door.authenticated())
        assert await client.closed() == b""
        assert door.refused() == {"too slow": 1}


async def test_a_port_that_is_taken_is_said_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PeerError, match=r"peer\.listen"):
            async with serving(listen=f"127.0.0.1:{port}"):
                raise AssertionError("it serves")


async def test_a_host_that_is_unknown_is_said_in_words() -> None:
    with pytest.raises(PeerError, match=r"peer\.listen"):
        async with serving(listen="no-such-host.invalid:0"):
            raise AssertionError("it serves")


async def test_ipv6() -> None:
    async with serving(listen="[::1]:0") as door:
        assert door.server.address[0] == "::1"


async def test_nobody_is_served_after_the_end() -> None:
    async with serving() as door:
        client = await door.client()
        address = door.server.address
        door.sockets.remove(client.socket)
        door.kept.append(client.socket)
    assert await client.closed() == b""
    client.close()
    with pytest.raises(ConnectionRefusedError), socket.socket() as late:
        late.connect(address)


async def test_a_failure_here_ends_one_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as door:
        first, second = await door.client(), await door.client()
        look_up = door.cache.look_up
        door.cache.look_up = None  # type: ignore[assignment, method-assign]
        await first.say(LookUp(1, make_key(1), True))
        assert await first.closed() == b""
        door.cache.look_up = look_up  # type: ignore[method-assign]
        assert (await second.look_up(door.store(1))).grant
        assert door.refused() == {"error here": 1}
    assert "failed" in caplog.text
