"""The codecs `fp8`, `int8` and `int4`, which lose precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvtier import native
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, StoredHeader, object_bytes
from kvtier.memory.layout import STATE_TOKENS, ChunkLayout, GroupLayout, GroupValues
from kvtier.testing.backend import make_key
from kvtier.testing.codec import CodecConformance
from kvtier.tiers.codec import CodecSettings, IdentityCodec
from kvtier.tiers.encoded_seal import Codecs, Encoder, Layouts
from kvtier.tiers.lossy import Fp8Codec, Int4Codec, Int8Codec, LossyCodec

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native core")

CODECS: list[type[LossyCodec]] = [Fp8Codec, Int8Codec, Int4Codec]
STEPS = {Int8Codec: 255, Int4Codec: 15}
# Rounding to the type itself, relative to a value.
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-23}
TOKENS, HEADS, WIDTH = 64, 2, 32


class TestFp8(CodecConformance):
    codec = Fp8Codec
    tolerance = 1 / 15


class TestInt8(CodecConformance):
    codec = Int8Codec
    tolerance = 1 / 120


class TestInt4(CodecConformance):
    codec = Int4Codec
    tolerance = 1 / 14


def layout_of(dtype: str, **more: Any) -> ChunkLayout:
    """Return that of a model of two layers, in the order of a GPU: token, head, K or V."""
    page = 16 * HEADS * 2 * WIDTH * (4 if dtype == "float32" else 2)
    values = GroupValues(dtype, 16, HEADS * 2 * WIDTH, WIDTH)
    return ChunkLayout(TOKENS, (GroupLayout(16, (page, page)),), values=(values,), **more)


def packed(values: np.ndarray[Any, Any], dtype: str) -> bytes:
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(dtype).tobytes()


def unpacked(payload: bytes, dtype: str) -> np.ndarray[Any, Any]:
    bits = np.frombuffer(payload, np.uint16 if dtype == "bfloat16" else dtype)
    with np.errstate(invalid="ignore"):  # NaN that signals.
        return ((bits.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else bits).astype(
            float
        )


def header_of(payload: bytes, tokens: int, space: bytes = bytes(32)) -> ChunkHeader:
    return ChunkHeader(make_key(1), make_key(0), space, len(payload), tokens=tokens)


def encoded(kind: type[LossyCodec], layout: ChunkLayout, payload: bytes, tokens: int = TOKENS) -> bytes:
    codec, chunk = kind(CodecSettings(type="mine")), header_of(payload, tokens)
    target = bytearray(codec.max_encoded_bytes(chunk, layout))
    return bytes(target[: codec.encode(chunk, layout, memoryview(payload), memoryview(target))])


def decoded(kind: type[LossyCodec], stored: bytes, length: int) -> bytes:
    target = bytearray(length)
    kind(CodecSettings(type="mine")).decode(
        header_of(target, TOKENS), None, memoryview(stored), memoryview(target)
    )
    return bytes(target)


def check_near(
    kind: type[LossyCodec], before: np.ndarray[Any, Any], after: np.ndarray[Any, Any], dtype: str
) -> None:
    """Check the bound of the error, whatever the groups are."""
    error, size = np.abs(after - before), np.abs(before)
    if kind is Fp8Codec:
        bound = size / 16 + size.max() / 448 * 2**-9
    else:
        bound = (before.max() - before.min()) / STEPS[kind] * 0.51
    smallest = 2.0**-24 if dtype == "float16" else 2.0**-90
    assert (error <= bound + size.max() * ROUNDING[dtype] + smallest).all()


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("dtype", ROUNDING)
@given(data=st.data())
def test_error_is_bounded(kind: type[LossyCodec], dtype: str, data: st.DataObject) -> None:
    count = layout_of(dtype).payload_bytes(TOKENS) // (4 if dtype == "float32" else 2)
    widest = {"bfloat16": 1e18, "float16": 60_000, "float32": 1e18}[dtype]
    limit = float(np.float32(data.draw(st.sampled_from([1e-40, 1e-6, 1.0, 1000.0, widest]))))
    floats = st.floats(-limit, limit, width=32)
    values = data.draw(arrays.arrays(np.float32, count, elements=floats, fill=floats))
    payload = packed(values, dtype)
    stored = encoded(kind, layout_of(dtype), payload)
    assert len(stored) < len(payload)
    check_near(kind, unpacked(payload, dtype), unpacked(decoded(kind, stored, len(payload)), dtype), dtype)


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("dtype", ROUNDING)
@given(data=st.data())
def test_any_bits_survive_or_stay_near(kind: type[LossyCodec], dtype: str, data: st.DataObject) -> None:
    """A tile with a value that is no number is stored as it is."""
    length = layout_of(dtype).payload_bytes(TOKENS)
    bits = arrays.arrays(np.uint32, length // 4, elements=st.integers(0, (1 << 32) - 1), fill=st.just(0))
    payload = data.draw(bits).tobytes()
    result = decoded(kind, encoded(kind, layout_of(dtype), payload), length)
    before, after = (unpacked(each, dtype) for each in (payload, result))
    assert (np.isfinite(before) == np.isfinite(after)).all()
    unequal = ~np.isfinite(before)
    width = 4 if dtype == "float32" else 2
    same = np.frombuffer(payload, f"u{width}") == np.frombuffer(result, f"u{width}")
    assert same[unequal].all()


def channels(scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return values whose channels have the same scales in each token, as keys have."""
    noise = np.random.default_rng(1).normal(0, 1, (2, TOKENS, HEADS * 2 * WIDTH))
    return (noise * scales).astype(np.float32)


@pytest.mark.parametrize("kind", [Int8Codec, Int4Codec])
def test_channels_of_different_scale_have_scales_of_their_own(kind: type[LossyCodec]) -> None:
    """So do tokens: each tile gets the order that loses less."""
    scales = np.geomspace(0.001, 10_000, HEADS * 2 * WIDTH)
    by_token = np.repeat(np.geomspace(0.001, 10_000, TOKENS), HEADS * 2 * WIDTH).reshape(TOKENS, -1)
    for values, axis in ((channels(scales), 1), (channels(by_token), 2)):
        payload = packed(values, "float32")
        result = unpacked(
            decoded(kind, encoded(kind, layout_of("float32"), payload), len(payload)), "float32"
        )
        error = np.abs(result.reshape(values.shape) - values).max(axis=axis)
        assert (error < 4 * np.abs(values).max(axis=axis) / STEPS[kind]).all()


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("window", [0, 24])
def test_every_length_of_a_chunk(kind: type[LossyCodec], window: int) -> None:
    """Ends of prompts are shorter than a chunk, and of windows only the last blocks are stored."""
    base = layout_of("bfloat16")
    groups = (base.groups[0], GroupLayout(16, (8192,), window), GroupLayout(16, (100, 34)))
    values = (*base.values, GroupValues("bfloat16"), GroupValues("bfloat16"))
    layout = ChunkLayout(TOKENS, groups, ranks=2, values=values)
    for tokens in range(1, TOKENS + 1):
        numbers = np.random.default_rng(tokens).normal(0, 1, layout.payload_bytes(tokens) // 2)
        payload = packed(numbers, "bfloat16").ljust(layout.payload_bytes(tokens), b"x")
        stored = encoded(kind, layout, payload, tokens)
        assert len(stored) < len(payload) / 1.5
        result = decoded(kind, stored, len(payload))
        check_near(
            kind,
            *(unpacked(each[: len(each) // 2 * 2], "bfloat16") for each in (payload, result)),
            "bfloat16",
        )


@pytest.mark.parametrize("dtype", ["", "uint8", "float8_e4m3fn"])
def test_what_must_not_change_is_stored_as_it_is(dtype: str) -> None:
    base = layout_of("bfloat16")
    layout = msgspec.structs.replace(base, values=(GroupValues(dtype, 16, 128, 32),))
    payload = np.random.default_rng(1).bytes(layout.payload_bytes(TOKENS))
    assert decoded(Int4Codec, encoded(Int4Codec, layout, payload), len(payload)) == payload


def test_states_are_stored_as_they_are() -> None:
    base = layout_of("bfloat16")
    groups = (*base.groups, GroupLayout(TOKENS, (4096,), state=True))
    layout = ChunkLayout(TOKENS, groups, values=(*base.values, GroupValues()))
    payload = np.random.default_rng(1).bytes(layout.payload_bytes(STATE_TOKENS))
    assert decoded(Int4Codec, encoded(Int4Codec, layout, payload, STATE_TOKENS), len(payload)) == payload


def objects(layout: ChunkLayout, space: bytes) -> Iterator[tuple[ChunkHeader, memoryview]]:
    for seed in range(3):
        count = layout.payload_bytes(TOKENS) // 2
        payload = packed(np.random.default_rng(seed).normal(0, 1, count), "bfloat16")
        view = memoryview(bytearray(object_bytes(len(payload))))
        header = header_of(payload, TOKENS, space)
        view[:HEADER_BYTES] = header.packed()
        view[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
        yield header, view


def test_only_chunks_of_engines_that_accept_loss_are_encoded(caplog: pytest.LogCaptureFixture) -> None:
    """Those of others are stored as they are, and the log has one line that says what to set."""
    lossy = layout_of("bfloat16")
    strict = msgspec.structs.replace(lossy, values=())
    spaces, layouts = {b"a" * 32: lossy, b"b" * 32: strict}, Layouts()
    for space, layout in spaces.items():
        layouts.add(space, layout)
    codec = Int8Codec(CodecSettings(type="int8"))
    encoder = Encoder(Codecs(codec, {}), layouts, checksum=True)
    for space, layout in {**spaces, b"c" * 32: lossy}.items():
        for header, view in objects(layout, space):
            stored = encoder.encode(header, view, memoryview(bytearray(encoder.max_bytes(header))))
            assert (stored is not None) == (space == b"a" * 32)
            if stored is not None:
                assert StoredHeader.parse(stored).codec == Int8Codec.code
    [line] = [record.message for record in caplog.records]
    assert "`accept_lossy: true`" in line


@pytest.mark.parametrize("encrypts", [False, True])
def test_stored_chunks_are_decoded_before_an_engine_connects(encrypts: bool) -> None:
    """And by a tier with another codec; also if they are encrypted."""
    keys = None
    if encrypts:
        keys = pytest.importorskip("kvtier.tiers.encryption").Keys({1: bytes(32)})
    layouts, codec = Layouts(), Int8Codec(CodecSettings(type="int8"))
    layouts.add(b"a" * 32, layout_of("bfloat16"))
    writer = Encoder(Codecs(codec, {}), layouts, checksum=True, keys=keys)
    other = IdentityCodec(CodecSettings(type="identity"))
    reader = Encoder(Codecs(other, {codec.code: codec}), Layouts(), checksum=True, keys=keys)
    for header, view in objects(layout_of("bfloat16"), b"a" * 32):
        room = memoryview(bytearray(writer.max_bytes(header)))
        stored = writer.encode(header, view, room, keys.mark_of("") if keys else b"")
        assert stored is not None
        assert len(stored) < len(view) / 1.6
        result = memoryview(bytearray(len(view)))
        reader.decode(header.key, stored, result, hashed=False)
        before, after = (
            unpacked(bytes(each[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]), "bfloat16")
            for each in (view, result)
        )
        check_near(Int8Codec, before, after, "bfloat16")
