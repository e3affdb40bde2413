"""Encryption of what a tier stores: AES-256-GCM, with a key of its own for each object.

A *key file* has one line for each key: its number, and 64 hexadecimal digits. The first one encrypts; the
others are those of objects that were stored before. From it, a key for each tenant is derived, and from that
one for each object, with 12 random bytes that are stored in its header (HKDF, RFC 5869). Each is used once,
so the nonce is zero: neither a killed process nor a copy of the disk can make a key and a nonce occur twice.
The tag authenticates the header as well (NIST SP 800-38D).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADCipherContext, Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvtier.concurrency.threads import let_others_run
from kvtier.errors import TierError, UnreadableChunk
from kvtier.memory.header import ChunkHeader, Encryption, StoredHeader
from kvtier.memory.keys import ChunkKey

KEY_BYTES, SALT_BYTES, TENANT_BYTES = 32, 12, 6
MAX_KEYS, MAX_KEY_NUMBER = 1000, 65_535
MAX_FILE_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
"""Encrypted at a time, in 0.3 ms. The library keeps the GIL meanwhile."""
TENANTS = 1024
"""Tenants whose keys are remembered."""

_LINE = re.compile(r"(\d{1,5})\s+([0-9a-fA-F]{64})")
_NONCE = bytes(12)


class Keys:
    """The keys of a tier. Thread-safe."""

    def __init__(self, keys: dict[int, bytes]) -> None:
        """``keys``: by number; the first encrypts."""
        self.current = next(iter(keys))
        self._keys = keys
        self._of_marks = _derived(keys[self.current], b"kvtier marks v1", b"")
        self._of_tenant: dict[tuple[int, bytes], bytes] = {}

    @classmethod
    def load(cls, path: Path, place: str) -> Keys:
        """Read a key file. ``place``: of the setting. Raises :class:`TierError`, which quotes no key."""
        try:
            with path.open() as file:
                # Of the file that is read: its path may lead to another one a moment later.
                status = os.fstat(file.fileno())
                lines = file.read(MAX_FILE_BYTES).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            how = _HOW if isinstance(error, FileNotFoundError) else "let `key_file` name a file of keys"
            raise TierError(f"{place}: cannot read the key file {path} ({error})", how) from None
        if status.st_uid not in (0, user := os.geteuid()):
            raise TierError(
                f"{place}: user {status.st_uid} owns the key file {path}, and could change it",
                f"as root, chown {user} {path}",
            )
        # A group may read it: that is how orchestrators mount secrets.
        if status.st_mode & 0o027:
            raise TierError(f"{place}: others may read or change the key file {path}", f"chmod 600 {path}")
        keys: dict[int, bytes] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            found = _LINE.fullmatch(line.strip())
            if found is None or not 1 <= int(found[1]) <= MAX_KEY_NUMBER:
                raise TierError(
                    f"{place}: line {number} of {path} is not a number from 1 to {MAX_KEY_NUMBER} and a key "
                    "of 64 hexadecimal digits",
                    "correct it; `openssl rand -hex 32` prints a new key",
                )
            if int(found[1]) in keys:
                raise TierError(
                    f"{place}: line {number} of {path} has the number {found[1]} of a line above",
                    "give one of the keys another number: the one that has encrypted nothing yet",
                )
            keys[int(found[1])] = bytes.fromhex(found[2])
        if not 1 <= len(keys) <= MAX_KEYS:
            raise TierError(f"{place}: {path} has {len(keys)} keys, not 1 to {MAX_KEYS}", _HOW)
        return cls(keys)

    def encrypt(
        self, header: ChunkHeader, codec: int, tenant: bytes, source: memoryview, target: memoryview
    ) -> Encryption:
        """Encrypt a payload into ``target``, which is as long, and may be ``source``.

        ``tenant``: see :meth:`mark_of`.
        """
        used = Encryption(self.current, tenant, os.urandom(SALT_BYTES))
        cipher = Cipher(algorithms.AES(self._key(header.key, used)), modes.GCM(_NONCE)).encryptor()
        _run(cipher, StoredHeader.authenticated(header, codec, len(source), used), source, target)
        return used._replace(tag=cipher.tag)

    def mark_of(self, tenant: str) -> bytes:
        """Return what identifies a tenant in headers to those who have the first key; zeros without one."""
        if not tenant:
            return bytes(TENANT_BYTES)
        return blake3(tenant.encode(), key=self._of_marks).digest(TENANT_BYTES)

    def encryption_of(self, stored: StoredHeader) -> Encryption:
        """Return how an object was encrypted. Raises :class:`UnreadableChunk` if not with a known key."""
        used = stored.encryption
        if used is None:
            raise UnreadableChunk("is not encrypted, but the tier has `encrypt`")
        if used.key_number not in self._keys:
            raise UnreadableChunk(
                "is encrypted with key {}, which the key file does not have", used.key_number
            )
        return used

    def decrypt(self, stored: StoredHeader, source: memoryview, target: memoryview) -> None:
        """Decrypt a payload into ``target``, which is as long, and may be ``source``.

        Raises :class:`UnreadableChunk` if the key is not known, or another one, or anything was changed.
        """
        used = self.encryption_of(stored)
        aes, mode = algorithms.AES(self._key(stored.chunk.key, used)), modes.GCM(_NONCE, used.tag)
        authenticated = StoredHeader.authenticated(stored.chunk, stored.codec, len(source), used)
        try:
            _run(Cipher(aes, mode).decryptor(), authenticated, source, target)
        except InvalidTag:
            raise UnreadableChunk(
                "was not encrypted with key {} of the key file, or changed", used.key_number
            ) from None

    def _key(self, chunk: ChunkKey, used: Encryption) -> bytes:
        tenant = used.key_number, used.tenant
        of_tenant = self._of_tenant.get(tenant)
        if of_tenant is None:
            of_tenant = _derived(self._keys[used.key_number], b"kvtier tenant v1" + used.tenant, b"")
            if len(self._of_tenant) >= TENANTS:
                self._of_tenant.clear()
            self._of_tenant[tenant] = of_tenant
        return _derived(of_tenant, b"kvtier object v1" + chunk, used.salt)


def _run(cipher: AEADCipherContext, authenticated: bytes, source: memoryview, target: memoryview) -> None:
    cipher.authenticate_additional_data(authenticated)
    for start in range(0, len(source), PIECE_BYTES):
        if start:
            let_others_run()
        piece = slice(start, start + PIECE_BYTES)
        cipher.update_into(source[piece], target[piece])
    cipher.finalize()


def _derived(key: bytes, info: bytes, salt: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(key)


_HOW = "make one with (umask 077; echo 1 $(openssl rand -hex 32) > FILE)"
