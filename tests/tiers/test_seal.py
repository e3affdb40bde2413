"""A seal returns only objects that match their header."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from kvtier.backends.base import GetItem, Outcome
from kvtier.lab.bench.sides import object_length
from kvtier.memory import header
from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from kvtier.memory.keys import ChunkKey
from kvtier.testing.backend import blank, make_key
from kvtier.testing.faults import Fault, FaultyBackend, WrapperBackend
from kvtier.tiers.batches import in_batches
from kvtier.tiers.seal import Seal
from tests.rigs.chunks import FAILED, MISS, OK, blanks, chunk, chunks, disk, memory, opened
from tests.rigs.composed_backends import SealedBackend, TierBackend

pytestmark = pytest.mark.anyio


async def test_put_seals_and_get_verifies() -> None:
    inner = memory()
    async with opened(SealedBackend(inner)) as sealed:
        (item,) = chunks([1])
        payload = bytes(item[1][HEADER_BYTES:])
        assert list(await sealed.put([item])) == [OK]
        ((key, raw),) = blanks([1])
        assert list(await inner.get([(key, raw)])) == [OK]
        assert raw[10] == 1, "the checksum's algorithm"
        assert bytes(raw[HEADER_BYTES:]) == payload
        assert ChunkHeader.verify(raw, key).key == key


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize(
    "head",
    [
        pytest.param(bytes(HEADER_BYTES), id="none"),
        pytest.param(bytes(chunk(make_key(9))[:HEADER_BYTES]), id="another key"),
        pytest.param(bytes(chunk(make_key(1), 50_000)[:HEADER_BYTES]), id="another length"),
    ],
)
async def test_put_with_a_wrong_header_fails_for_that_key_only(head: bytes, checksum: bool) -> None:
    async with opened(SealedBackend(memory(), checksum=checksum)) as sealed:
        items = chunks([0, 1, 2])
        items[1][1][:HEADER_BYTES] = head
        assert list(await sealed.put(items)) == [OK, MISS, OK]
        assert list(await sealed.contains([key for key, _ in items])) == [True, False, True]
        assert list(await sealed.get(blanks([0, 2]))) == [OK, OK]


@pytest.mark.parametrize("at", [0, 9, 30, 60, 100, 130, 140, HEADER_BYTES, HEADER_BYTES + 19_999])
async def test_bit_flip_is_a_miss(at: int) -> None:
    inner = memory()
    async with opened(SealedBackend(inner)) as sealed:
        items = chunks([1, 2])
        assert list(await sealed.put(items)) == [OK, OK]
        items[0][1][at] ^= 1
        assert list(await inner.put(items[:1])) == [OK]
        assert list(await sealed.get(blanks([1, 2]))) == [MISS, OK]
        assert sealed.corrupt == 1
        assert list(await inner.contains([make_key(1), make_key(2)])) == [False, True]


class Undeletable(WrapperBackend):
    """Refuses to delete, like a server whose user may only read and write."""

    refusals = 0

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        self.refusals += 1
        raise PermissionError("not allowed")


async def test_corrupt_object_that_cannot_be_deleted_does_not_affect_others() -> None:
    inner = memory()
    async with opened(SealedBackend(Undeletable(inner))) as sealed:
        items = chunks([1, 2])
        assert list(await sealed.put(items)) == [OK, OK]
        items[0][1][5000] ^= 1
        assert list(await inner.put(items[:1])) == [OK]
        for _ in range(2):
            assert list(await sealed.get(blanks([1, 2]))) == [MISS, OK]


async def test_backend_that_cannot_delete_stays_in_use() -> None:
    seconds = 0.0
    inner = Undeletable(memory())
    async with opened(TierBackend(inner, clock=lambda: seconds)) as guarded:
        items = chunks([1, 2])
        assert list(await guarded.put(items)) == [OK, OK]
        await guarded.delete([items[0][0]])
        for _ in range(10):
            assert list(await guarded.get(blanks([2]))) == [OK]
            assert list(await guarded.put(items[1:])) == [OK]
        assert guarded.tier.available
        assert inner.refusals == 2
        seconds = 31.0
        assert list(await guarded.get(blanks([2]))) == [OK]
        assert inner.refusals == 3, "the deletion is not retried later"


async def test_object_under_another_key_is_a_miss() -> None:
    inner = memory()
    async with opened(SealedBackend(inner)) as sealed:
        await sealed.put(chunks([1]))
        await inner.put([(make_key(2), chunks([1])[0][1])])
        assert list(await sealed.get(blanks([2, 1]))) == [MISS, OK]


async def test_transfer_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes are in the order of the items, and batches do not affect each other."""
    monkeypatch.setattr("kvtier.tiers.batches.BATCH_BYTES", 2 * len(chunks([0])[0][1]))
    inner = FaultyBackend(memory())
    async with opened(SealedBackend(inner)) as sealed:
        items = chunks(range(9))
        items[4][1][0] ^= 1
        assert await in_batches(sealed.put, items, object_length) == [OK] * 4 + [MISS] + [OK] * 4
        assert inner.calls["put"] == 5
        damaged = chunks([7])
        ChunkHeader.parse(damaged[0][1]).seal(damaged[0][1])
        damaged[0][1][5000] ^= 1
        assert list(await inner.put(damaged)) == [OK]
        order = [8, 7, 6, 5, 4, 3, 2, 1, 0]
        views = blanks(order)
        expected = [OK, MISS, OK, OK, MISS, OK, OK, OK, OK]
        assert await in_batches(sealed.get, views, object_length) == expected
        for number, (key, view) in zip(order, views, strict=True):
            assert number in (7, 4) or ChunkHeader.verify(view, key).key == make_key(number)


async def test_object_corrupted_during_a_read_is_a_miss() -> None:
    faulty = FaultyBackend(memory())
    async with opened(SealedBackend(faulty)) as sealed:
        await sealed.put(chunks(range(4)))
        faulty.fault, faulty.only = Fault.FLIP, frozenset({make_key(2)})
        assert list(await sealed.get(blanks(range(4)))) == [OK, OK, MISS, OK]
        assert sealed.corrupt == 1


class Hashing(WrapperBackend):
    """Reports that every payload was hashed as it arrived."""

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """See :meth:`Backend.get`."""
        found = await super().get(items)
        return [Outcome.VERIFIED if outcome is OK else outcome for outcome in found]


async def test_payload_that_the_backend_has_hashed_is_not_hashed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[int] = []
    checksum = header._checksum

    def counted(payload: memoryview) -> bytes:
        hashed.append(len(payload))
        return checksum(payload)

    async with opened(SealedBackend(memory())) as plain:
        await plain.put(chunks([1, 2]))
        monkeypatch.setattr(header, "_checksum", counted)
        assert list(await plain.get(blanks([1, 2]))) == [OK, OK]
        assert len(hashed) == 2
        hashed.clear()
        hashing = Seal(Hashing(plain.inner))
        assert list(await hashing.get(blanks([1, 2, 3]))) == [OK, OK, MISS]
        assert not hashed


async def test_header_is_verified_if_the_backend_has_hashed_the_payload() -> None:
    inner = memory()
    async with opened(SealedBackend(inner)) as sealed:
        ((_, other),) = items = chunks([1])
        await sealed.put(items)
        await inner.put([(make_key(2), other)])
        assert list(await Seal(Hashing(inner)).get(blanks([1, 2]))) == [OK, MISS]


async def test_other_outcomes_are_passed_through() -> None:
    faulty = FaultyBackend(memory(1 << 16))
    async with opened(SealedBackend(faulty)) as sealed:
        big = chunks([1], 1 << 20)
        assert [outcome.value for outcome in await sealed.put([*big, *chunks([2])])] == ["full", "ok"]
        faulty.fault, faulty.only = Fault.FAIL, frozenset({make_key(2)})
        assert list(await sealed.get(blanks([2, 3]))) == [FAILED, MISS]
        assert sealed.corrupt == 0


async def test_header_is_verified_without_a_checksum() -> None:
    inner = memory()
    async with opened(SealedBackend(inner, checksum=False)) as sealed:
        items = chunks([1, 2])
        await sealed.put(items)
        items[0][1][5000] ^= 1
        items[1][1][60] ^= 1
        await inner.put(items)
        assert list(await sealed.get(blanks([1, 2]))) == [OK, MISS]


async def test_corruption_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    faulty = FaultyBackend(memory())
    async with opened(SealedBackend(faulty)) as sealed:
        faulty.fault = Fault.FLIP
        with caplog.at_level(logging.WARNING, "kvtier"):
            for number in range(5):
                await sealed.put(chunks([number]))
                await sealed.get(blanks([number]))
    assert sealed.corrupt == 5
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "deleting corrupt chunk" in caplog.text
    assert ": it has a payload that does not match" in caplog.text


async def test_each_kind_of_corruption_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    inner = memory()
    async with opened(SealedBackend(inner)) as sealed:
        items = chunks([1, 2, 3])
        await sealed.put(items)
        items[0][1][5000] ^= 1
        items[1][1][5000] ^= 1
        items[2][1][60] ^= 1
        await inner.put(items)
        with caplog.at_level(logging.WARNING, "kvtier"):
            assert list(await sealed.get(blanks([1, 2, 3]))) == [MISS] * 3
    logged = [record.getMessage().partition(": it ")[2] for record in caplog.records]
    assert logged == [
        "has a payload that does not match its checksum",
        "has a header that does not match its checksum",
    ]


async def test_scan_yields_only_valid_chunks(tmp_path) -> None:
    inner = disk(tmp_path)
    async with opened(inner):
        good, flipped, renamed, short = chunks(range(4))
        flipped[1][20] ^= 1
        await inner.put([good, flipped, (make_key(7), renamed[1]), (short[0], short[1][:8192])])
        await inner.put([(make_key(8), blank(1))])
    async with opened(SealedBackend(inner)) as sealed:
        found = [stored async for batch in sealed.scan() for stored in batch]
        assert [stored.key for stored in found] == [make_key(0)]
        assert sealed.corrupt == 4
        assert len(list(tmp_path.rglob("*.kv"))) == 1
