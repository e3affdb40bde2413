"""Payloads compressed with zlib, in parts."""

from __future__ import annotations

import struct
import zlib
from typing import ClassVar

from pydantic import Field

from kvtier import hookimpl
from kvtier.memory.header import ChunkHeader
from kvtier.memory.layout import ChunkLayout
from kvtier.tiers.codec import Codec, CodecSettings
from kvtier.units import Integer

_COUNT, _PART = struct.Struct("<I"), struct.Struct("<II")
"""The number of parts; the length of each part, before and after compression."""
PART_BYTES = 256 * 1024


class ZlibSettings(CodecSettings):
    """Settings of the codec ``zlib``."""

    level: Integer = Field(default=1, ge=1, le=9, description="1: fastest. 9: smallest.", examples=[1])


class ZlibCodec(Codec):
    """The payload in parts, so that no call holds more than a part twice."""

    code: ClassVar[int] = 7001
    settings_type = ZlibSettings

    def __init__(self, settings: ZlibSettings) -> None:
        super().__init__(settings)
        self._level = settings.level

    def max_encoded_bytes(self, chunk: ChunkHeader, layout: ChunkLayout | None) -> int:
        """Return the length plus zlib's worst case and a table of the parts."""
        length = chunk.payload_bytes
        parts = -(-length // PART_BYTES)
        return _COUNT.size + length + length // 1000 + parts * (_PART.size + 64)

    def encode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> int:
        """Compress each part. zlib releases the GIL."""
        starts = range(0, len(source), PART_BYTES)
        at = _COUNT.size + len(starts) * _PART.size
        _COUNT.pack_into(target, 0, len(starts))
        for number, start in enumerate(starts):
            part = source[start : start + PART_BYTES]
            packed = zlib.compress(part, self._level)
            _PART.pack_into(target, _COUNT.size + number * _PART.size, len(part), len(packed))
            target[at : at + len(packed)] = packed
            at += len(packed)
        return at

    def decode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> None:
        """Decompress each part. Raises ``ValueError`` and ``zlib.error``."""
        (count,) = _COUNT.unpack_from(source)
        at, filled = _COUNT.size + count * _PART.size, 0
        for number in range(count):
            length, packed = _PART.unpack_from(source, _COUNT.size + number * _PART.size)
            part = zlib.decompressobj().decompress(source[at : at + packed], length + 1)
            if len(part) != length or filled + length > len(target):
                raise ValueError("the parts do not have the recorded lengths")
            target[filled : filled + length] = part
            at, filled = at + packed, filled + length
        if (at, filled) != (len(source), len(target)):
            raise ValueError("the parts do not add up to the payload")


@hookimpl
def kvtier_codecs() -> dict[str, type[Codec]]:
    """Return the codec by its name."""
    return {"zlib": ZlibCodec}
