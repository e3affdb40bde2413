"""Mutual authentication with a shared secret, as a state machine without I/O.

Both sides send an opening at once; then the client sends its proof first::

    client                              server
      magic, version, nonce ────────────►
      ◄──────────── magic, version, nonce
      proof ────────────────────────────►    wrong: the server closes without a message
      ◄──────────────────────────── proof    wrong: the client closes, having sent nothing else

A proof is HMAC-SHA256, under the secret, of the prover's role and both openings. Each opening holds 32 random
bytes, so a proof cannot be replayed on another connection. It covers the role, so it cannot be reflected.
Every message has a fixed length, so nothing is read beyond it.

RFC 2104; on replay and reflection: Needham and Schroeder (1978), RFC 3552 section 3.3.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Literal

from kvtier.errors import PeerError
from kvtier.rpc.frames import describe_mismatch

MAGIC = b"KVPEER"
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
OPENING_BYTES = len(MAGIC) + 2 + NONCE_BYTES

_VERSION = struct.Struct("<H")
_TLS_ALERT = b"\x15\x03"

Role = Literal["client", "server"]


class RefusedHandshake(PeerError):
    """The other side failed to authenticate, or is no kvtier peer. ``reason``: a label for the counters."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Handshake:
    """One side of a handshake. Send :attr:`opening`, then feed received data, ``needed`` bytes at a time."""

    def __init__(self, role: Role, secret: bytes, version: int) -> None:
        """``version``: of the protocol that is used afterwards."""
        self.opening = MAGIC + _VERSION.pack(version) + secrets.token_bytes(NONCE_BYTES)
        """To send first."""
        self.needed = len(MAGIC)
        """How many bytes to feed next; 0 once both sides are authenticated."""
        self._role: Role = role
        self._secret = secret
        self._version = version
        self._theirs = b""

    def feed(self, data: bytes) -> bytes:
        """Process exactly ``needed`` bytes. Return what to send. Raises :class:`RefusedHandshake`."""
        if len(data) != self.needed:
            raise ValueError(f"got {len(data)} bytes, expected {self.needed}")
        if len(self._theirs) < OPENING_BYTES:
            return self._read_opening(data)
        return self._read_proof(data)

    def _read_opening(self, data: bytes) -> bytes:
        self._theirs += data
        if len(self._theirs) == len(MAGIC):
            self._check_magic()
            self.needed = _VERSION.size
            return b""
        if len(self._theirs) < OPENING_BYTES:
            self._check_version()
            self.needed = NONCE_BYTES
            return b""
        if hmac.compare_digest(self._theirs, self.opening):
            raise RefusedHandshake("reflection", "the other side echoes what it receives")
        self.needed = PROOF_BYTES
        return self._proof("client") if self._role == "client" else b""

    def _check_magic(self) -> None:
        if self._theirs.startswith(_TLS_ALERT):
            raise RefusedHandshake(
                "TLS mismatch", "the other side speaks TLS: set peer.tls on both sides, or on neither"
            )
        if self._theirs != MAGIC:
            raise RefusedHandshake(
                "not a peer", "the other side is not a kvtier peer: check the address and the port"
            )

    def _check_version(self) -> None:
        (version,) = _VERSION.unpack(self._theirs[len(MAGIC) :])
        if version != self._version:
            versions = (self._version, version) if self._role == "client" else (version, self._version)
            raise RefusedHandshake("version mismatch", describe_mismatch(*versions))

    def _read_proof(self, data: bytes) -> bytes:
        other: Role = "server" if self._role == "client" else "client"
        if not hmac.compare_digest(data, self._proof(other)):
            raise RefusedHandshake(
                "wrong secret", "the peer.secret differs: set the same secret on both sides"
            )
        self.needed = 0
        return self._proof("server") if self._role == "server" else b""

    def _proof(self, role: Role) -> bytes:
        ours, theirs = self.opening, self._theirs
        openings = ours + theirs if self._role == "client" else theirs + ours
        return hmac.digest(self._secret, b"kvtier peer " + role.encode() + b"\0" + openings, "sha256")
