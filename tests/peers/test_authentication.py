"""Who is let in and who is not, whichever side lies, and that nobody else is hurt by it."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import PeerError, SettingsError
from kvtier.peers import authentication
from kvtier.peers.authentication import Credentials, receive_exactly, send_all
from kvtier.peers.handshake import OPENING_BYTES, PROOF_BYTES, Handshake, RefusedHandshake
from kvtier.peers.protocol import VERSION, Hello, Ping, Pong, Refused
from kvtier.settings_peer import PeerSettings
from kvtier.sockets.connection import Connection, Deadline, ProtocolViolation
from kvtier.sockets.frames import encode
from kvtier.testing.backend import make_key
from kvtier.threads import WorkerThreads

from .authority import Authority
from .serving import SECRET, RawClient, serving, until

pytestmark = pytest.mark.anyio

OTHER = "another secret altogether"


def credentials(secret: str | None = SECRET, tls: dict[str, str] | None = None) -> Credentials:
    return Credentials.of(PeerSettings.model_validate({"secret": secret, "tls": tls, "others": ["a:1"]}))


def run(
    client: Handshake, server: Handshake, change: Callable[[str, bytes], bytes] = lambda _, data: data
) -> None:
    """Let two sides talk through somebody who may change what they say."""
    to_server, to_client = change("client", client.opening), change("server", server.opening)
    while client.wanted or server.wanted:
        progress = False
        while server.wanted and len(to_server) >= server.wanted:
            data, to_server = to_server[: server.wanted], to_server[server.wanted :]
            to_client += change("server", server.feed(data))
            progress = True
        while client.wanted and len(to_client) >= client.wanted:
            data, to_client = to_client[: client.wanted], to_client[client.wanted :]
            to_server += change("client", client.feed(data))
            progress = True
        assert progress, "both wait"
    assert not to_server
    assert not to_client


# The state machine, without I/O.


def test_both_sides_that_know_the_secret_come_together() -> None:
    run(Handshake("client", b"secret"), Handshake("server", b"secret"))


def test_who_does_not_know_the_secret_is_found_out_by_the_server_first() -> None:
    client, server = Handshake("client", b"secret"), Handshake("server", b"other")
    with pytest.raises(RefusedHandshake, match=r"peer\.secret"):
        run(client, server)
    assert client.wanted == PROOF_BYTES, "it waits for a proof and has said nothing else"


@given(st.data())
def test_any_changed_bit_is_found_out(data: st.DataObject) -> None:
    side = data.draw(st.sampled_from(["client", "server"]))
    at = data.draw(st.integers(0, OPENING_BYTES + PROOF_BYTES - 1))
    bit = data.draw(st.integers(0, 7))
    passed = {"client": 0, "server": 0}

    def flip(who: str, sent: bytes) -> bytes:
        start = passed[who]
        passed[who] += len(sent)
        if who != side or not start <= at < start + len(sent):
            return sent
        changed = bytearray(sent)
        changed[at - start] ^= 1 << bit
        return bytes(changed)

    with pytest.raises(RefusedHandshake):
        run(Handshake("client", b"secret"), Handshake("server", b"secret"), flip)


def test_no_proof_is_worth_anything_elsewhere() -> None:
    said: list[bytes] = []

    def record(who: str, data: bytes) -> bytes:
        if who == "client":
            said.append(data)
        return data

    run(Handshake("client", b"secret"), Handshake("server", b"secret"), record)
    server = Handshake("server", b"secret")
    with pytest.raises(RefusedHandshake, match="secret"):
        feed_all(server, b"".join(said))


def feed_all(side: Handshake, data: bytes) -> bytes:
    answers = b""
    while side.wanted and len(data) >= side.wanted:
        part, data = data[: side.wanted], data[side.wanted :]
        answers += side.feed(part)
    return answers


def test_a_mirror_is_no_peer() -> None:
    client = Handshake("client", b"secret")
    with pytest.raises(RefusedHandshake, match="mirror"):
        feed_all(client, client.opening)


def test_a_proof_cannot_be_sent_back() -> None:
    """To the client its own proof, and to the server what another connection to it has proved."""
    client, server = Handshake("client", b"secret"), Handshake("server", b"secret")
    proof = feed_all(client, server.opening)
    with pytest.raises(RefusedHandshake):
        client.feed(proof)
    # An attacker has the server prove something to it by asking it in the role of the server.
    first, second = Handshake("server", b"secret"), Handshake("server", b"secret")
    assert feed_all(first, second.opening) == b"", "nobody is proved anything who has not proved himself"


@given(st.binary(min_size=6, max_size=200))
def test_garbage_is_refused_in_words(data: bytes) -> None:
    for role in ("client", "server"):
        side = Handshake(role, b"secret")  # type: ignore[arg-type]
        with pytest.raises(RefusedHandshake):
            feed_all(side, data.ljust(OPENING_BYTES + PROOF_BYTES, b"\0"))


def test_another_version_is_said_in_words() -> None:
    other = bytearray(Handshake("server", b"secret").opening)
    other[6] += 1
    with pytest.raises(RefusedHandshake, match=f"version {VERSION + 1} .* version {VERSION}"):
        feed_all(Handshake("client", b"secret"), bytes(other))


def test_only_what_is_wanted_may_be_fed() -> None:
    with pytest.raises(ValueError, match="wanted"):
        Handshake("client", b"secret").feed(b"")


# Over sockets, against a server that serves.


async def test_a_wrong_secret_is_refused_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as door:
        for _ in range(5):
            with pytest.raises(PeerError, match=r"peer\.secret is another one there"):
                await door.authenticated(credentials(OTHER))
        await until(lambda: door.refused() == {"wrong secret": 5})
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert "127.0.0.1 port" in warnings[0]
        assert SECRET not in caplog.text
        assert OTHER not in caplog.text
        await door.client()


@pytest.mark.parametrize("recorded", [False, True])
async def test_a_refusal_tells_nothing(recorded: bool) -> None:
    """Whatever is wrong with a proof, what comes back is the server's opening and the end."""
    async with serving() as door:
        raw = RawClient(await door.dial())
        side = Handshake("client", SECRET.encode())
        theirs = await receive_exactly(raw.socket, OPENING_BYTES)
        proof = bytes(PROOF_BYTES)
        if recorded:
            proof = feed_all(Handshake("client", SECRET.encode()), theirs)
        await raw.say(side.opening, proof)
        assert await raw.closed() == b""


async def test_a_server_that_does_not_know_the_secret_hears_nothing() -> None:
    heard = await heard_by(_pretend_without_secret)
    assert len(heard) == OPENING_BYTES + PROOF_BYTES


async def _pretend_without_secret(connected: socket.socket) -> bytes:
    await send_all(connected, Handshake("server", b"").opening)
    heard = await receive_exactly(connected, OPENING_BYTES + PROOF_BYTES)
    await send_all(connected, bytes(PROOF_BYTES))
    return heard


async def _mirror(connected: socket.socket) -> bytes:
    heard = await receive_exactly(connected, OPENING_BYTES)
    await send_all(connected, heard)
    return heard


async def _speak_http(connected: socket.socket) -> bytes:
    await send_all(connected, b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(200))
    return await receive_exactly(connected, OPENING_BYTES)


async def test_a_mirror_hears_no_proof() -> None:
    assert len(await heard_by(_mirror)) == OPENING_BYTES


async def test_another_protocol_hears_no_proof() -> None:
    assert len(await heard_by(_speak_http)) == OPENING_BYTES


async def heard_by(pretend: Callable[[socket.socket], Awaitable[bytes]]) -> bytes:
    """All that a client says to one that only pretends to be a server."""
    hop = WorkerThreads(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        errors: list[Exception] = []

        def connect() -> None:
            connection, deadline = Connection(socket.AF_INET), Deadline(10)
            try:
                with deadline.bounds(connection):
                    connection.connect(address)
                    credentials().prove_to_server(connection)
            except PeerError as error:
                errors.append(error)
            finally:
                connection.close()

        done = hop(connect)
        listener.setblocking(False)
        await anyio.wait_readable(listener)
        connected, _ = listener.accept()
        with connected:
            connected.setblocking(False)
            heard = await pretend(connected)
            try:
                while True:
                    heard += await receive_exactly(connected, 1)
            except ConnectionError:
                pass
        await done
    hop.close()
    assert len(errors) == 1
    return heard


async def test_silence_and_drops_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "ACCEPT_SECONDS", 0.5)
    async with serving() as door:
        silent = RawClient(await door.dial())
        dripping = RawClient(await door.dial())
        opening = Handshake("client", SECRET.encode()).opening

        async def drip() -> None:
            for at in range(len(opening)):
                await dripping.say(opening[at : at + 1])
                await anyio.sleep(0.05)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drip)
            assert len(await silent.closed()) == OPENING_BYTES
            assert len(await dripping.closed()) == OPENING_BYTES
            tasks.cancel_scope.cancel()
        assert door.refused() == {"too slow": 2}


async def test_two_hundred_that_say_nothing_keep_nobody_out() -> None:
    async with serving() as door:
        strangers = [await door.dial() for _ in range(200)]
        await until(lambda: door.refused().get("too many strangers", 0) >= 136)
        assert door.server.status()["strangers"] == 64
        client = await door.client()
        assert await client.ask(Ping(1)) == Pong(1)
        for stranger in strangers:
            stranger.close()
        await until(lambda: not door.server.status()["strangers"])


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".ljust(100),
        bytes(4096),
        b"\xff" * 4096,
        b"\x16\x03\x01" + b"x" * 500,
    ],
)
async def test_garbage_is_hung_up_on(garbage: bytes) -> None:
    async with serving() as door:
        raw = RawClient(await door.dial())
        await raw.say(garbage)
        assert len(await raw.closed()) in (0, OPENING_BYTES)
        assert sum(door.refused().values()) == 1


async def test_hello_without_proof_is_never_read() -> None:
    async with serving(checksum=False) as door:
        raw = RawClient(await door.dial())
        await raw.say(encode(Hello(VERSION, "a liar", "control")).ljust(OPENING_BYTES + PROOF_BYTES))
        assert len(await raw.closed()) in (0, OPENING_BYTES)
        assert door.server.status()["asked"] == {}


async def test_a_handshake_that_was_listened_to_opens_nothing() -> None:
    """Everything that a client has said is said again, on a connection of its own."""
    async with serving(checksum=False) as door:
        first = RawClient(await door.dial())
        side = Handshake("client", SECRET.encode())
        said = side.opening
        proof = feed_all(side, await receive_exactly(first.socket, OPENING_BYTES))
        said += proof + encode(Hello(VERSION, "a test", "control"))
        await first.say(said)
        feed_all(side, await receive_exactly(first.socket, PROOF_BYTES))
        assert (await first.hear()).instance == "there"
        again = RawClient(await door.dial())
        await again.say(said)
        assert len(await again.closed()) in (0, OPENING_BYTES)
        assert door.refused() == {"wrong secret": 1}


async def test_who_stops_in_the_middle_is_let_go() -> None:
    async with serving() as door:
        opening = Handshake("client", b"secret").opening
        for length in (0, 3, 6, 20, OPENING_BYTES, OPENING_BYTES + 5):
            raw = RawClient(await door.dial())
            await raw.say(opening.ljust(OPENING_BYTES + 5)[:length])
            raw.close()
        await until(lambda: not door.server.status()["strangers"])
        assert door.refused() == {}


# TLS.


async def ping(door: Any, chosen: Credentials) -> None:
    client = RawClient(await door.authenticated(chosen))
    await client.ask(Hello(VERSION, "a test", "control"))
    assert await client.ask(Ping(1)) == Pong(1)


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_certificates_of_one_authority_let_in(tmp_path: Path, secret: str | None) -> None:
    authority = Authority(tmp_path, "authority")
    async with serving(
        secret=secret, tls=authority.sign("server"), checksum=False, ram=4000, share=1
    ) as door:
        chosen = credentials(secret, authority.sign("client"))
        client = RawClient(await door.authenticated(chosen))
        assert isinstance(client.socket, ssl.SSLSocket)
        assert client.socket.version() == "TLSv1.3"
        await client.ask(Hello(VERSION, "a test", "control"))
        keys = await door.store_many(1500)
        granted = await client.look_up(keys)
        assert len(granted.positions) == 1500, "many records there and back"
        assert (await client.look_up([make_key(0)])).positions == []
        await ping(door, chosen)


async def test_a_secret_is_wanted_beside_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    async with serving(tls=authority.sign("server")) as door:
        for secret in (OTHER, None):
            with pytest.raises(PeerError, match="secret"):
                await door.authenticated(credentials(secret, authority.sign("client")))
        assert door.refused() == {"wrong secret": 2}


async def test_a_foreign_certificate_is_refused_by_both_sides(tmp_path: Path) -> None:
    ours, foreign = Authority(tmp_path / "ours", "ours"), Authority(tmp_path / "foreign", "foreign")
    async with serving(secret=None, tls=ours.sign("server")) as door:
        stranger = foreign.sign("stranger")
        with pytest.raises(PeerError, match="authority"):
            await door.authenticated(credentials(None, stranger))
        believing = {**stranger, "authority": str(ours.certificate)}
        with pytest.raises(PeerError, match="certificate"):
            await door.authenticated(credentials(None, believing))
        await until(lambda: sum(door.refused().values()) == 2)
        assert door.refused()["wrong certificate"] == 1
        await ping(door, credentials(None, ours.sign("client")))


async def test_an_expired_certificate_is_refused_by_both_sides(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    expired, good = authority.sign("expired", days=-1), authority.sign("good")
    async with serving(secret=None, tls=good) as door:
        with pytest.raises(PeerError, match="certificate"):
            await door.authenticated(credentials(None, expired))
        await until(lambda: door.refused() == {"wrong certificate": 1})
    async with serving(secret=None, tls=expired) as door:
        with pytest.raises(PeerError, match="expired"):
            await door.authenticated(credentials(None, good))


async def test_no_certificate_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(authority.certificate)
    async with serving(secret=None, tls=authority.sign("server")) as door:
        with pytest.raises(PeerError, match="certificate"):
            await door.authenticated(Credentials(b"", bare, None))
        await until(lambda: door.refused() == {"wrong certificate": 1})


async def test_older_tls_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    files = authority.sign("client")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_verify_locations(files["authority"])
    old.load_cert_chain(files["certificate"], files["key"])
    async with serving(secret=None, tls=authority.sign("server")) as door:
        with pytest.raises(PeerError):
            await door.authenticated(Credentials(b"", old, None))
        await until(lambda: sum(door.refused().values()) == 1)


async def test_tls_on_one_side_alone_is_said_in_words(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    async with serving(tls=authority.sign("server")) as door:
        with pytest.raises(PeerError, match=r"peer\.tls"):
            await door.authenticated(credentials())
    async with serving() as door:
        with pytest.raises(PeerError, match=r"peer\.tls on both sides"):
            await door.authenticated(credentials(SECRET, authority.sign("client")))


async def test_silence_in_the_tls_handshake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "ACCEPT_SECONDS", 0.3)
    authority = Authority(tmp_path, "authority")
    async with serving(secret=None, tls=authority.sign("server")) as door:
        raw = RawClient(await door.dial())
        await raw.say(b"\x16\x03\x01\x02\x00\x01")
        await raw.closed()
        assert door.refused() == {"too slow": 1}


async def test_refusals_over_tls_are_in_words(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    async with serving(secret=None, tls=authority.sign("server")) as door:
        client = RawClient(await door.authenticated(credentials(None, authority.sign("client"))))
        assert isinstance(await client.ask(Hello(VERSION + 1, "new", "control")), Refused)


# Settings.


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
@pytest.mark.parametrize("damage", ["missing", "garbage"])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, damage: str) -> None:
    files = Authority(tmp_path, "authority").sign("peer")
    path = Path(files[name])
    if damage == "missing":
        path.unlink()
    else:
        path.write_text("no certificate")
    with pytest.raises(SettingsError, match=f"peer.tls.*{name}.*{path.name}"):
        credentials(None, files)


def test_a_key_of_another_certificate_is_said_in_words(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    files = {**authority.sign("peer"), "key": authority.sign("other")["key"]}
    with pytest.raises(SettingsError, match=r"peer\.tls\.key"):
        credentials(None, files)


def test_a_key_with_a_password_is_not_asked_for(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    files = authority.sign("peer")
    authority._run(
        "ec", "-in", files["key"], "-aes256", "-passout", "pass:secret", "-out", files["key"] + "x"
    )
    with pytest.raises(SettingsError, match=r"peer\.tls\.key"):
        credentials(None, {**files, "key": files["key"] + "x"})


def test_neither_secret_nor_certificate() -> None:
    with pytest.raises(SettingsError, match=r"peer\.secret or peer\.tls"):
        Credentials.of(PeerSettings())


def test_a_connection_with_something_left_is_not_handed_over() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(socket.AF_UNIX)
    connection._socket.close()
    connection._socket = ours
    connection.deadline = Deadline(5)
    connection._set_up()
    theirs.send(b"more")
    connection.fill()
    with pytest.raises(ProtocolViolation):
        connection.detach()
    connection.close()
    theirs.close()
