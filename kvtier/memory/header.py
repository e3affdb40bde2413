r"""Chunk header: format, checksum and validation.

A *chunk object* is header and payload in one contiguous run of bytes, padded to whole pages: one value in a
pool, one file on disk, one aligned slice of the arena. A backend transfers it with a single call, also with
O_DIRECT, and it can never mix two writes.

======  =====  ==========================================================
offset  bytes  field (little-endian)
======  =====  ==========================================================
0       8      magic ``KVTIER\r\n``
8       2      version: 3
10      2      checksum algorithm: 0 none, 1 XXH3-128
12      2      code of the codec of the payload; 0 for none
14      2      number of block hashes, up to 16
16      8      payload length in bytes, before encoding
24      8      payload length as stored
32      32     key
64      32     parent key
96      32     namespace
128     16     checksum of the payload as stored
144     256    block hashes of 16 bytes each
400     4      number of tokens, 0 if unknown
404     8      XXH3-64 of the preceding bytes, and of those that follow unless all are zero
412     2      number of the key of an encrypted payload; 0 for none
414     6      tenant, see :class:`Encryption`
420     12     random bytes, different for each object
432     16     tag of AES-GCM
======  =====  ==========================================================

Payloads in the arena are neither encoded nor encrypted. The namespace includes the fingerprint of the layout
(:func:`kvtier.memory.layout.namespace`). Block hashes are those of :func:`kvtier.memory.keys.block_hashes`.
XXH3: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_128_digest

from kvtier import native
from kvtier.errors import CorruptChunk, UnreadableChunk
from kvtier.memory.keys import BLOCK_HASH_BYTES, MAX_BLOCK_HASHES, ChunkKey

MAGIC = b"KVTIER\r\n"
VERSION = 3
HEADER_BYTES = 448
OBJECT_ALIGNMENT = 4096
IDENTITY = 0
"""Code of payloads that are stored as they are."""
NATIVE_CHECKSUM_BYTES = 4096
"""From this size on, the native core computes the checksum and releases the GIL.

The xxhash package holds the GIL, for 3 ms per 32 MiB.
"""

_START = struct.Struct("<8sH")
_HASHES = MAX_BLOCK_HASHES * BLOCK_HASH_BYTES
_FIELDS = struct.Struct(f"<8sHHHHQQ32s32s32s16s{_HASHES}sI")
_NO_CHECKSUM = bytes(16)
_ENCRYPTION = struct.Struct("<H6s12s16s")
_WITHOUT_TAG = struct.Struct("<H6s12s")
_NO_ENCRYPTION = bytes(_ENCRYPTION.size)
_PARENT = slice(64, 96)
_HASH_COUNT_AT, _HASHES_AT = 14, 144
_ALGORITHM_NONE, _ALGORITHM_XXH3 = 0, 1
_ALGORITHM_AT = 10


def object_bytes(payload_bytes: int) -> int:
    """Return the size of a chunk object: header and payload, padded to whole 4 KiB pages."""
    return -(-(HEADER_BYTES + payload_bytes) // OBJECT_ALIGNMENT) * OBJECT_ALIGNMENT


def is_sealed(memory: memoryview, offset: int = 0) -> bool:
    """Whether the header at ``offset`` has a payload checksum. Checks nothing else; takes 0.1 µs."""
    return memory[offset + _ALGORITHM_AT] == _ALGORITHM_XXH3


def parent_and_block_tags(chunk: memoryview) -> tuple[ChunkKey, bytes]:
    """Return the parent's key and one byte of each block hash, unchecked. Takes 0.5 µs."""
    stop = _HASHES_AT + chunk[_HASH_COUNT_AT] * BLOCK_HASH_BYTES
    return ChunkKey(bytes(chunk[_PARENT])), bytes(chunk[_HASHES_AT:stop:BLOCK_HASH_BYTES])


class Encryption(NamedTuple):
    """How a payload was encrypted; see :mod:`kvtier.tiers.encryption`."""

    key_number: int
    """1 to 65,535."""
    tenant: bytes
    """6 bytes that identify the tenant; zeros without one."""
    salt: bytes
    """12 random bytes. Each object has a key of its own, derived with these."""
    tag: bytes = bytes(16)
    """Authenticates the payload and all that :meth:`StoredHeader.authenticated` returns."""


class ChunkHeader(NamedTuple):
    """The fields of a chunk header."""

    key: ChunkKey
    parent: ChunkKey
    namespace: bytes
    payload_bytes: int
    block_hashes: bytes = b""
    """Of the leading blocks, so that a prompt that leaves this chunk in its middle can use a part of it."""
    tokens: int = 0
    """How many tokens the blocks belong to, which decides where in the payload they are; 0 if unknown.

    The length of the payload is not sufficient: with an attention window, chunks of several lengths have as
    many bytes.
    """

    def packed(self, checksum: bytes | None = None) -> bytes:
        """Return this header as :data:`HEADER_BYTES` bytes, unsealed if ``checksum`` is ``None``."""
        return _packed(_fields(self, IDENTITY, self.payload_bytes, checksum))

    def checksum(self, chunk: memoryview) -> bytes:
        """Return the checksum of the payload that follows this header in ``chunk``.

        Takes about 0.05 ms per MiB: keep it off the event loop for large chunks. The native core releases the
        GIL for payloads of :data:`NATIVE_CHECKSUM_BYTES` or more.
        """
        return _checksum(chunk[HEADER_BYTES : HEADER_BYTES + self.payload_bytes])

    def seal(self, chunk: memoryview, *, checksum: bool = True) -> None:
        """Write this header in front of the payload in ``chunk``.

        Only for memory that no other thread reads. Shared memory is sealed by a
        :class:`kvtier.tiers.sealer.Sealer`.
        """
        chunk[:HEADER_BYTES] = self.packed(self.checksum(chunk) if checksum else None)

    @classmethod
    def parse(cls, head: bytes | memoryview) -> ChunkHeader:
        """Parse a header and verify its checksum. Raises :class:`CorruptChunk`, also if it is encoded."""
        return _plain(StoredHeader.parse(head)).chunk

    @classmethod
    def read(cls, chunk: memoryview, key: ChunkKey) -> tuple[ChunkHeader, bytes | None]:
        """Return the header of the chunk object of ``key`` and the payload checksum, ``None`` if unsealed.

        Does not read the payload. Raises :class:`CorruptChunk`.
        """
        stored = _plain(StoredHeader.read(chunk, key))
        return stored.chunk, stored.checksum

    @classmethod
    def verify(cls, chunk: memoryview, key: ChunkKey, *, hashed: bool = False) -> ChunkHeader:
        """Verify header and payload of the chunk object of ``key``. Raises :class:`CorruptChunk`.

        ``hashed``: the payload is known to have the checksum that is in the header.
        """
        return _plain(StoredHeader.verify(chunk, key, hashed=hashed)).chunk


class StoredHeader(NamedTuple):
    """The header of a chunk object in a medium, whose payload may be encoded."""

    chunk: ChunkHeader
    codec: int
    """The code of the codec, or :data:`IDENTITY`."""
    stored_bytes: int
    """The length of the payload as it is stored."""
    checksum: bytes | None
    """Of the payload as it is stored."""
    encryption: Encryption | None = None

    @property
    def object_bytes(self) -> int:
        """The size of the chunk object in the medium."""
        return object_bytes(self.stored_bytes)

    @classmethod
    def seal(
        cls,
        target: memoryview,
        header: ChunkHeader,
        codec: int,
        stored_bytes: int,
        *,
        checksum: bool,
        encryption: Encryption | None = None,
    ) -> None:
        """Write the header of an encoded payload in front of it."""
        digest = _checksum(target[HEADER_BYTES : HEADER_BYTES + stored_bytes]) if checksum else None
        target[:HEADER_BYTES] = _packed(_fields(header, codec, stored_bytes, digest), encryption)

    @staticmethod
    def authenticated(header: ChunkHeader, codec: int, stored_bytes: int, encryption: Encryption) -> bytes:
        """Return what the tag of an encrypted payload authenticates besides: all but tag and checksums."""
        return _fields(header, codec, stored_bytes, None) + _WITHOUT_TAG.pack(*encryption[:-1])

    @classmethod
    def parse(cls, head: bytes | memoryview) -> StoredHeader:
        """Parse a header and verify its checksum. Raises :class:`CorruptChunk`."""
        if len(head) < HEADER_BYTES:
            raise CorruptChunk("is {} bytes, shorter than a header", len(head))
        head = bytes(head[:HEADER_BYTES])  # A copy, so that all checks see the same bytes.
        magic, version = _START.unpack_from(head)
        if magic != MAGIC:
            raise CorruptChunk("does not begin with kvtier's magic")
        if version != VERSION:
            raise CorruptChunk("has format version {}, not {}", version, VERSION)
        fields, last = head[: _FIELDS.size], head[_FIELDS.size + 8 :]
        encryption = None if last == _NO_ENCRYPTION else Encryption(*_ENCRYPTION.unpack(last))
        if head[_FIELDS.size : _FIELDS.size + 8] != xxh3_64_digest(fields + (last if encryption else b"")):
            raise CorruptChunk("has a header that does not match its checksum")
        if encryption is not None and not encryption.key_number:
            raise CorruptChunk("is encrypted with key 0")
        _, _, algorithm, codec, count, payload_bytes, stored_bytes, *rest = _FIELDS.unpack(fields)
        key, parent, space, checksum, hashes, tokens = rest
        if count > MAX_BLOCK_HASHES:
            raise CorruptChunk("has {} block hashes, more than {}", count, MAX_BLOCK_HASHES)
        if codec == IDENTITY and stored_bytes != payload_bytes:
            raise CorruptChunk("has {} bytes of payload, stored as {}", payload_bytes, stored_bytes)
        if algorithm not in (_ALGORITHM_NONE, _ALGORITHM_XXH3):
            raise CorruptChunk("has unknown checksum algorithm {}", algorithm)
        blocks = hashes[: count * BLOCK_HASH_BYTES]
        header = ChunkHeader(ChunkKey(key), ChunkKey(parent), space, payload_bytes, blocks, tokens)
        sealed = checksum if algorithm == _ALGORITHM_XXH3 else None
        return cls(header, codec, stored_bytes, sealed, encryption)

    @classmethod
    def read(cls, chunk: memoryview, key: ChunkKey) -> StoredHeader:
        """Return the header of the chunk object of ``key``, without reading the payload.

        Raises :class:`CorruptChunk`.
        """
        stored = cls.parse(chunk)
        if stored.chunk.key != key:
            raise CorruptChunk("holds chunk {}, not {}", stored.chunk.key.hex()[:16], key.hex()[:16])
        if stored.object_bytes != len(chunk):
            raise CorruptChunk("is {} bytes for a payload of {}", len(chunk), stored.stored_bytes)
        return stored

    @classmethod
    def verify(cls, chunk: memoryview, key: ChunkKey, *, hashed: bool = False) -> StoredHeader:
        """Verify header and payload of the chunk object of ``key``; see :meth:`ChunkHeader.verify`."""
        stored = cls.read(chunk, key)
        payload = chunk[HEADER_BYTES : HEADER_BYTES + stored.stored_bytes]
        if stored.checksum is not None and not hashed and _checksum(payload) != stored.checksum:
            raise CorruptChunk("has a payload that does not match its checksum")
        return stored


def write_headers(memory: memoryview, objects: Iterable[tuple[int, ChunkHeader]]) -> None:
    """Write each header at its offset, unsealed. Takes less than 1 µs per header."""
    for offset, header in objects:
        memory[offset : offset + HEADER_BYTES] = _packed(
            _fields(header, IDENTITY, header.payload_bytes, None)
        )


def _packed(fields: bytes, encryption: Encryption | None = None) -> bytes:
    if encryption is None:
        return fields + xxh3_64_digest(fields) + _NO_ENCRYPTION
    rest = _ENCRYPTION.pack(*encryption)
    return fields + xxh3_64_digest(fields + rest) + rest


def _fields(header: ChunkHeader, codec: int, stored_bytes: int, checksum: bytes | None) -> bytes:
    key, parent, space, payload_bytes, hashes, tokens = header
    return _FIELDS.pack(
        MAGIC,
        VERSION,
        _ALGORITHM_NONE if checksum is None else _ALGORITHM_XXH3,
        codec,
        len(hashes) // BLOCK_HASH_BYTES,
        payload_bytes,
        stored_bytes,
        key,
        parent,
        space,
        checksum or _NO_CHECKSUM,
        hashes,
        tokens,
    )


def _checksum(payload: memoryview) -> bytes:
    if len(payload) >= NATIVE_CHECKSUM_BYTES and native.available():
        return native.core.xxh3_128(payload)
    return xxh3_128_digest(payload)


def _plain(stored: StoredHeader) -> StoredHeader:
    if stored.codec != IDENTITY:
        raise UnreadableChunk("is encoded by codec {}", stored.codec)
    if stored.encryption is not None:
        raise UnreadableChunk("is encrypted")
    return stored
