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
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_128_digest

from kvtier.errors import CorruptChunk
from kvtier.keys import ChunkKey

MAGIC = b"KVTIER\r\n"
VERSION = 1
HEADER_BYTES = 256
OBJECT_ALIGNMENT = 4096

_FIELDS = struct.Struct("<8sHHIQ32s32s32s16s")
_NO_CHECKSUM = bytes(16)
_RESERVED = bytes(112)
_ALGORITHM_NONE, _ALGORITHM_XXH3 = 0, 1
_ALGORITHM_AT = 10
_CHECKSUM_AT = slice(120, 136)


def object_bytes(payload_bytes: int) -> int:
    """The size of a chunk object: header and payload, padded to whole 4 KiB pages."""
    return -(-(HEADER_BYTES + payload_bytes) // OBJECT_ALIGNMENT) * OBJECT_ALIGNMENT


def is_sealed(memory: memoryview, offset: int = 0) -> bool:
    """Whether the header at ``offset`` has a checksum of its payload. Looks at nothing else, in 0.1 µs."""
    return memory[offset + _ALGORITHM_AT] == _ALGORITHM_XXH3


def checksum_of(chunk: memoryview) -> bytes:
    """The checksum that a sealed chunk's header has, whether it matches the payload or not."""
    return bytes(chunk[_CHECKSUM_AT])


class ChunkHeader(NamedTuple):
    """What a chunk says of itself."""

    key: ChunkKey
    parent: ChunkKey
    namespace: bytes
    payload_bytes: int

    def seal(self, chunk: memoryview, *, checksum: bool = True) -> None:
        """Write this header in front of the payload that ``chunk`` already holds.

        Reads the whole payload where ``checksum`` is set: about 0.05 ms a MiB, without the GIL's
        release, so keep it off the event loop for large chunks.
        """
        payload = chunk[HEADER_BYTES : HEADER_BYTES + self.payload_bytes]
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            _ALGORITHM_XXH3 if checksum else _ALGORITHM_NONE,
            0,
            self.payload_bytes,
            self.key,
            self.parent,
            self.namespace,
            xxh3_128_digest(payload) if checksum else _NO_CHECKSUM,
        )
        header = (fields + xxh3_64_digest(fields)).ljust(HEADER_BYTES, b"\0")
        chunk[:HEADER_BYTES] = header

    @classmethod
    def parse(cls, head: bytes | memoryview) -> ChunkHeader:
        """Read a header, checking it against itself alone. Raises :class:`CorruptChunk`."""
        return _parse(head)[0]

    @classmethod
    def verify(cls, chunk: memoryview, key: ChunkKey) -> ChunkHeader:
        """Check a whole chunk object that was asked for by ``key``. Raises :class:`CorruptChunk`."""
        header, algorithm, checksum = _parse(chunk)
        if header.key != key:
            raise CorruptChunk(f"holds chunk {header.key.hex()[:16]}, not {key.hex()[:16]}")
        if object_bytes(header.payload_bytes) != len(chunk):
            raise CorruptChunk(f"is {len(chunk)} bytes for a payload of {header.payload_bytes}")
        payload = chunk[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        if algorithm == _ALGORITHM_XXH3 and xxh3_128_digest(payload) != checksum:
            raise CorruptChunk("has a payload that does not match its checksum")
        return header


def _parse(head: bytes | memoryview) -> tuple[ChunkHeader, int, bytes]:
    if len(head) < HEADER_BYTES:
        raise CorruptChunk(f"is {len(head)} bytes, shorter than a header")
    fields = bytes(head[: _FIELDS.size])
    magic, version, algorithm, _, payload_bytes, key, parent, space, checksum = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise CorruptChunk("does not begin with kvtier's magic")
    if version != VERSION:
        raise CorruptChunk(f"has format version {version}, not {VERSION}")
    if bytes(head[_FIELDS.size : _FIELDS.size + 8]) != xxh3_64_digest(fields):
        raise CorruptChunk("has a header that does not match its checksum")
    if bytes(head[_FIELDS.size + 8 : HEADER_BYTES]) != _RESERVED:
        raise CorruptChunk("has bytes set that are reserved")
    if algorithm not in (_ALGORITHM_NONE, _ALGORITHM_XXH3):
        raise CorruptChunk(f"has unknown checksum algorithm {algorithm}")
    return ChunkHeader(ChunkKey(key), ChunkKey(parent), space, payload_bytes), algorithm, checksum
