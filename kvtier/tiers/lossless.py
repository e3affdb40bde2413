"""The codec ``lossless``: fewer bits for the exponents of KV, which take few values."""

from __future__ import annotations

from typing import ClassVar

from kvtier import native
from kvtier.errors import UnreadableChunk
from kvtier.memory.header import ChunkHeader
from kvtier.memory.layout import ChunkLayout
from kvtier.tiers.codec import Codec


class LosslessCodec(Codec):
    """Exponents with 1 to 7 bits per value, and the rest of each value as it is.

    Does not need the type of the values: bfloat16 becomes 1.4 times smaller, float16, float32 and 8-bit
    types 1.1 to 1.2 times. The format is that of ``csrc/src/codec/lossless.cpp``, which encodes and decodes
    without the GIL. "ZipNN" (arXiv 2411.05239) separates exponents likewise, and codes them with Huffman's
    codes.
    """

    code: ClassVar[int] = 1
    usual_ratio: ClassVar[float] = 1.4

    def max_encoded_bytes(self, chunk: ChunkHeader, layout: ChunkLayout | None) -> int:
        """Return the length of the payload, with room to work in."""
        length = chunk.payload_bytes
        return native.core.lossless_bound(length) if native.available() else length

    def encode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> int:
        """Encode a payload. Raises :class:`UnreadableChunk` without the native core."""
        require_native()
        return native.core.lossless_encode(source, target)

    def decode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> None:
        """Decode what ``encode`` has written.

        Raises :class:`ValueError` for anything else, and :class:`UnreadableChunk` without the native core.
        """
        require_native()
        native.core.lossless_decode(source, target)


def require_native() -> None:
    """Raise :class:`UnreadableChunk` without the native core."""
    if not native.available():
        raise UnreadableChunk("needs the native core, which is {}", native.summary())
