"""Each payload is hashed once and each header written once, by the event loop, whoever asks for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import anyio
import pytest

from kvtier.backends.base import Backend, PutItem
from kvtier.backends.sealed import SealedBackend
from kvtier.backends.sealer import Sealer
from kvtier.header import HEADER_BYTES, ChunkHeader, is_sealed
from kvtier.keys import ChunkKey
from kvtier.testing.backend import make_key
from tests.backends.chunks import MISS, OK, blanks, chunk, chunks, memory, opened
from tests.hashing import Hashing

pytestmark = pytest.mark.anyio


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hashing]:
    hashing = Hashing(monkeypatch)
    yield hashing
    hashing.may_go_on.set()


def heads(items: list[PutItem]) -> list[bytes]:
    return [bytes(view[:HEADER_BYTES]) for _, view in items]


class Changing:
    """A header that is sealed right after the first look at it."""

    def __init__(self, before: bytes, after: bytes) -> None:
        self._now, self._after = before, after

    def __len__(self) -> int:
        return HEADER_BYTES

    def __getitem__(self, part: slice) -> bytes:
        seen, self._now = self._now[part], self._after
        return seen


async def test_two_media_share_one_hash_and_neither_stores_before_the_header_is_written(
    hashing: Hashing,
) -> None:
    sealer, media = Sealer(), [memory(), memory()]
    items = chunks(range(3))
    unsealed = heads(items)
    async with opened(media[0]), opened(media[1]):
        hashing.may_go_on.clear()
        async with anyio.create_task_group() as tasks:
            for medium in media:
                tasks.start_soon(SealedBackend(medium, sealer=sealer).put, items)
            await hashing.until_begun(1)
            await anyio.wait_all_tasks_blocked()
            assert heads(items) == unsealed, "headers are written when all is known, not before"
            assert not any(await media[0].contains([key for key, _ in items]))
            hashing.may_go_on.set()
        assert hashing.count == 3
        for medium in media:
            copies = blanks(range(3))
            assert list(await medium.get(copies)) == [OK] * 3
            for key, copy in copies:
                assert is_sealed(copy)
                ChunkHeader.verify(copy, key)


async def test_what_is_sealed_is_not_hashed_again(hashing: Hashing) -> None:
    sealer, items = Sealer(), chunks(range(2))
    first = await sealer.seal(items)
    assert first == await sealer.seal(items)
    assert first == await Sealer().seal(items), "the header tells, not the sealer"
    assert hashing.count == 2


async def test_what_is_in_flight_is_joined_and_the_rest_is_hashed(hashing: Hashing) -> None:
    sealer, items = Sealer(), chunks(range(4))
    hashing.may_go_on.clear()
    results: list[object] = []

    async def seal(part: list[PutItem]) -> None:
        results.append(await sealer.seal(part))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(seal, items[:3])
        await hashing.until_begun(1)
        tasks.start_soon(seal, items[2:])
        await hashing.until_begun(2)
        hashing.may_go_on.set()
    assert hashing.count == 4
    assert sorted(map(len, results)) == [2, 3]  # type: ignore[arg-type]
    for key, view in items:
        ChunkHeader.verify(view, key)
        assert is_sealed(view)


async def test_twice_in_one_batch_is_hashed_once(hashing: Hashing) -> None:
    (item,) = chunks([1])
    assert len(set(await Sealer().seal([item, item]))) == 1
    assert hashing.count == 1


async def test_without_checksums_no_header_is_written(hashing: Hashing) -> None:
    sealer, items = Sealer(checksum=False), chunks(range(2))
    unsealed = heads(items)
    seals = await sealer.seal(items)
    assert [seal and seal.checksum for seal in seals] == [None, None]
    assert hashing.count == 0
    told = await sealer.checksums(items)
    assert hashing.count == 2
    assert heads(items) == unsealed
    assert [seal and seal.checksum for seal in told] == [
        seal and seal.checksum for seal in await Sealer().seal(items)
    ]


@pytest.mark.parametrize("checksum", [True, False])
async def test_a_corrupt_chunk_is_reported_and_spoils_no_other(checksum: bool) -> None:
    sealer, items = Sealer(checksum), chunks(range(3))
    items[1][1][30] ^= 1
    found: list[ChunkKey] = []
    sealer.on_corrupt = lambda key, _chunk: found.append(key)
    seals = await sealer.seal(items)
    assert [seal is None for seal in seals] == [False, True, False]
    assert (sealer.corrupt, found) == (1, [make_key(1)])


async def test_memory_that_is_too_short_for_a_header_is_corrupt() -> None:
    sealer = Sealer()
    assert await sealer.seal([(make_key(1), memoryview(bytearray(10))), (make_key(2), chunk(make_key(2)))])
    assert sealer.corrupt == 1


# Cancelled.


async def test_a_cancelled_call_ends_when_its_memory_is_free_and_who_shares_the_hash_gets_it(
    hashing: Hashing,
) -> None:
    sealer, items = Sealer(), chunks(range(3))
    hashing.may_go_on.clear()
    ended: list[str] = []

    async def first(scope: anyio.CancelScope) -> None:
        with scope:
            await sealer.seal(items)
            ended.append("sealed")
        ended.append("cancelled")

    async def second() -> None:
        assert None not in await sealer.seal(items)
        ended.append("shared")

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()
        tasks.start_soon(first, scope)
        await hashing.until_begun(1)
        tasks.start_soon(second)
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert ended == [], "a thread reads its memory"
        hashing.may_go_on.set()
    assert sorted(ended) == ["cancelled", "shared"]
    assert hashing.count == 3
    assert all(is_sealed(view) for _, view in items)


async def test_what_no_call_wants_any_longer_is_not_hashed_to_the_end(hashing: Hashing) -> None:
    sealer, items = Sealer(), chunks(range(3))
    unsealed = heads(items)
    hashing.may_go_on.clear()
    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def seal() -> None:
            with scope:
                await sealer.seal(items)

        tasks.start_soon(seal)
        await hashing.until_begun(1)
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        hashing.may_go_on.set()
    assert hashing.count == 1
    assert heads(items) == unsealed
    assert None not in await sealer.seal(items), "and it can be sealed later"


# In a medium.


async def test_a_corrupt_chunk_does_not_reach_the_medium() -> None:
    inner: Backend = memory()
    async with opened(SealedBackend(inner)) as sealed:
        items = chunks([1, 2])
        items[0][1][30] ^= 1
        assert list(await sealed.put(items)) == [MISS, OK]
        assert list(await inner.contains([make_key(1), make_key(2)])) == [False, True]


def test_a_header_is_parsed_from_one_look_at_it() -> None:
    """Two looks may see one half from before it was sealed and the other from after."""
    view = chunk(make_key(1))
    before = bytes(view[:HEADER_BYTES])
    ChunkHeader.parse(view).seal(view)
    after = bytes(view[:HEADER_BYTES])
    assert before != after
    assert ChunkHeader.parse(Changing(before, after)).key == make_key(1)  # type: ignore[arg-type]


def test_checking_goes_on_while_a_thread_writes_headers() -> None:
    view = chunk(make_key(1))
    header = ChunkHeader.parse(view)
    written = [header.packed(), header.packed(header.checksum(view))]
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            for head in written:
                view[:HEADER_BYTES] = head

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        for _ in range(20_000):
            assert ChunkHeader.parse(view) == header
    finally:
        ended.set()
        thread.join()
