"""Encoded objects: smaller, verified, decoded into the chunk's memory, and never longer than the chunk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.memory.arena import address_of
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, StoredHeader, is_sealed, object_bytes
from kvtier.memory.layout import ChunkLayout, GroupLayout, namespace
from kvtier.testing.backend import blank, make_key
from kvtier.testing.codec import CodecConformance
from kvtier.testing.faults import Fault, FaultyBackend
from kvtier.tiers.codec import Codec, CodecSettings, IdentityCodec
from kvtier.tiers.encoded_seal import Codecs, EncodedSeal, Encoder, Layouts
from kvtier.tiers.sealer import Sealer
from tests.rigs.chunks import MISS, OK, blanks, chunk, chunks, disk, memory, opened
from tests.rigs.mapped import flags_at

pytestmark = pytest.mark.anyio

PAYLOAD = 20_000


class Runs(Codec):
    """Runs of equal bytes, each as its length and the byte. Noise becomes longer."""

    code = 40_001

    def __init__(self, settings: CodecSettings) -> None:
        self.layouts: list[ChunkLayout | None] = []

    def max_encoded_bytes(self, chunk: ChunkHeader, layout: ChunkLayout | None) -> int:
        return 2 * chunk.payload_bytes

    def encode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> int:
        self.layouts.append(layout)
        payload, at = bytes(source), 0
        while payload:
            run = min(255, len(payload) - len(payload.lstrip(payload[:1])))
            target[at : at + 2] = bytes([run, payload[0]])
            payload, at = payload[run:], at + 2
        return at

    def decode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> None:
        self.layouts.append(layout)
        target[:] = b"".join(
            bytes([value]) * run for run, value in zip(source[::2], source[1::2], strict=True)
        )


class Failing(Runs):
    """Cannot encode anything."""

    def encode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> int:
        raise ValueError("no")


class TestIdentity(CodecConformance):
    codec = IdentityCodec


class Lengths:
    """The part of a catalog that knows the length of each object."""

    def __init__(self, lengths: dict[Any, int]) -> None:
        self._lengths = lengths

    def stored_length(self, key: Any, tier: int, default: int) -> int:
        return self._lengths.get(key, default)

    def resize(self, key: Any, tier: int, length: int) -> None:
        self._lengths[key] = length


def sealed(backend: Any, codec: Codec, lengths: dict[Any, int], **more: Any) -> EncodedSeal:
    known = {codec.code: codec, **more.pop("known", {})}
    encoder = Encoder(
        Codecs(codec, known), more.pop("layouts", Layouts()), checksum=more.get("checksum", True)
    )
    catalog: Any = Lengths(lengths)
    return EncodedSeal(backend, Sealer(more.get("checksum", True)), encoder, catalog, 1)


def runs() -> Runs:
    return Runs(CodecSettings(type="runs"))


def constant(number: int, space: bytes = bytes(32)) -> tuple[Any, memoryview]:
    """Return a chunk object whose payload compresses well."""
    view = blank(object_bytes(PAYLOAD))
    key = make_key(number)
    ChunkHeader(key, make_key(0), space, PAYLOAD).seal(view, checksum=False)
    view[HEADER_BYTES : HEADER_BYTES + PAYLOAD] = bytes([number]) * PAYLOAD
    return key, view


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("make", [memory, "disk"], ids=["memory", "disk"])
async def test_objects_are_smaller_and_come_back(make: Any, checksum: bool, tmp_path) -> None:
    backend, lengths = (disk(tmp_path) if make == "disk" else make()), {}
    async with opened(backend):
        seal = sealed(backend, runs(), lengths, checksum=checksum)
        items = [constant(1), *chunks([2]), constant(3)]
        before = [bytes(view) for _, view in items]
        assert list(await seal.put(items)) == [OK] * 3
        assert [lengths[key] for key, _ in items] == [4096, object_bytes(PAYLOAD), 4096]
        assert [is_sealed(view) for _, view in items] == [False, checksum, False], (
            "encoded ones are not hashed"
        )
        raw = blank(4096)
        assert list(await backend.get([(make_key(1), raw)])) == [OK]
        found = StoredHeader.verify(raw, make_key(1))
        assert (found.codec, found.chunk.payload_bytes) == (Runs.code, PAYLOAD)
        views = blanks([3, 2, 1, 4])
        assert list(await seal.get(views)) == [OK, OK, OK, MISS]
        for (key, view), content in zip(views[:3], before[::-1], strict=True):
            assert ChunkHeader.verify(view, key).key == key
            assert (
                view[HEADER_BYTES : HEADER_BYTES + PAYLOAD] == content[HEADER_BYTES : HEADER_BYTES + PAYLOAD]
            )
        assert seal.corrupt == 0


async def test_encoded_and_plain_chunks_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A medium that fills up then holds the beginning of a prompt."""
    written: list[Any] = []
    async with opened(memory()) as backend:
        put = backend.put

        async def record(items: Any) -> Any:
            written.extend(key for key, _ in items)
            return await put(items)

        monkeypatch.setattr(backend, "put", record)
        items = [*chunks([1]), constant(2), *chunks([3]), constant(4)]
        assert list(await sealed(backend, runs(), {}).put(items)) == [OK] * 4
    assert written == [key for key, _ in items]


async def test_chunk_that_cannot_be_encoded_is_stored_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    lengths: dict[Any, int] = {}
    async with opened(memory()) as backend:
        seal = sealed(backend, Failing(CodecSettings(type="failing")), lengths)
        assert list(await seal.put([constant(1)])) == [OK]
        assert lengths == {make_key(1): object_bytes(PAYLOAD)}
        assert list(await seal.get(blanks([1]))) == [OK]
    assert "cannot encode a chunk" in caplog.text


async def test_corrupt_chunk_in_memory_affects_no_other() -> None:
    lengths: dict[Any, int] = {}
    async with opened(memory()) as backend:
        seal = sealed(backend, runs(), lengths)
        items = [constant(1), constant(2), *chunks([3, 4])]
        for _, view in (items[0], items[2]):
            view[30] ^= 1
        assert list(await seal.put(items)) == [MISS, OK, MISS, OK]
        assert set(lengths) == {make_key(2), make_key(4)}


async def test_chunk_that_was_damaged_after_it_was_hashed_is_not_stored() -> None:
    """It would get a new checksum, which matches."""
    lengths: dict[Any, int] = {}
    async with opened(memory()) as backend:
        seal = sealed(backend, runs(), lengths)
        damaged, other = constant(1), constant(2)
        for _, view in (damaged, other):
            ChunkHeader.parse(view).seal(view)
            assert is_sealed(view)
        damaged[1][HEADER_BYTES + 7] ^= 1
        dropped = []
        seal._sealer.on_corrupt = lambda key, view: dropped.append(key)
        assert list(await seal.put([damaged, other])) == [MISS, OK]
        assert (dropped, seal._sealer.corrupt) == ([make_key(1)], 1)


class Boundless(Runs):
    """Does not know how long anything becomes."""

    def max_encoded_bytes(self, chunk: ChunkHeader, layout: ChunkLayout | None) -> int:
        raise ValueError("no bound")

    def encode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> int:
        raise ValueError("no room")


async def test_codec_without_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    lengths: dict[Any, int] = {}
    async with opened(memory()) as backend:
        seal = sealed(backend, Boundless(CodecSettings(type="boundless")), lengths)
        assert list(await seal.put([constant(1)])) == [OK]
        assert list(await seal.get(blanks([1]))) == [OK]
    assert "has no bound for a chunk: ValueError('no bound')" in caplog.text


def damage_value(raw: memoryview) -> None:
    """Change the byte of a run: it can be decoded, to other content."""
    raw[HEADER_BYTES + 1] ^= 1


def other_key(raw: memoryview) -> None:
    header = StoredHeader.parse(raw)
    chunk = header.chunk._replace(key=make_key(7))
    StoredHeader.seal(raw, chunk, header.codec, header.stored_bytes, checksum=True)


def wrong_length(raw: memoryview) -> None:
    header = StoredHeader.parse(raw)
    chunk = header.chunk._replace(payload_bytes=PAYLOAD + 4096)
    StoredHeader.seal(raw, chunk, header.codec, header.stored_bytes, checksum=True)


def unknown_codec(raw: memoryview) -> None:
    header = StoredHeader.parse(raw)
    StoredHeader.seal(raw, header.chunk, 9, header.stored_bytes, checksum=True)


def undecodable(raw: memoryview) -> None:
    header = StoredHeader.parse(raw)
    raw[HEADER_BYTES] = 1
    StoredHeader.seal(raw, header.chunk, header.codec, header.stored_bytes, checksum=True)


@pytest.mark.parametrize("damage", [damage_value, other_key, wrong_length, unknown_codec, undecodable])
async def test_damaged_object_is_a_miss_and_deleted(
    damage: Callable[[memoryview], None], caplog: pytest.LogCaptureFixture
) -> None:
    lengths: dict[Any, int] = {}
    async with opened(memory()) as backend:
        seal = sealed(backend, runs(), lengths)
        assert list(await seal.put([constant(1), constant(2)])) == [OK, OK]
        raw = blank(4096)
        assert list(await backend.get([(make_key(1), raw)])) == [OK]
        damage(raw)
        assert list(await backend.put([(make_key(1), raw)])) == [OK]
        with caplog.at_level(logging.WARNING, "kvtier"):
            assert list(await seal.get(blanks([1, 2]))) == [MISS, OK]
        unreadable = damage is unknown_codec
        assert (seal.corrupt, seal.unreadable) == (1 - unreadable, unreadable)
        assert ("is a miss" if unreadable else "deleting corrupt chunk") in caplog.text
        assert list(await backend.contains([make_key(1), make_key(2)])) == [False, True]


async def test_object_of_another_codec_is_decoded_with_that() -> None:
    """The tier's codec was changed in the settings."""
    lengths: dict[Any, int] = {}
    async with opened(memory()) as backend:
        assert list(await sealed(backend, runs(), lengths).put([constant(1)])) == [OK]

        class Other(Runs):
            code = 40_002

        seal = sealed(backend, Other(CodecSettings(type="other")), lengths, known={Runs.code: runs()})
        view = blanks([1])
        assert list(await seal.get(view)) == [OK]
        assert view[0][1][HEADER_BYTES] == 1


async def test_codec_gets_the_layout_of_a_known_model() -> None:
    layouts, layout = Layouts(), ChunkLayout(16, (GroupLayout(16, (1250,)),))
    layouts.add(namespace("llama", layout), layout)
    codec, lengths = runs(), {}
    async with opened(memory()) as backend:
        seal = sealed(backend, codec, lengths, layouts=layouts)
        assert list(await seal.put([constant(1, namespace("llama", layout))])) == [OK]
        assert list(await seal.put([constant(2)])) == [OK]
        assert list(await seal.get(blanks([1, 2]))) == [OK, OK]
        assert codec.layouts[:2] == [layout, None]
        assert sorted(codec.layouts[2:], key=str) == sorted([layout, None], key=str)


async def test_failure_of_the_medium_is_passed_through() -> None:
    lengths: dict[Any, int] = {}
    async with opened(FaultyBackend(memory())) as faulty:
        seal = sealed(faulty, runs(), lengths)
        faulty.fault = Fault.FULL
        assert [outcome.value for outcome in await seal.put([constant(1)])] == ["full"]
        assert lengths == {}
        faulty.fault = Fault.RAISE
        with pytest.raises(ConnectionError):
            await seal.put([constant(1)])


async def test_scan_accepts_what_the_tier_can_read(tmp_path) -> None:
    inner, lengths = disk(tmp_path), {}
    async with opened(inner):
        seal = sealed(inner, runs(), lengths)
        assert list(await seal.put([constant(1), (make_key(2), chunk(make_key(2)))])) == [OK, OK]
        foreign = constant(3)[1][:4096]
        StoredHeader.seal(
            foreign, ChunkHeader(make_key(3), make_key(0), bytes(32), PAYLOAD), 9, 40, checksum=True
        )
        assert list(await inner.put([(make_key(3), foreign)])) == [OK]
    async with opened(inner):
        found = [stored async for batch in sealed(inner, runs(), {}).scan() for stored in batch]
        assert sorted(stored.key for stored in found) == sorted([make_key(1), make_key(2)])


def test_layouts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.encoded_seal.MAX_LAYOUTS", 2)
    layouts, layout = Layouts(), ChunkLayout(16, ())
    for space in (b"a", b"b", b"c"):
        layouts.add(space, layout)
    assert [layouts.get(space) for space in (b"a", b"b", b"c")] == [None, layout, layout]


def test_scratch_memory_is_reused_and_bounded() -> None:
    encoder = Encoder(Codecs(runs(), {}), Layouts(), checksum=True)
    with encoder.scratch([4096, 8192]) as first:
        assert "dd" in flags_at(address_of(first[0])), "core dumps would contain it"
        assert [len(view) for view in first] == [4096, 8192]
        with encoder.scratch([4096]) as second:
            second[0][:1] = b"x"
            assert first[0][0] == 0, "used twice at once"
    for _ in range(10):
        with encoder.scratch([4096]), encoder.scratch([4096]), encoder.scratch([]):
            pass
    assert len(encoder._kept) <= 4
