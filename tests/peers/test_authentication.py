"""Authentication of peers: which connections are accepted, and that a refused one disturbs no other."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier.concurrency.sockets.connection import Connection, Deadline, ProtocolViolation
from kvtier.concurrency.threads import WorkerThreads
from kvtier.errors import PeerError, SettingsError
from kvtier.peers.protocol import VERSION, Hello
from kvtier.rpc import authentication
from kvtier.rpc.authentication import Credentials, receive_exactly, send_all
from kvtier.rpc.frames import Ping, Pong, Refused, encode
from kvtier.rpc.handshake import OPENING_BYTES, PROOF_BYTES, Handshake
from kvtier.settings.peer import PeerSettings
from kvtier.testing.backend import make_key
from tests.rigs.certificates import Authority, openssl
from tests.rigs.peer_server import SECRET, RawClient, serving
from tests.rigs.waiting import until
from tests.rpc.test_handshake import feed_all

pytestmark = pytest.mark.anyio

OTHER_SECRET = "another secret altogether"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


def credentials(secret: str | None = SECRET, tls: dict[str, str] | None = None) -> Credentials:
    return Credentials.from_settings(
        PeerSettings.model_validate({"secret": secret, "tls": tls, "others": ["a:1"]})
    )


# Over sockets, against a running server.


async def test_wrong_secret_is_refused_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served:
        for _ in range(5):
            with pytest.raises(PeerError, match=r"its peer\.secret differs"):
                await served.connect_authenticated(credentials(OTHER_SECRET))
        await until(lambda: served.refused() == {"wrong secret": 5})
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert "127.0.0.1 port" in warnings[0]
        assert SECRET not in caplog.text
        assert OTHER_SECRET not in caplog.text
        await served.client()


@pytest.mark.parametrize("recorded", [False, True])
async def test_refusal_sends_no_reason(recorded: bool) -> None:
    """After a wrong proof the server closes, without any bytes beyond its opening."""
    async with serving() as served:
        raw = RawClient(await served.connect())
        side = Handshake("client", SECRET.encode(), VERSION)
        theirs = await receive_exactly(raw.socket, OPENING_BYTES)
        proof = bytes(PROOF_BYTES)
        if recorded:
            proof = feed_all(Handshake("client", SECRET.encode(), VERSION), theirs)
        await raw.send(side.opening, proof)
        assert await raw.read_to_end() == b""


Impersonate = Callable[[socket.socket], Awaitable[bytes]]


async def test_server_without_secret_receives_only_opening_and_proof() -> None:
    received = await received_by(_impersonate_without_secret)
    assert len(received) == OPENING_BYTES + PROOF_BYTES


async def _impersonate_without_secret(connected: socket.socket) -> bytes:
    await send_all(connected, Handshake("server", b"", VERSION).opening)
    received = await receive_exactly(connected, OPENING_BYTES + PROOF_BYTES)
    await send_all(connected, bytes(PROOF_BYTES))
    return received


async def _echo(connected: socket.socket) -> bytes:
    received = await receive_exactly(connected, OPENING_BYTES)
    await send_all(connected, received)
    return received


async def _reply_http(connected: socket.socket) -> bytes:
    await send_all(connected, b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(200))
    return await receive_exactly(connected, OPENING_BYTES)


@pytest.mark.parametrize("impersonate", [_echo, _reply_http])
async def test_other_server_receives_no_proof(impersonate: Impersonate) -> None:
    assert len(await received_by(impersonate)) == OPENING_BYTES


async def received_by(impersonate: Impersonate) -> bytes:
    """Return all bytes that a client sends to an impostor of a server."""
    executor = WorkerThreads(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        errors: list[Exception] = []

        def connect() -> None:
            connection, deadline = Connection(socket.AF_INET), Deadline(10)
            try:
                with deadline.bounds(connection):
                    connection.connect(address)
                    credentials().prove_to_server(connection, VERSION)
            except PeerError as error:
                errors.append(error)
            finally:
                connection.close()

        done = executor(connect)
        listener.setblocking(False)
        await anyio.wait_readable(listener)
        connected, _ = listener.accept()
        with connected:
            connected.setblocking(False)
            received = await impersonate(connected)
            try:
                while True:
                    received += await receive_exactly(connected, 1)
            except ConnectionError:
                pass
        await done
    executor.close()
    assert len(errors) == 1
    return received


async def test_unresponsive_and_slow_clients_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "ACCEPT_SECONDS", 0.5)
    async with serving() as served:
        unresponsive = RawClient(await served.connect())
        slow = RawClient(await served.connect())
        opening = Handshake("client", SECRET.encode(), VERSION).opening

        async def send_slowly() -> None:
            for at in range(len(opening)):
                await slow.send(opening[at : at + 1])
                await anyio.sleep(0.05)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_slowly)
            assert len(await unresponsive.read_to_end()) == OPENING_BYTES
            assert len(await slow.read_to_end()) == OPENING_BYTES
            tasks.cancel_scope.cancel()
        assert served.refused() == {"timeout": 2}


async def test_idle_unauthenticated_connections_do_not_block_clients() -> None:
    async with serving() as served:
        unauthenticated = [await served.connect() for _ in range(200)]
        await until(lambda: served.refused().get("too many unauthenticated", 0) >= 136)
        assert served.server.status()["unauthenticated"] == 64
        client = await served.client()
        assert await client.request(Ping(1)) == Pong(1)
        for connected in unauthenticated:
            connected.close()
        await until(lambda: not served.server.status()["unauthenticated"])


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".ljust(100),
        bytes(4096),
        b"\xff" * 4096,
        b"\x16\x03\x01" + b"x" * 500,
    ],
)
async def test_garbage_closes_connection(garbage: bytes) -> None:
    async with serving() as served:
        raw = RawClient(await served.connect())
        await raw.send(garbage)
        assert len(await raw.read_to_end()) in (0, OPENING_BYTES)
        assert sum(served.refused().values()) == 1


async def test_hello_before_proof_is_not_read() -> None:
    async with serving(checksum=False) as served:
        raw = RawClient(await served.connect())
        await raw.send(encode(Hello(VERSION, "a liar", "control")).ljust(OPENING_BYTES + PROOF_BYTES))
        assert len(await raw.read_to_end()) in (0, OPENING_BYTES)
        assert served.server.status()["requests"] == {}


async def test_replayed_handshake_is_refused() -> None:
    """Replay all bytes of a client on another connection."""
    async with serving(checksum=False) as served:
        first = RawClient(await served.connect())
        side = Handshake("client", SECRET.encode(), VERSION)
        sent = side.opening
        proof = feed_all(side, await receive_exactly(first.socket, OPENING_BYTES))
        sent += proof + encode(Hello(VERSION, "a test", "control"))
        await first.send(sent)
        feed_all(side, await receive_exactly(first.socket, PROOF_BYTES))
        assert (await first.receive()).instance == "there"
        again = RawClient(await served.connect())
        await again.send(sent)
        assert len(await again.read_to_end()) in (0, OPENING_BYTES)
        assert served.refused() == {"wrong secret": 1}


async def test_client_that_disconnects_during_handshake_is_released() -> None:
    async with serving() as served:
        opening = Handshake("client", b"secret", VERSION).opening
        for length in (0, 3, 6, 20, OPENING_BYTES, OPENING_BYTES + 5):
            raw = RawClient(await served.connect())
            await raw.send(opening.ljust(OPENING_BYTES + 5)[:length])
            raw.close()
        await until(lambda: not served.server.status()["unauthenticated"])
        assert served.refused() == {}


# TLS.


def context_of(authority: Authority) -> ssl.SSLContext:
    """Return a client's context without a certificate of its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority.certificate)
    return context


async def ping(served: Any, chosen: Credentials) -> None:
    client = RawClient(await served.connect_authenticated(chosen))
    await client.request(Hello(VERSION, "a test", "control"))
    assert await client.request(Ping(1)) == Pong(1)


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_certificates_of_same_authority_are_accepted(authority: Authority, secret: str | None) -> None:
    async with serving(
        secret=secret, tls=authority.sign("server"), checksum=False, ram=4000, share=1
    ) as served:
        chosen = credentials(secret, authority.sign("client"))
        client = RawClient(await served.connect_authenticated(chosen))
        assert isinstance(client.socket, ssl.SSLSocket)
        assert client.socket.version() == "TLSv1.3"
        await client.request(Hello(VERSION, "a test", "control"))
        keys = await served.store_many(1500)
        granted = await client.look_up(keys)
        assert len(granted.positions) == 1500, "many TLS records in both directions"
        assert (await client.look_up([make_key(0)])).positions == []
        await ping(served, chosen)


async def test_secret_is_required_besides_certificates(authority: Authority) -> None:
    async with serving(tls=authority.sign("server")) as served:
        for secret in (OTHER_SECRET, None):
            with pytest.raises(PeerError, match="secret"):
                await served.connect_authenticated(credentials(secret, authority.sign("client")))
        assert served.refused() == {"wrong secret": 2}


async def test_foreign_certificate_is_refused_by_both_sides(tmp_path: Path) -> None:
    ours, foreign = Authority(tmp_path / "ours", "ours"), Authority(tmp_path / "foreign", "foreign")
    async with serving(secret=None, tls=ours.sign("server")) as served:
        foreign_files = foreign.sign("stranger")
        with pytest.raises(PeerError, match="authority"):
            await served.connect_authenticated(credentials(None, foreign_files))
        mixed_files = {**foreign_files, "authority": str(ours.certificate)}
        with pytest.raises(PeerError, match="certificate"):
            await served.connect_authenticated(credentials(None, mixed_files))
        await until(lambda: sum(served.refused().values()) == 2)
        assert served.refused()["wrong certificate"] == 1
        await ping(served, credentials(None, ours.sign("client")))


async def test_expired_certificate_is_refused_by_both_sides(authority: Authority) -> None:
    expired, good = authority.sign("expired", days=-1), authority.sign("good")
    async with serving(secret=None, tls=good) as served:
        with pytest.raises(PeerError, match="certificate"):
            await served.connect_authenticated(credentials(None, expired))
        await until(lambda: served.refused() == {"wrong certificate": 1})
    async with serving(secret=None, tls=expired) as served:
        with pytest.raises(PeerError, match="expired"):
            await served.connect_authenticated(credentials(None, good))


async def test_missing_certificate_is_refused(authority: Authority) -> None:
    context = context_of(authority)
    async with serving(secret=None, tls=authority.sign("server")) as served:
        with pytest.raises(PeerError, match="certificate"):
            await served.connect_authenticated(Credentials(b"", context, None))
        await until(lambda: served.refused() == {"wrong certificate": 1})


async def test_older_tls_is_refused(authority: Authority) -> None:
    files = authority.sign("client")
    context = context_of(authority)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files["certificate"], files["key"])
    async with serving(secret=None, tls=authority.sign("server")) as served:
        with pytest.raises(PeerError):
            await served.connect_authenticated(Credentials(b"", context, None))
        await until(lambda: sum(served.refused().values()) == 1)


async def test_tls_on_one_side_only_is_reported(authority: Authority) -> None:
    async with serving(tls=authority.sign("server")) as served:
        with pytest.raises(PeerError, match=r"peer\.tls"):
            await served.connect_authenticated(credentials())
    async with serving() as served:
        with pytest.raises(PeerError, match=r"peer\.tls on both sides"):
            await served.connect_authenticated(credentials(SECRET, authority.sign("client")))


async def test_stalled_tls_handshake_times_out(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "ACCEPT_SECONDS", 0.3)
    async with serving(secret=None, tls=authority.sign("server")) as served:
        raw = RawClient(await served.connect())
        await raw.send(b"\x16\x03\x01\x02\x00\x01")
        await raw.read_to_end()
        assert served.refused() == {"timeout": 1}


async def test_refusal_over_tls_is_received(authority: Authority) -> None:
    async with serving(secret=None, tls=authority.sign("server")) as served:
        client = RawClient(await served.connect_authenticated(credentials(None, authority.sign("client"))))
        assert isinstance(await client.request(Hello(VERSION + 1, "new", "control")), Refused)


# Settings.


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
@pytest.mark.parametrize("damage", ["missing", "garbage"])
def test_unusable_file_is_named(authority: Authority, name: str, damage: str) -> None:
    files = authority.sign("peer")
    path = Path(files[name])
    if damage == "missing":
        path.unlink()
    else:
        path.write_text("no certificate")
    with pytest.raises(SettingsError, match=f"peer.tls.*{name}.*{path.name}"):
        credentials(None, files)


def test_key_of_another_certificate_is_reported(authority: Authority) -> None:
    files = {**authority.sign("peer"), "key": authority.sign("other")["key"]}
    with pytest.raises(SettingsError, match=r"peer\.tls\.key"):
        credentials(None, files)


def test_encrypted_key_is_refused_without_prompt(authority: Authority) -> None:
    files = authority.sign("peer")
    openssl("ec", "-in", files["key"], "-aes256", "-passout", "pass:secret", "-out", files["key"] + "x")
    with pytest.raises(SettingsError, match=r"peer\.tls\.key"):
        credentials(None, {**files, "key": files["key"] + "x"})


def test_secret_or_certificate_is_required() -> None:
    with pytest.raises(SettingsError, match=r"peer\.secret or peer\.tls"):
        Credentials.from_settings(PeerSettings())


def test_detach_refuses_buffered_bytes() -> None:
    connection = Connection(socket.AF_INET)
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(connection):
        connection.deadline = Deadline(60)
        connection.connect(listener.getsockname())
        with listener.accept()[0] as theirs:
            theirs.send(b"more")
            connection.fill()
            with pytest.raises(ProtocolViolation):
                connection.detach()
