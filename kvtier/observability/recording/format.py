"""Format of the files of a recording.

A file is :data:`MAGIC` and frames: the length (u32, little-endian) and the XXH32 checksum (u32) of a body of
MessagePack, and the body. The first body is a :class:`Header`, each other one a :class:`Record` or, since
version 2, an :class:`EndRecord`. So a file is readable up to its last whole frame, wherever its writer was
killed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from xxhash import xxh32_intdigest

from kvtier.catalog.endings import MAX_SIGNATURE
from kvtier.catalog.hints import ChunkHints
from kvtier.errors import KVTierError

MAGIC = b"kvtier recording\n"
VERSION = 2
ID_BYTES = 16
NUMBER_BYTES = 8
"""Of the number of a chunk."""
MAX_BODY_BYTES = 512 << 10
"""So a prompt of up to 65,000 chunks is recorded."""
FRAME = struct.Struct("<II")
MAX_SECONDS = 4_000_000_000
"""Above any time since 1970. The catalog counts seconds in 32 bits."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Time = Annotated[float, msgspec.Meta(ge=0, lt=MAX_SECONDS)]

_encoder = msgspec.msgpack.Encoder()


class RecordingError(KVTierError):
    """A file is not a recording, or is corrupt. The message names it, the record and the reason."""


class Header(msgspec.Struct, frozen=True):
    """What all files of a recording have in common."""

    version: int
    id: Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    """Random. The chunks of two recordings have different numbers, because each has a key of its own."""
    started: float
    """In seconds since 1970."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One lookup of an engine."""

    time: Time
    """In seconds since the recording began."""
    tokens: Count
    """Tokens in all of its chunks."""
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]
    """Tokens in each chunk but the last, which may have fewer."""
    chunk_bytes: Count
    """Size of a whole chunk object."""
    chunks: bytes
    """The numbers of the chunks, u64 each, little-endian."""
    hints: ChunkHints | None = None


# Not a struct: msgspec distinguishes an object from the array of a Record, but not two structs without tags.
@dataclass(frozen=True, slots=True)
class EndRecord:
    """The end of the answer to a prompt that was looked up before, maybe in an older file."""

    time: Time
    """In seconds since the recording began."""
    chunk: Annotated[bytes, msgspec.Meta(min_length=NUMBER_BYTES, max_length=NUMBER_BYTES)]
    """The number of the prompt's last chunk."""
    signature: Annotated[bytes, msgspec.Meta(max_length=MAX_SIGNATURE * NUMBER_BYTES)]
    """How it ended: numbers like those of chunks, from the general to the specific. Empty if unknown."""


def older(path: Path, number: int) -> Path:
    """Return the name of the file that a recording has begun ``number`` files before the one at ``path``."""
    return path.with_name(f"{path.name}.{number}")


def encode_frame(content: Header | Record | EndRecord) -> bytes | None:
    """Return the frame of a body; ``None`` if it is over :data:`MAX_BODY_BYTES`."""
    body = _encoder.encode(content)
    if len(body) > MAX_BODY_BYTES:
        return None
    return FRAME.pack(len(body), xxh32_intdigest(body)) + body
