"""What ``codec: lossless`` would bring to a measured tier."""

from __future__ import annotations

import os
import statistics
import time

from kvtier import native
from kvtier.lab.bench.rows import Direction
from kvtier.memory.header import ChunkHeader
from kvtier.memory.keys import KEY_BYTES, ChunkKey
from kvtier.tiers.codec import CodecSettings
from kvtier.tiers.lossless import LosslessCodec
from kvtier.units import MIB

SAMPLE_BYTES = 8 * MIB
RUNS = 5
_HIGH_BYTES = bytes((value & 1) << 7 | 56 + (value >> 1).bit_length() for value in range(256))
"""Signs and exponents of bfloat16 by a random byte: half of them have the largest exponents, and so on."""


def remark_on(reads: Direction) -> str:
    """Return how much faster the measured reads would be; empty without the native core. Takes 50 ms."""
    if not native.available():
        return ""
    codec, source = LosslessCodec(CodecSettings(type="lossless")), like_kv(SAMPLE_BYTES)
    key = ChunkKey(bytes(KEY_BYTES))
    header = ChunkHeader(key, key, bytes(32), len(source))
    encoded, decoded = bytearray(codec.max_encoded_bytes(header, None)), bytearray(len(source))
    length = codec.encode(header, None, memoryview(source), memoryview(encoded))
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        codec.decode(header, None, memoryview(encoded)[:length], memoryview(decoded))
        seconds.append(time.perf_counter() - began)
    speed = SAMPLE_BYTES / statistics.median(seconds) / 1e9
    gain = 1 / (length / SAMPLE_BYTES + reads.gb_s / speed)
    return (
        f"codec: lossless would store {SAMPLE_BYTES / length:.1f} times as much KV of bfloat16, and read it "
        f"{gain:.2f} times as fast (it decodes {speed:.1f} GB/s in one thread)"
    )


def like_kv(length: int) -> bytes:
    """Return bytes that are distributed like KV of bfloat16: random mantissas, and few exponents."""
    values = bytearray(os.urandom(length))
    values[1::2] = values[1::2].translate(_HIGH_BYTES)
    return bytes(values)
