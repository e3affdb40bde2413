r"""Chunk header: format, checksum and validation.

A *chunk object* is header and payload in one contiguous run of bytes, padded to whole pages: one value in a
pool, one file on disk, one aligned slice of the arena. A backend transfers it with a single call, also with
O_DIRECT, and it can never mix two writes.

======  =====  ==========================================================
offset  bytes  field (little-endian)
======  =====  ==========================================================
0       8      magic ``KVTIER\r\n``
8       2      version: 1, or 2 if a codec has encoded the payload
10      2      checksum algorithm: 0 none, 1 XXH3-128
12      2      version 2: code of the codec; else zero
14      2      reserved, zero
16      8      payload length in bytes, before encoding
24      32     key
56      32     parent key
88      32     namespace
120     16     checksum of the payload as stored
136     8      version 2 only: length of the stored payload in bytes
        8      XXH3-64 of the preceding bytes
        …      reserved, zero, up to 256 bytes
======  =====  ==========================================================

Objects in the arena have version 1. The namespace includes the fingerprint of the layout
(:func:`kvtier.memory.layout.namespace`).
XXH3: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_128_digest

from kvtier import native
from kvtier.errors import CorruptChunk
from kvtier.memory.keys import ChunkKey

MAGIC = b"KVTIER\r\n"
VERSION = 1
ENCODED_VERSION = 2
"""A reader of version 1 must not take an encoded payload for KV."""
HEADER_BYTES = 256
OBJECT_ALIGNMENT = 4096
IDENTITY = 0
"""Code of payloads that are stored as they are."""
NATIVE_CHECKSUM_BYTES = 4096
"""From this size on, the native core computes the checksum and releases the GIL.

The xxhash package holds the GIL, for 3 ms per 32 MiB.
"""

_START = struct.Struct("<8sH")
_FIELDS = struct.Struct("<8sHHIQ32s32s32s16s")
_ENCODED_FIELDS = struct.Struct("<8sHHHHQ32s32s32s16sQ")
_NO_CHECKSUM = bytes(16)
_RESERVED = bytes(HEADER_BYTES)
_ALGORITHM_NONE, _ALGORITHM_XXH3 = 0, 1
_ALGORITHM_AT = 10


def object_bytes(payload_bytes: int) -> int:
    """Return the size of a chunk object: header and payload, padded to whole 4 KiB pages."""
    return -(-(HEADER_BYTES + payload_bytes) // OBJECT_ALIGNMENT) * OBJECT_ALIGNMENT


def is_sealed(memory: memoryview, offset: int = 0) -> bool:
    """Whether the header at ``offset`` has a payload checksum. Checks nothing else; takes 0.1 µs."""
    return memory[offset + _ALGORITHM_AT] == _ALGORITHM_XXH3


class ChunkHeader(NamedTuple):
    """The fields of a chunk header."""

    key: ChunkKey
    parent: ChunkKey
    namespace: bytes
    payload_bytes: int

    def packed(self, checksum: bytes | None = None) -> bytes:
        """Return this header as :data:`HEADER_BYTES` bytes, unsealed if ``checksum`` is ``None``."""
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            _ALGORITHM_NONE if checksum is None else _ALGORITHM_XXH3,
            0,
            self.payload_bytes,
            self.key,
            self.parent,
            self.namespace,
            _NO_CHECKSUM if checksum is None else checksum,
        )
        return (fields + xxh3_64_digest(fields)).ljust(HEADER_BYTES, b"\0")

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
    def verify(cls, chunk: memoryview, key: ChunkKey) -> ChunkHeader:
        """Verify header and payload of the chunk object of ``key``. Raises :class:`CorruptChunk`."""
        return _plain(StoredHeader.verify(chunk, key)).chunk


class StoredHeader(NamedTuple):
    """The header of a chunk object in a medium, whose payload may be encoded."""

    chunk: ChunkHeader
    codec: int
    """The code of the codec, or :data:`IDENTITY`."""
    stored_bytes: int
    """The length of the payload as it is stored."""
    checksum: bytes | None
    """Of the payload as it is stored."""

    @property
    def object_bytes(self) -> int:
        """The size of the chunk object in the medium."""
        return object_bytes(self.stored_bytes)

    @classmethod
    def seal(
        cls, target: memoryview, header: ChunkHeader, codec: int, stored_bytes: int, *, checksum: bool
    ) -> None:
        """Write the header of an encoded payload in front of it."""
        payload = target[HEADER_BYTES : HEADER_BYTES + stored_bytes]
        fields = _ENCODED_FIELDS.pack(
            MAGIC,
            ENCODED_VERSION,
            _ALGORITHM_XXH3 if checksum else _ALGORITHM_NONE,
            codec,
            0,
            header.payload_bytes,
            header.key,
            header.parent,
            header.namespace,
            _checksum(payload) if checksum else _NO_CHECKSUM,
            stored_bytes,
        )
        target[:HEADER_BYTES] = (fields + xxh3_64_digest(fields)).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def parse(cls, head: bytes | memoryview) -> StoredHeader:
        """Parse a header and verify its checksum. Raises :class:`CorruptChunk`."""
        if len(head) < HEADER_BYTES:
            raise CorruptChunk("is {} bytes, shorter than a header", len(head))
        head = bytes(head[:HEADER_BYTES])  # A copy, so that all checks see the same bytes.
        magic, version = _START.unpack_from(head)
        if magic != MAGIC:
            raise CorruptChunk("does not begin with kvtier's magic")
        if version not in (VERSION, ENCODED_VERSION):
            raise CorruptChunk("has format version {}, not {} or {}", version, VERSION, ENCODED_VERSION)
        layout = _FIELDS if version == VERSION else _ENCODED_FIELDS
        fields = head[: layout.size]
        if head[layout.size : layout.size + 8] != xxh3_64_digest(fields):
            raise CorruptChunk("has a header that does not match its checksum")
        if head[layout.size + 8 :] != _RESERVED[layout.size + 8 :]:
            raise CorruptChunk("has reserved bytes set")
        if version == VERSION:
            _, _, algorithm, _, payload_bytes, key, parent, space, checksum = layout.unpack(fields)
            codec, stored_bytes = IDENTITY, payload_bytes
        else:
            _, _, algorithm, codec, _, payload_bytes, key, parent, space, checksum, stored_bytes = (
                layout.unpack(fields)
            )
        if algorithm not in (_ALGORITHM_NONE, _ALGORITHM_XXH3):
            raise CorruptChunk("has unknown checksum algorithm {}", algorithm)
        header = ChunkHeader(ChunkKey(key), ChunkKey(parent), space, payload_bytes)
        return cls(header, codec, stored_bytes, checksum if algorithm == _ALGORITHM_XXH3 else None)

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
    def verify(cls, chunk: memoryview, key: ChunkKey) -> StoredHeader:
        """Verify header and payload of the chunk object of ``key``. Raises :class:`CorruptChunk`."""
        stored = cls.read(chunk, key)
        payload = chunk[HEADER_BYTES : HEADER_BYTES + stored.stored_bytes]
        if stored.checksum is not None and _checksum(payload) != stored.checksum:
            raise CorruptChunk("has a payload that does not match its checksum")
        return stored


def write_headers(memory: memoryview, objects: Iterable[tuple[int, ChunkHeader]]) -> None:
    """Write each header at its offset, unsealed. Takes less than 1 µs per header."""
    rest = bytes(HEADER_BYTES - _FIELDS.size - 8)
    for offset, (key, parent, space, payload_bytes) in objects:
        fields = _FIELDS.pack(
            MAGIC, VERSION, _ALGORITHM_NONE, 0, payload_bytes, key, parent, space, _NO_CHECKSUM
        )
        memory[offset : offset + HEADER_BYTES] = fields + xxh3_64_digest(fields) + rest


def _checksum(payload: memoryview) -> bytes:
    if len(payload) >= NATIVE_CHECKSUM_BYTES and native.available():
        return native.core.xxh3_128(payload)
    return xxh3_128_digest(payload)


def _plain(stored: StoredHeader) -> StoredHeader:
    if stored.codec != IDENTITY:
        raise CorruptChunk("is encoded by codec {}", stored.codec)
    return stored
