"""The codec `lossless`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvtier import Settings, TieredCache, native
from kvtier.backends.base import Capabilities, Outcome
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, StoredHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.testing.backend import make_key
from kvtier.testing.codec import CodecConformance, chunk_of
from kvtier.testing.faults import WrapperBackend
from kvtier.tiers.codec import CodecSettings
from kvtier.tiers.encoded_seal import EncodedSeal
from kvtier.tiers.lossless import DenseCodec, LosslessCodec
from kvtier.tiers.seal import Seal
from kvtier.tiers.tier import Tier
from tests.rigs.chunks import memory, opened
from tests.rigs.composed_backends import EncodedBackend, StoredLengths
from tests.rigs.servers.redis import RedisServer

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native core")

NORMAL = np.random.default_rng(1).normal(0, 0.05, 1 << 19).astype(np.float32)
HALVES = {
    "bfloat16": (NORMAL.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
    "float16": NORMAL.astype(np.float16).tobytes(),
    "float32": NORMAL.tobytes(),
    # The upper byte of a float16 is a float8 with five bits of exponent.
    "float8_e5m2": (NORMAL.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8).tobytes(),
}


def lossless() -> LosslessCodec:
    return LosslessCodec(CodecSettings(type="lossless"))


def dense() -> DenseCodec:
    return DenseCodec(CodecSettings(type="dense"))


def encoded(payload: bytes, codec: LosslessCodec | None = None) -> bytes:
    codec, chunk = codec or lossless(), chunk_of(None, len(payload))
    target = bytearray(codec.max_encoded_bytes(chunk, None))
    length = codec.encode(chunk, None, memoryview(payload), memoryview(target))
    return bytes(target[:length])


def decoded(stored: bytes, length: int) -> bytes:
    target = bytearray(length)
    lossless().decode(chunk_of(None, length), None, memoryview(stored), memoryview(target))
    return bytes(target)


class TestLossless(CodecConformance):
    codec = LosslessCodec


class TestDense(CodecConformance):
    codec = DenseCodec


@pytest.mark.parametrize(
    ("kind", "ratio", "denser"),
    [
        ("bfloat16", 1.4, 1.05),
        ("float16", 1.1, 1.03),
        ("float32", 1.16, 1.02),
        ("float8_e5m2", 1.25, 1.08),
    ],
)
def test_values_of_one_scale_become_smaller(kind: str, ratio: float, denser: float) -> None:
    length = len(encoded(HALVES[kind]))
    assert len(HALVES[kind]) > ratio * length
    assert length > denser * len(encoded(HALVES[kind], dense()))


@pytest.mark.parametrize("codec", [lossless(), dense()])
@pytest.mark.parametrize("kind", [np.uint8, np.float16, np.float32, np.float64])
@given(data=st.data())
def test_any_values_survive(kind: type, codec: LosslessCodec, data: st.DataObject) -> None:
    """Also NaN with any payload, infinities and denormals, in any shape."""
    width = np.dtype(kind).itemsize
    bits = arrays.arrays(f"u{width}", st.integers(0, 3000), elements=data.draw(elements(width)))
    payload = data.draw(bits).tobytes() * data.draw(st.integers(1, 20)) + data.draw(st.binary(max_size=9))
    assert decoded(encoded(payload, codec), len(payload)) == payload


def elements(width: int) -> st.SearchStrategy[st.SearchStrategy[int]]:
    """Few values or many, or all special ones."""
    top = (1 << 8 * width) - 1
    special = [0, 1, 1 << 8 * width - 1, top, top >> 1, 0x7F80 << 8 * width >> 16, 0x7C00 << 8 * width >> 16]
    few = st.lists(st.integers(0, top), min_size=1, max_size=9).map(st.sampled_from)
    return st.one_of(st.just(st.integers(0, top)), st.just(st.sampled_from([v & top for v in special])), few)


@pytest.mark.anyio
@pytest.mark.parametrize("codec", [LosslessCodec, DenseCodec])
@pytest.mark.parametrize("at", ["first", "every", "last"])
async def test_a_damaged_byte_is_a_miss(codec: type[LosslessCodec], at: str) -> None:
    """Wherever it is: in the header, in a table, among codes, escapes or mantissas."""
    payload = HALVES["bfloat16"][:20_000]
    key, view = make_key(1), memoryview(bytearray(object_bytes(len(payload))))
    view[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    view[:HEADER_BYTES] = ChunkHeader(key, make_key(0), bytes(32), len(payload)).packed()
    inner, catalog = memory(), StoredLengths()
    async with opened(EncodedBackend(inner, catalog, codec=codec)) as backend:
        assert list(await backend.put([(key, view)])) == [Outcome.OK]
        raw = memoryview(bytearray(catalog.stored_length(key, 1, 0)))
        assert list(await inner.get([(key, raw)])) == [Outcome.OK]
        end = HEADER_BYTES + StoredHeader.parse(raw).stored_bytes
        places = {"first": [0], "every": range(1, end - 1, 7), "last": [end - 1]}[at]
        for place in places:
            damaged = memoryview(bytearray(raw))
            damaged[place] ^= 1 << place % 8
            assert list(await inner.put([(key, damaged)])) == [Outcome.OK]
            assert list(await backend.get([(key, memoryview(bytearray(len(view))))])) == [Outcome.MISS]
            assert list(await inner.contains([key])) == [False]


TOKENS = list(range(1024))
KV = HALVES["bfloat16"][: 256 * len(TOKENS)]


def settings(tier: dict[str, Any]) -> Settings:
    ram = {"name": "ram", "type": "cpu", "capacity": "4MiB"}
    return Settings(tiers=[ram, {"name": "below", **tier}], prefetch={"policy": "wait"})


async def stored(tier: dict[str, Any]) -> int:
    """Store the KV, and return how many bytes the lower tier has of it."""
    async with TieredCache.open(settings(tier)) as cache:
        assert await cache.model("llama", token_bytes=256).store(TOKENS, KV) == len(TOKENS)
        assert await cache.drain(30)
        status = cache.tiers[1].status()
        assert status.get("codec") == tier.get("codec")
        assert status.get("ratio", 1.0) == pytest.approx(
            cache.tiers[0].used_bytes / cache.tiers[1].used_bytes
        )
        return cache.tiers[1].used_bytes


async def found(tier: dict[str, Any]) -> int:
    """Return how many tokens another process finds, whose KV is what was stored."""
    async with TieredCache.open(settings(tier)) as cache:
        out = bytearray(len(KV))
        count = await cache.model("llama", token_bytes=256).retrieve(TOKENS, out)
        assert out[: 256 * count] == KV[: 256 * count]
        return count


@pytest.mark.anyio
async def test_disk_holds_more_and_returns_the_same(tmp_path: Path) -> None:
    disk = {"type": "disk", "capacity": "4MiB", "path": str(tmp_path)}
    assert await stored({**disk, "codec": "lossless"}) < len(KV) / 1.3
    assert await found({**disk, "codec": "lossless"}) == len(TOKENS)
    assert await found(disk) == len(TOKENS), "also after the codec was turned off"
    assert await found({**disk, "codec": "lossless"}) == len(TOKENS)


@pytest.mark.anyio
async def test_memory_below_memory_is_not_verified() -> None:
    """What is encoded there is verified while it is decoded."""
    below = {"type": "cpu", "capacity": "4MiB"}
    for codec, expected in (("identity", Seal), ("lossless", EncodedSeal)):
        async with TieredCache.open(settings({**below, "codec": codec})) as cache:
            [tier] = cache.tiers[1:]
            assert isinstance(tier, Tier)
            assert type(tier.seal) is expected


@pytest.mark.anyio
async def test_hosts_share_a_pool(redis_pool: Callable[..., dict[str, Any]]) -> None:
    """Each has asked the pool how long a chunk is, whether or not it was encoded there."""
    pool = redis_pool()
    assert await stored({**pool, "codec": "lossless"}) < len(KV) / 1.3
    assert await found({**pool, "codec": "lossless"}) == len(TOKENS)
    assert await found(pool) == 0, "a host without a codec misses"
    other = redis_pool(prefix="other")
    await stored(other)
    assert await found({**other, "codec": "lossless"}) == len(TOKENS), "as it is stored"


@pytest.fixture
def redis_pool(tmp_path: Path) -> Any:
    if reason := RedisServer.missing():
        pytest.skip(reason)
    with RedisServer(tmp_path) as server:
        yield lambda **more: {"type": "redis", **server.tier(), **more}


@pytest.mark.anyio
async def test_without_the_native_core_chunks_are_stored_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = {"type": "disk", "capacity": "4MiB", "path": str(tmp_path), "codec": "lossless"}
    monkeypatch.setattr("kvtier.tiers.lossless.native.available", lambda: False)
    assert await stored(disk) >= len(KV)
    assert "codec 1 cannot encode a chunk: UnreadableChunk('needs the native core" in caplog.text
    assert await found(disk) == len(TOKENS)


@pytest.mark.anyio
async def test_without_the_native_core_encoded_chunks_stay_for_others(
    redis_pool: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = redis_pool(codec="lossless")
    await stored(pool)
    with monkeypatch.context() as patch:
        patch.setattr("kvtier.tiers.lossless.native.available", lambda: False)
        assert await found(pool) == 0
    assert await found(pool) == len(TOKENS)


class Lengths(WrapperBackend):
    """A pool whose lengths are not to be trusted."""

    length = 0

    async def lengths(self, keys: Sequence[ChunkKey]) -> Sequence[int]:
        return [self.length] * len(keys)

    def capabilities(self) -> Capabilities:
        return super().capabilities()._replace(lengths=self)


@pytest.mark.anyio
@pytest.mark.parametrize("length", [-1, 0, 1, 4096, 4097, 1 << 62])
async def test_lengths_of_a_pool_are_not_trusted(length: int) -> None:
    payload = HALVES["bfloat16"][:20_000]
    key, view = make_key(1), memoryview(bytearray(object_bytes(len(payload))))
    view[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    view[:HEADER_BYTES] = ChunkHeader(key, make_key(0), bytes(32), len(payload)).packed()
    pool = Lengths(memory())
    async with opened(EncodedBackend(pool, StoredLengths())) as backend:
        assert list(await backend.put([(key, view)])) == [Outcome.OK]
        pool.length = length
        assert list(await backend.get([(key, memoryview(bytearray(len(view))))])) == [Outcome.MISS]
