"""The codec conformance suite. Subclass :class:`CodecConformance` to run it with pytest.

::

    class TestMyCodec(CodecConformance):
        codec = MyCodec
        settings = {"level": 3}
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from kvtier.memory.header import ChunkHeader
from kvtier.memory.layout import ChunkLayout, GroupLayout, GroupValues
from kvtier.testing.backend import make_key
from kvtier.testing.noise import SENTINEL, noise
from kvtier.tiers.codec import Codec
from kvtier.units import MIB

LAYOUTS: dict[str, ChunkLayout | None] = {
    "unknown layout": None,
    "one layer": ChunkLayout(16, (GroupLayout(16, (4096,)),)),
    "layers, ranks and a window": ChunkLayout(
        64, (GroupLayout(16, (512, 512, 512)), GroupLayout(32, (1000,), window=16)), ranks=2, platform="bf16"
    ),
    "accepts loss": ChunkLayout(
        64, (GroupLayout(16, (4096, 4096)),), values=(GroupValues("bfloat16", 16, 128, 64),)
    ),
}
GUARD = 64
"""Bytes behind the target that must not be written."""


def contents(kind: str, length: int) -> bytes:
    """Return a payload: incompressible, constant, or like the values of a tensor."""
    if kind == "noise":
        return noise(b"codec", length)
    if kind == "zeros":
        return bytes(length)
    # bfloat16 of similar magnitude: noise in the low bytes, few values in the high ones.
    low = noise(b"low", (length + 1) // 2)
    return bytes(byte for value in low for byte in (value, 0x3F ^ (value & 0x80)))[:length]


def distance(one: bytes, other: bytes) -> float:
    """Return how far bfloat16 values are apart, as a part of the largest; infinite if they are no numbers."""
    pairs = [(one[at : at + 2], other[at : at + 2]) for at in range(0, len(one), 2)]
    numbers = [
        [struct.unpack("<f", b"\0\0" + half)[0] for half in pair] for pair in pairs if len(set(pair)) > 1
    ]
    if not all(math.isfinite(number) for pair in numbers for number in pair):
        return math.inf
    every = [struct.unpack("<f", b"\0\0" + half)[0] for half, _ in pairs]
    largest = max(abs(number) for number in every if math.isfinite(number))
    return max((abs(a - b) for a, b in numbers), default=0.0) / (largest or 1.0)


def chunk_of(layout: ChunkLayout | None, length: int) -> ChunkHeader:
    """Return the header of a chunk, which has a number of tokens if it has the layout's length."""
    tokens = 0
    if layout is not None and length == layout.payload_bytes(layout.chunk_tokens):
        tokens = layout.chunk_tokens
    return ChunkHeader(make_key(1), make_key(0), bytes(32), length, tokens=tokens)


class CodecConformance:
    """Tests of the contract of :class:`~kvtier.tiers.codec.Codec`. Name your subclass ``Test...``."""

    codec: ClassVar[type[Codec]]
    settings: ClassVar[Mapping[str, Any]] = {}
    """Settings of the codec, without ``type``."""
    tolerance: ClassVar[float] = 0.0
    """Of a lossy codec: how far a value of a chunk whose engine accepts loss may be off, as a part of the
    largest value of the chunk. All other chunks must survive exactly."""

    def make_codec(self) -> Codec:
        """Return a codec with the settings."""
        return self.codec(self.codec.settings_type.model_validate({"type": "mine", **self.settings}))

    def encoded(self, codec: Codec, layout: ChunkLayout | None, payload: bytes) -> bytes:
        """Encode a payload, and check the bounds of what was read and written."""
        chunk = chunk_of(layout, len(payload))
        source, limit = bytearray(payload), codec.max_encoded_bytes(chunk, layout)
        target = bytearray([SENTINEL]) * (limit + GUARD)
        length = codec.encode(chunk, layout, memoryview(source), memoryview(target)[:limit])
        assert 0 <= length <= limit, "longer than its bound"
        assert target[limit:] == bytes([SENTINEL]) * GUARD, "written behind the target"
        assert source == payload, "the payload was changed"
        return bytes(target[:length])

    def decoded(self, codec: Codec, layout: ChunkLayout | None, encoded: bytes, length: int) -> bytes:
        """Decode a payload, and check the bounds of what was read and written. Raises as the codec does."""
        result = self._try_decode(codec, layout, encoded, length)
        if isinstance(result, Exception):
            raise result
        return result

    def check(self, layout: ChunkLayout | None, result: bytes, payload: bytes) -> None:
        """Check what has been decoded."""
        if layout is None or not layout.accepts_loss or not self.tolerance or result == payload:
            assert result == payload
        else:
            assert distance(payload, result) <= self.tolerance

    def _try_decode(
        self, codec: Codec, layout: ChunkLayout | None, encoded: bytes, length: int
    ) -> bytes | Exception:
        """Return what the codec raises, so that no test mistakes a failed check for it."""
        source, target = bytearray(encoded), bytearray([SENTINEL]) * (length + GUARD)
        error: Exception | None = None
        try:
            codec.decode(chunk_of(layout, length), layout, memoryview(source), memoryview(target)[:length])
        except Exception as raised:
            error = raised
        assert target[length:] == bytes([SENTINEL]) * GUARD, "written behind the target"
        assert source == encoded, "the encoded payload was changed"
        return bytes(target[:length]) if error is None else error

    @pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
    @pytest.mark.parametrize("kind", ["noise", "zeros", "tensor"])
    @pytest.mark.parametrize("length", [0, 1, 255, 4096, 4097, 65_536, MIB + 13])
    def test_payload_survives(self, layout: ChunkLayout | None, kind: str, length: int) -> None:
        """Whatever it contains, whatever its length, and whether or not it has the layout's length."""
        codec, payload = self.make_codec(), contents(kind, length)
        encoded = self.encoded(codec, layout, payload)
        self.check(layout, self.decoded(codec, layout, encoded, length), payload)

    @pytest.mark.parametrize("kind", ["noise", "zeros", "tensor"])
    @pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
    def test_whole_chunk_survives(self, layout: ChunkLayout | None, kind: str) -> None:
        """A payload with exactly the layout's length."""
        length = 100_000 if layout is None else layout.payload_bytes(layout.chunk_tokens)
        codec, payload = self.make_codec(), contents(kind, length)
        encoded = self.encoded(codec, layout, payload)
        self.check(layout, self.decoded(codec, layout, encoded, length), payload)

    @pytest.mark.parametrize("name", ["layers, ranks and a window", "accepts loss"])
    def test_encoded_payload_describes_itself(self, name: str) -> None:
        """Another instance decodes it, with or without the layout: engines may not have connected yet."""
        layout = LAYOUTS[name]
        assert layout is not None
        payload = contents("tensor", layout.payload_bytes(layout.chunk_tokens))
        encoded = self.encoded(self.make_codec(), layout, payload)
        other = self.codec(self.codec.settings_type.model_validate({"type": "mine"}))
        for known in (layout, None):
            self.check(layout, self.decoded(other, known, encoded, len(payload)), payload)

    def test_memory_that_is_not_aligned(self) -> None:
        """Payloads begin behind a header, at any address."""
        codec, payload = self.make_codec(), contents("tensor", 10_000)
        source = memoryview(bytearray(len(payload) + 3))[3:]
        source[:] = payload
        chunk = chunk_of(None, len(payload))
        limit = codec.max_encoded_bytes(chunk, None)
        target = memoryview(bytearray(limit + 1))[1:]
        length = codec.encode(chunk, None, source, target)
        result = memoryview(bytearray(len(payload) + 5))[5:]
        codec.decode(chunk, None, target[:length], result)
        assert result == payload

    @pytest.mark.parametrize("damage", ["truncated", "longer", "flipped", "empty", "foreign"])
    def test_damaged_payload_is_refused_or_stays_in_bounds(self, damage: str) -> None:
        """Checksums may be disabled: anything may be decoded, but nothing written elsewhere."""
        codec, payload = self.make_codec(), contents("tensor", 20_000)
        encoded = self.encoded(codec, None, payload)
        damaged = {
            "truncated": encoded[: len(encoded) // 2],
            "longer": encoded + bytes(100),
            "flipped": encoded[:-9] + bytes([encoded[-9] ^ 0x55]) + encoded[-8:],
            "empty": b"",
            "foreign": noise(b"foreign", len(encoded)),
        }[damage]
        result = self._try_decode(codec, None, damaged, len(payload))
        assert isinstance(result, Exception) or len(result) == len(payload)

    def test_target_of_another_length_is_refused(self) -> None:
        """A length that does not match must not be taken for the payload."""
        codec, payload = self.make_codec(), contents("tensor", 20_000)
        encoded = self.encoded(codec, None, payload)
        for length in (19_999, 20_001):
            with pytest.raises(Exception):  # noqa: B017, PT011 - of any kind
                self.decoded(codec, None, encoded, length)

    def test_threads(self) -> None:
        """Chunks are encoded and decoded in several threads at once."""
        codec = self.make_codec()
        payloads = [noise(b"%d" % number, 4096) * 16 for number in range(16)]

        def round_trip(payload: bytes) -> bool:
            return self.decoded(codec, None, self.encoded(codec, None, payload), len(payload)) == payload

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(round_trip, payloads * 4))

    def test_other_threads_run_meanwhile(self) -> None:
        """The event loop must not wait for the GIL while a large chunk is encoded or decoded."""
        codec, payload = self.make_codec(), contents("noise", 4 * MIB)
        turns, ended = 0, threading.Event()

        def count() -> None:
            nonlocal turns
            while not ended.wait(0.0005):
                turns += 1

        thread = threading.Thread(target=count, daemon=True)
        thread.start()
        try:
            for _ in range(4):
                assert self.decoded(codec, None, self.encoded(codec, None, payload), len(payload)) == payload
        finally:
            ended.set()
            thread.join()
        assert turns, "no other thread ran"
