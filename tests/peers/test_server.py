"""``PeerServer`` with scripted clients, over real sockets and a real cache."""

from __future__ import annotations

import socket
from contextlib import suppress

import anyio
import pytest

from kvtier.errors import PeerError
from kvtier.peers import server as server_module
from kvtier.peers import session as session_module
from kvtier.peers.protocol import VERSION, Await, Contains, Hello, Lookup, Welcome
from kvtier.rpc.authentication import receive_exactly
from kvtier.rpc.frames import Ping, Pong, Refused, encode
from kvtier.testing.backend import make_key
from tests.rigs.peer_server import EchoTransport, RawClient, serving
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio


async def test_welcome_contains_name_transport_and_lease() -> None:
    async with serving(lease="3s") as served:
        client = RawClient(await served.connect_authenticated())
        welcome = await client.request(Hello(VERSION, "a test", "control"))
        assert welcome == Welcome(VERSION, "there", "none", b"an endpoint", 3.0)
        assert served.server.status()["connections"] == {"control": 1}


async def test_ping_is_answered() -> None:
    async with serving() as served:
        client = await served.client()
        assert await client.request(Ping(7)) == Pong(7)


INVALID_IN_SESSION = {
    "Hello twice": Hello(VERSION, "again", "control"),
    "half a key": Lookup(1, b"x" * 33, True),
    "half a key in Contains": Contains(1, b"x" * 31),
    "a server's message": Pong(1),
    "an unknown message": b"\x02\x00\x00\x00\x91\x63",
    "garbage": b"\x10\x00\x00\x00" + b"\xc1" * 16,
    "an empty frame": bytes(4),
    "a frame of 2^31": b"\x00\x00\x00\x80" + b"x" * 100,
    "a frame of 4 GiB": b"\xff\xff\xff\xff",
}


@pytest.mark.parametrize("name", INVALID_IN_SESSION)
async def test_invalid_message_ends_the_session_and_its_grants(name: str) -> None:
    async with serving(checksum=False) as served:
        keys = served.store(1)
        client = await served.client()
        assert (await client.look_up(keys)).grant
        await client.send(INVALID_IN_SESSION[name])
        refused = await client.receive()
        assert isinstance(refused, Refused)
        assert refused.reason
        await client.read_to_end()
        assert served.grants.open == 0
        assert served.refused() == {"protocol error": 1}


async def test_await_of_more_chunks_than_granted_ends_the_session() -> None:
    async with serving(checksum=False) as served:
        client = await served.client()
        granted = await client.look_up(served.store(1))
        refused = await client.request(Await(1, granted.grant, [0] * 2))
        assert refused == Refused("the client names more chunks than it was granted")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            Hello(VERSION + 1, "new", "control"),
            f"the client speaks protocol version {VERSION + 1} and the server version {VERSION}",
        ),
        (Hello(VERSION, "a test", "data"), "none, accepts no data connections"),
        (Ping(1), "first message is Ping, not Hello"),
        (b"\x00\x20\x00\x00", "over 4096"),
        (b"\x03\x00\x00\x00abc", "not a client message"),
    ],
)
async def test_invalid_hello_is_refused_with_reason(message: Hello, reason: str) -> None:
    async with serving() as served:
        assert reason in await served.refusal(message)
        assert sum(served.refused().values()) == 1


async def test_data_connection_is_served_by_the_transport() -> None:
    transport = EchoTransport()
    async with serving(transport=transport) as served:
        client = await served.client("data")
        await until(lambda: transport.serving)
        assert served.server.status()["connections"] == {"data": 1}
        await client.send(b"echo")
        assert await receive_exactly(client.socket, 4) == b"echo"
        client.close()
        await until(lambda: not transport.serving)


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 3)
    async with serving() as served:
        clients = [await served.client() for _ in range(3)]
        assert "3 connections" in await served.refusal(Hello(VERSION, "one more", "control"))
        assert served.refused() == {"too many connections": 1}
        clients[0].close()
        await until(lambda: served.server.status()["connections"] == {"control": 2})
        await served.client()


async def test_idle_client_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "IDLE_TIMEOUT_SECONDS", 0.2)
    async with serving(checksum=False) as served:
        client = await served.client()
        assert (await client.look_up(served.store(1))).grant
        assert await client.read_to_end() == b""
        assert served.grants.open == 0


async def test_client_that_reads_no_replies_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "IDLE_TIMEOUT_SECONDS", 0.3)
    async with serving() as served:
        client = await served.client()
        request = encode(Contains(1, bytes(32 * 100_000)))
        with suppress(OSError):
            while served.server.status()["connections"]:
                with anyio.move_on_after(0.05):
                    await client.send(request)
        await until(lambda: not served.server.status()["connections"])


async def test_client_without_hello_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ACCEPT_SECONDS", 0.2)
    async with serving() as served:
        client = RawClient(await served.connect_authenticated())
        assert await client.read_to_end() == b""
        assert served.refused() == {"timeout": 1}


async def test_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PeerError, match=r"peer\.listen"):
            async with serving(listen=f"127.0.0.1:{port}"):
                raise AssertionError("the server started")


async def test_unknown_host_is_reported() -> None:
    with pytest.raises(PeerError, match=r"peer\.listen"):
        async with serving(listen="no-such-host.invalid:0"):
            raise AssertionError("the server started")


async def test_ipv6() -> None:
    async with serving(listen="[::1]:0") as served:
        assert served.server.address[0] == "::1"


async def test_no_client_is_served_after_close() -> None:
    async with serving() as served:
        client = await served.client()
        address = served.server.address
        served.sockets.remove(client.socket)
        served.unmanaged_sockets.append(client.socket)
    assert await client.read_to_end() == b""
    client.close()
    with pytest.raises(ConnectionRefusedError), socket.socket() as late:
        late.connect(address)


async def test_internal_error_closes_one_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served:
        first, second = await served.client(), await served.client()
        look_up = served.cache.look_up
        served.cache.look_up = None  # type: ignore[assignment, method-assign]
        await first.send(Lookup(1, make_key(1), True))
        assert await first.read_to_end() == b""
        served.cache.look_up = look_up  # type: ignore[method-assign]
        assert (await second.look_up(served.store(1))).grant
        assert served.refused() == {"internal error": 1}
    assert "failed" in caplog.text
