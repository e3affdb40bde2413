"""The codecs ``fp8``, ``int8`` and ``int4``: 8 or 4 bits for each value, for engines that accept loss."""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import ClassVar

from kvtier import native
from kvtier.memory.header import ChunkHeader
from kvtier.memory.layout import ChunkLayout, Span
from kvtier.tiers.codec import Codec
from kvtier.tiers.lossless import require_native

BYTES, TYPES = 0, {"bfloat16": (1, 2), "float16": (2, 2), "float32": (3, 4)}
"""Numbers of types in the encoded form: what is stored as it is, and the others with their bytes."""
MIN_WIDTH, MAX_WIDTH = 16, 128
UNKNOWN_WIDTH = 32
"""How many consecutive values have a scale in common if the order of values is unknown."""


class LossyCodec(Codec):
    """A scale for each group of values, and with integers an offset.

    A group has values of one token or of one channel, whichever loses less: keys lose less by channel, values
    by token (KIVI, arXiv 2402.02750). States, values of 8 bits, and values that are not finite are stored as
    they are. The format is that of ``csrc/src/codec/lossy.cpp``, which encodes and decodes without the GIL.
    """

    lossy: ClassVar[bool] = True

    def max_encoded_bytes(self, chunk: ChunkHeader, layout: ChunkLayout | None) -> int:
        """Return the length of the payload, and of what describes it."""
        length = chunk.payload_bytes
        return native.core.lossy_bound(_table(chunk, layout), length) if native.available() else length

    def encode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> int:
        """Encode a payload; as it is, unless ``layout`` accepts loss. Raises as ``lossless`` does."""
        require_native()
        return native.core.lossy_encode(self.code, _table(chunk, layout), source, target)

    def decode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> None:
        """Decode what ``encode`` has written. Raises as ``lossless`` does."""
        require_native()
        native.core.lossy_decode(source, target)


class Fp8Codec(LossyCodec):
    """Floating-point values of 8 bits (e4m3)."""

    code: ClassVar[int] = 2
    usual_ratio: ClassVar[float] = 1.9


class Int8Codec(LossyCodec):
    """Integers of 8 bits."""

    code: ClassVar[int] = 3
    usual_ratio: ClassVar[float] = 1.9


class Int4Codec(LossyCodec):
    """Integers of 4 bits."""

    code: ClassVar[int] = 4
    usual_ratio: ClassVar[float] = 3.2


def _table(chunk: ChunkHeader, layout: ChunkLayout | None) -> bytes:
    """Describe the pages of a payload, as its encoded form does."""
    length = chunk.payload_bytes
    if layout is None or not layout.accepts_loss or length != layout.payload_bytes(chunk.tokens):
        return struct.pack("<6I", BYTES, 1, length, 0, 0, 0) if length else b""
    return _sections(layout, chunk.tokens)


@lru_cache(maxsize=64)
def _sections(layout: ChunkLayout, tokens: int) -> bytes:
    ranks = {share: rank for rank, share in enumerate(layout.shares(tokens))}.values()
    spans = [span for rank in ranks for span in layout.spans(tokens, rank) if span.pages and span.page_bytes]
    return b"".join(struct.pack("<6I", *_section(layout, span)) for span in spans)


def _section(layout: ChunkLayout, span: Span) -> tuple[int, ...]:
    """Return the type, number and bytes of pages, and their rows, values of a row, and width."""
    values = layout.values[span.group]
    kind, size = TYPES.get(values.dtype, (BYTES, 1))
    count, rest = divmod(span.page_bytes, size)
    rows, row, width = values.rows, values.row, values.width
    if not rows or not row or count % (rows * row):
        row = width = math.gcd(count, UNKNOWN_WIDTH)
        rows = count // row
    if kind == BYTES or rest or not MIN_WIDTH <= width <= MAX_WIDTH or row % width:
        return BYTES, span.pages, span.page_bytes, 0, 0, 0
    return kind, span.pages, span.page_bytes, rows, row, width
