"""The handshake as a state machine, without I/O."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.rpc.handshake import OPENING_BYTES, PROOF_BYTES, Handshake, RefusedHandshake

VERSION = 5


def run_handshake(
    client: Handshake, server: Handshake, change: Callable[[str, bytes], bytes] = lambda _, data: data
) -> None:
    """Run a handshake through a man in the middle, which may change the bytes."""
    to_server, to_client = change("client", client.opening), change("server", server.opening)
    while client.needed or server.needed:
        progressed = False
        while server.needed and len(to_server) >= server.needed:
            data, to_server = to_server[: server.needed], to_server[server.needed :]
            to_client += change("server", server.feed(data))
            progressed = True
        while client.needed and len(to_client) >= client.needed:
            data, to_client = to_client[: client.needed], to_client[client.needed :]
            to_server += change("client", client.feed(data))
            progressed = True
        assert progressed, "deadlock"
    assert not to_server
    assert not to_client


def test_handshake_succeeds_with_same_secret() -> None:
    run_handshake(Handshake("client", b"secret", VERSION), Handshake("server", b"secret", VERSION))


def test_server_rejects_wrong_secret_before_client_does() -> None:
    client, server = Handshake("client", b"secret", VERSION), Handshake("server", b"other", VERSION)
    with pytest.raises(RefusedHandshake, match=r"peer\.secret"):
        run_handshake(client, server)
    assert client.needed == PROOF_BYTES, "it waits for a proof and has sent nothing else"


@settings(deadline=None)
@given(st.data())
def test_any_flipped_bit_is_refused(data: st.DataObject) -> None:
    side = data.draw(st.sampled_from(["client", "server"]))
    at = data.draw(st.integers(0, OPENING_BYTES + PROOF_BYTES - 1))
    bit = data.draw(st.integers(0, 7))
    passed_bytes = {"client": 0, "server": 0}

    def flip(sender: str, sent: bytes) -> bytes:
        start = passed_bytes[sender]
        passed_bytes[sender] += len(sent)
        if sender != side or not start <= at < start + len(sent):
            return sent
        changed = bytearray(sent)
        changed[at - start] ^= 1 << bit
        return bytes(changed)

    with pytest.raises(RefusedHandshake):
        run_handshake(Handshake("client", b"secret", VERSION), Handshake("server", b"secret", VERSION), flip)


def test_replayed_proof_is_refused() -> None:
    sent: list[bytes] = []

    def record(sender: str, data: bytes) -> bytes:
        if sender == "client":
            sent.append(data)
        return data

    run_handshake(Handshake("client", b"secret", VERSION), Handshake("server", b"secret", VERSION), record)
    server = Handshake("server", b"secret", VERSION)
    with pytest.raises(RefusedHandshake, match="secret"):
        feed_all(server, b"".join(sent))


def feed_all(side: Handshake, data: bytes) -> bytes:
    answers = b""
    while side.needed and len(data) >= side.needed:
        part, data = data[: side.needed], data[side.needed :]
        answers += side.feed(part)
    return answers


def test_echoed_opening_is_refused() -> None:
    client = Handshake("client", b"secret", VERSION)
    with pytest.raises(RefusedHandshake, match="echoes"):
        feed_all(client, client.opening)


def test_proof_cannot_be_reflected() -> None:
    """Neither the client's own proof to the client, nor the proof of another connection to the server."""
    client, server = Handshake("client", b"secret", VERSION), Handshake("server", b"secret", VERSION)
    proof = feed_all(client, server.opening)
    with pytest.raises(RefusedHandshake):
        client.feed(proof)
    # The attacker relays the opening of one server connection to another, to obtain a proof.
    first, second = Handshake("server", b"secret", VERSION), Handshake("server", b"secret", VERSION)
    assert feed_all(first, second.opening) == b"", "a server sends no proof before it has verified the peer's"


@settings(deadline=None)
@given(st.binary(min_size=6, max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    for role in ("client", "server"):
        side = Handshake(role, b"secret", VERSION)  # type: ignore[arg-type]
        with pytest.raises(RefusedHandshake):
            feed_all(side, data.ljust(OPENING_BYTES + PROOF_BYTES, b"\0"))


def test_version_mismatch_is_reported() -> None:
    client, server = Handshake("client", b"secret", VERSION), Handshake("server", b"secret", VERSION + 1)
    text = f"the client speaks protocol version {VERSION} and the server version {VERSION + 1}"
    for side, opening in ((client, server.opening), (server, client.opening)):
        with pytest.raises(RefusedHandshake, match=text):
            feed_all(side, opening)


def test_feed_requires_exact_length() -> None:
    with pytest.raises(ValueError, match="expected"):
        Handshake("client", b"secret", VERSION).feed(b"")
