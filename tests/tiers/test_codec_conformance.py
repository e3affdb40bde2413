"""The conformance suite of codecs finds broken ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from kvtier.memory.header import ChunkHeader
from kvtier.memory.layout import ChunkLayout
from kvtier.testing.codec import CodecConformance
from kvtier.tiers.codec import IdentityCodec


class WritesBehindTheTarget(IdentityCodec):
    def decode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(target))
        ctypes.memset(address + len(target), 0, 1)
        super().decode(chunk, layout, source, target)


class ChangesWhatItReads(IdentityCodec):
    def decode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> None:
        if len(source):
            source[0] ^= 1
        super().decode(chunk, layout, source, target)


class ExceedsItsBound(IdentityCodec):
    def max_encoded_bytes(self, chunk: ChunkHeader, layout: ChunkLayout | None) -> int:
        return chunk.payload_bytes

    def encode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> int:
        super().encode(chunk, layout, source, target)
        return len(source) + 1


def damaged(suite: CodecConformance) -> None:
    suite.test_damaged_payload_is_refused_or_stays_in_bounds("foreign")


def refused(suite: CodecConformance) -> None:
    # Of another length: a slice assignment of the codec fails, after it has written behind the target.
    suite.test_damaged_payload_is_refused_or_stays_in_bounds("longer")


def round_trip(suite: CodecConformance) -> None:
    suite.test_payload_survives(None, "noise", 4096)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (WritesBehindTheTarget, damaged),
        (WritesBehindTheTarget, refused),
        (ChangesWhatItReads, damaged),
        (ChangesWhatItReads, round_trip),
        (ExceedsItsBound, round_trip),
    ],
)
def test_broken_codec_is_found(broken: type[IdentityCodec], test: Callable[[CodecConformance], None]) -> None:
    suite = type("Suite", (CodecConformance,), {"codec": broken})()
    with pytest.raises(AssertionError):
        test(suite)
