r"""The header that every chunk carries outside the arena, and the checks that make a misread impossible.

A *chunk object* is header and payload in one run of bytes, padded to whole pages: one value in a
pool, one file on a disk, one aligned slice of the arena. So a backend moves it with one call, with
O_DIRECT too, and it can never be half of one write and half of another.

======  =====  ==========================================================
offset  bytes  field (little-endian)
======  =====  ==========================================================
0       8      magic ``KVTIER\r\n``
8       2      version
10      2      checksum algorithm: 0 none, 1 XXH3-128
12      4      reserved, zero
16      8      payload length in bytes
24      32     key
56      32     parent key
88      32     namespace
120     16     checksum of the payload
136     8      XXH3-64 of the 136 bytes before
144     112    reserved, zero
======  =====  ==========================================================

The namespace holds the fingerprint of the layout (:func:`kvtier.layout.namespace`).
XXH3: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_128_digest

from kvtier import native
from kvtier.errors import CorruptChunk
from kvtier.keys import ChunkKey

MAGIC = b"KVTIER\r\n"
VERSION = 1
HEADER_BYTES = 256
OBJECT_ALIGNMENT = 4096
NATIVE_CHECKSUM_BYTES = 4096
"""From here on a checksum is computed without the GIL, which the library keeps: 3 ms for 32 MiB."""

_FIELDS = struct.Struct("<8sHHIQ32s32s32s16s")
_NO_CHECKSUM = bytes(16)
_RESERVED = bytes(112)
_ALGORITHM_NONE, _ALGORITHM_XXH3 = 0, 1
_ALGORITHM_AT = 10


def object_bytes(payload_bytes: int) -> int:
    """The size of a chunk object: header and payload, padded to whole 4 KiB pages."""
    return -(-(HEADER_BYTES + payload_bytes) // OBJECT_ALIGNMENT) * OBJECT_ALIGNMENT


def is_sealed(memory: memoryview, offset: int = 0) -> bool:
    """Whether the header at ``offset`` has a checksum of its payload. Looks at nothing else, in 0.1 µs."""
    return memory[offset + _ALGORITHM_AT] == _ALGORITHM_XXH3


class ChunkHeader(NamedTuple):
    """What a chunk says of itself."""

    key: ChunkKey
    parent: ChunkKey
    namespace: bytes
    payload_bytes: int

    def packed(self, checksum: bytes | None = None) -> bytes:
        """Return the :data:`HEADER_BYTES` bytes of this header; without ``checksum`` it is unsealed."""
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
        """Return the checksum of the payload behind this header in ``chunk``.

        Takes about 0.05 ms a MiB, so keep it off the event loop for large chunks. With the native core,
        payloads from :data:`NATIVE_CHECKSUM_BYTES` on are read without the GIL.
        """
        return _checksum(chunk[HEADER_BYTES : HEADER_BYTES + self.payload_bytes])

    def seal(self, chunk: memoryview, *, checksum: bool = True) -> None:
        """Write this header in front of the payload that ``chunk`` already holds.

        Only for memory that no other thread can see. What others may read is sealed by a
        :class:`kvtier.backends.sealer.Sealer`.
        """
        chunk[:HEADER_BYTES] = self.packed(self.checksum(chunk) if checksum else None)

    @classmethod
    def parse(cls, head: bytes | memoryview) -> ChunkHeader:
        """Read a header, checking it against itself alone. Raises :class:`CorruptChunk`."""
        return _parse(head)[0]

    @classmethod
    def read(cls, chunk: memoryview, key: ChunkKey) -> tuple[ChunkHeader, bytes | None]:
        """Return the header of a whole chunk object of ``key``, and its checksum; ``None`` if it is unsealed.

        Does not look at the payload. Raises :class:`CorruptChunk`.
        """
        header, algorithm, checksum = _parse(chunk)
        if header.key != key:
            raise CorruptChunk(f"holds chunk {header.key.hex()[:16]}, not {key.hex()[:16]}")
        if object_bytes(header.payload_bytes) != len(chunk):
            raise CorruptChunk(f"is {len(chunk)} bytes for a payload of {header.payload_bytes}")
        return header, checksum if algorithm == _ALGORITHM_XXH3 else None

    @classmethod
    def verify(cls, chunk: memoryview, key: ChunkKey) -> ChunkHeader:
        """Check a whole chunk object that was asked for by ``key``. Raises :class:`CorruptChunk`."""
        header, checksum = cls.read(chunk, key)
        if checksum is not None and header.checksum(chunk) != checksum:
            raise CorruptChunk("has a payload that does not match its checksum")
        return header


def begin(memory: memoryview, objects: Iterable[tuple[int, ChunkHeader]]) -> None:
    """Write each header at its offset, as an unsealed :meth:`ChunkHeader.seal` does: under 1 µs each."""
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


def _parse(head: bytes | memoryview) -> tuple[ChunkHeader, int, bytes]:
    if len(head) < HEADER_BYTES:
        raise CorruptChunk(f"is {len(head)} bytes, shorter than a header")
    head = bytes(head[:HEADER_BYTES])  # One copy, so that all checks are of the same bytes.
    fields = head[: _FIELDS.size]
    magic, version, algorithm, _, payload_bytes, key, parent, space, checksum = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise CorruptChunk("does not begin with kvtier's magic")
    if version != VERSION:
        raise CorruptChunk(f"has format version {version}, not {VERSION}")
    if head[_FIELDS.size : _FIELDS.size + 8] != xxh3_64_digest(fields):
        raise CorruptChunk("has a header that does not match its checksum")
    if head[_FIELDS.size + 8 :] != _RESERVED:
        raise CorruptChunk("has bytes set that are reserved")
    if algorithm not in (_ALGORITHM_NONE, _ALGORITHM_XXH3):
        raise CorruptChunk(f"has unknown checksum algorithm {algorithm}")
    return ChunkHeader(ChunkKey(key), ChunkKey(parent), space, payload_bytes), algorithm, checksum
